"""The one loop of every sampler: warm-up, draws, chains that diverge, progress, checkpoints.

    state = kernel.begin(target, q, streams)                    all that changes: "q" (k, d), the chains' places, and
                                                                "log_density" (k,), log π there or an estimate of it
    state, told = kernel.step(target, state, streams, stage)    one transition; told {name: (k,)} of each chain

A walk is warm-up and then draws, or `cycles` of both in turn. A chain has diverged where its place is not finite, or
log π there is under that of its start by more than LOST (d + n/T): draws of a posterior are under its mode by d/2 on
average. It stops, is named, and keeps the draws that it has. Ranks walk a share of the chains each: seeds are a chain's
own, the warm-up learns from all of them, and their draws are gathered. Shapes: k chains, d coordinates, s draws in all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lapwing import given
from lapwing.arguments import as_start
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue, NotConverged, Unsupported, warn
from lapwing.likelihoods import Several
from lapwing.posterior import Chains
from lapwing.samplers.adaptation import Stage, State
from lapwing.samplers.journal import WalkJournal, identity, opened
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target
from lapwing.shell import Fitted

LOST = 1000.0  # nats for each coordinate and example: what a step would leave that spreads chains 45 times too wide
SAME = "Call with the same network, data and arguments on every rank, and with generators in the same state"


class TransitionKernel(Protocol):
    """One method's transition; its fields are what it was told."""

    @property
    def name(self) -> str:
        """What it is called in messages and in `repr`."""

    discrete: ClassVar[bool]  # whether it can move weights that have no gradient

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """All that changes in a walk, at its start q (k, d)."""

    def step(self, target: Target, state: State, streams: Streams, stage: Stage) -> tuple[State, State]:
        """The state after one transition of every chain, and what to tell of it, (k,) each."""


@dataclass(frozen=True)
class Plan:
    """How long to walk: of each of `cycles` equal parts, a share of the warm-up and of the draws of each chain."""

    chains: int
    draws: int
    warmup: int
    thin: int = 1
    cycles: int = 1

    def __post_init__(self) -> None:
        for name, least in (("chains", 1), ("draws", 1), ("warmup", 0), ("thin", 1), ("cycles", 1)):
            given.whole(getattr(self, name), name, least)
        if self.draws % self.cycles or self.warmup % self.cycles:
            raise InvalidValue(
                f"{self.cycles} cycles need draws and warmup that they divide, got {self.draws} and {self.warmup}"
            )

    @property
    def steps(self) -> int:
        """Of a chain, in all."""
        return self.warmup + self.draws * self.thin

    def stage(self, t: int) -> Stage:
        """Where step t lies in its cycle."""
        return Stage(t % (self.steps // self.cycles), self.warmup // self.cycles, self.steps // self.cycles)

    def keeps(self, t: int) -> bool:
        """Whether the place after step t is a draw."""
        stage = self.stage(t)
        return not stage.warming and (stage.t + 1 - stage.warmup) % self.thin == 0


def walked(
    target: Target,
    kernel: TransitionKernel,
    plan: Plan,
    start: Any,
    generator: torch.Generator | None,
    progress: bool,
    checkpoint: str | os.PathLike[str] | None,
    every: int | None,
    ranks: Ranks,
) -> Fitted:
    """The posterior that a kernel's chains find."""
    with ranks.sharing_errors("the chains"):
        return _walked(target, kernel, plan, start, generator, progress, checkpoint, every, ranks)


def _walked(
    target: Target,
    kernel: TransitionKernel,
    plan: Plan,
    start: Any,
    generator: torch.Generator | None,
    progress: bool,
    checkpoint: str | os.PathLike[str] | None,
    every: int | None,
    ranks: Ranks,
) -> Fitted:
    prior, tangent = target.joint.prior, target.joint.tangent
    if prior.discrete and not kernel.discrete:
        raise Unsupported(
            f"{kernel.name} follows a gradient, and the weights of {type(prior).__name__} have none; use "
            "lw.samplers.metropolis, which flips them"
        )
    generator = given.generator(generator)
    if not ranks.alone:
        _check_ranks(ranks, plan.chains, checkpoint)
        with ranks.sharing_errors("reading the data"):
            known = identity(target, kernel, plan, generator, start)
        ranks.agree({what: str(value) for what, value in known.items()}, SAME)
    with opened(target, kernel, plan, generator, start, checkpoint, every) as journal, target.running():
        streams = Streams.of(generator, plan.chains, tangent.device, ranks)
        q = target.start(as_start(start, tangent, prior, plan.chains, generator))
        found = Walk(target, kernel, plan, streams, journal)
        found.run(q[ranks.share(plan.chains)], progress and ranks.rank == 0)
        return found.fitted()


def _check_ranks(ranks: Ranks, chains: int, checkpoint: Any) -> None:
    if chains < ranks.size:
        raise InvalidValue(f"chains={chains} for {ranks.size} ranks; give a chain at least to each")
    if checkpoint is not None:
        raise Unsupported(
            "checkpoint= is of one process, and process_group= spreads the chains over several; leave either away, or "
            "walk fewer chains at a time and join them by lw.mixture"
        )


@dataclass
class Walk:
    """Chains under way."""

    target: Target
    kernel: TransitionKernel
    plan: Plan
    streams: Streams
    journal: WalkJournal | None
    state: State = field(default_factory=dict)
    origin: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  # (k,) log π at the start
    alive: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # (k,) chains that go on
    lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # (k,) draws of each
    kept: list[Tensor] = field(default_factory=list)  # (k, d) for each draw
    told: dict[str, list[Tensor]] = field(default_factory=dict)
    first: int = 0  # the step to begin with

    def run(self, q: Tensor, progress: bool) -> None:
        """From q (k, d) to the end, or until every chain has diverged."""
        self._begin(q)
        for t in self._steps(progress):
            state, told = self.kernel.step(self.target, self.state, self.streams, self.plan.stage(t))
            fine = torch.isfinite(state["q"]).all(1) & (state["log_density"] >= self._floor()) & self.alive
            self._name_diverged(t, self.alive & ~fine, state["log_density"])
            self.alive, self.state = fine, {**state, "q": torch.where(fine.unsqueeze(1), state["q"], self.state["q"])}
            if self.plan.keeps(t):
                self.kept.append(self.state["q"])
                self.lengths += fine
                self._tell(told)
            if self.streams.ranks.alone and not bool(fine.any()):
                break  # with others, in whose warm-up every rank takes part, it goes on in step
            if self.journal is not None:
                self.journal.wrote(t + 1, self)

    def _begin(self, q: Tensor) -> None:
        self.alive = torch.ones(len(q), dtype=torch.bool, device=q.device)
        self.lengths = torch.zeros(len(q), dtype=torch.int64, device=q.device)
        if self.journal is not None and self.journal.found is not None:
            self.first = self.journal.resume(self)
            return
        value = self.target.value(q)
        if not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).nonzero()[0])
            raise InvalidValue(
                f"chain {self._number(bad)} starts where log p(D, θ) is {float(value[bad])}; give start= weights at "
                "which it is finite, and check inputs and targets"
            )
        self.origin, self.state = value, self.kernel.begin(self.target, q, self.streams)

    def _floor(self) -> Tensor:
        """What log π of a chain may fall to, (k,)."""
        target = self.target
        return self.origin - LOST * (self.state["q"].shape[1] + target.examples.n / target.temperature)

    def _steps(self, progress: bool) -> Iterator[int]:
        steps = range(self.first, self.plan.steps)
        return iter(
            tqdm(steps, self.kernel.name, self.plan.steps, initial=self.first, disable=not progress, leave=False)
        )

    def _number(self, chain: int) -> int:
        """What a chain is called, from 1 on, over all ranks."""
        return self.streams.ranks.share(self.plan.chains).start + chain + 1

    def _tell(self, told: State) -> None:
        for name, value in told.items():
            self.told.setdefault(name, []).append(value)

    def _name_diverged(self, t: int, which: Tensor, log_density: Tensor) -> None:
        for chain in which.nonzero().flatten().tolist():
            warn(
                f"chain {self._number(chain)} of {self.kernel.name} diverged in step {t + 1} of {self.plan.steps}: its "
                f"log density went from {float(self.origin[chain]):.4g} to {float(log_density[chain]):.4g}; it is "
                f"stopped, and its {int(self.lengths[chain])} draws so far are kept; take a smaller step",
            )

    def fitted(self) -> Fitted:
        """What was found, as a network with a posterior."""
        ranks, mine = self.streams.ranks, tuple(self.lengths.tolist())
        lengths = tuple(ranks.whole(self.lengths, "the lengths of chains").tolist())
        if not sum(lengths):
            raise NotConverged(f"every chain of {self.kernel.name} diverged before its first draw; take a smaller step")
        own = {"q": _in_order(self.kept, mine), "told": {k: _in_order(v, mine) for k, v in self.told.items()}}
        found = ranks.joined([own], "the draws of chains")
        told = {name: torch.cat([one["told"][name] for one in found]) for name in self.told}
        with torch.no_grad():
            weights, scales, values = self.target.named(torch.cat([one["q"] for one in found]))
        joint = self.target.joint
        chains = Chains(joint.tangent, weights, None, lengths, told, {**scales, **values})
        likelihood = Several(joint.likelihood, values) if values else None
        cold = "" if self.target.temperature == 1 else f" at temperature {self.target.temperature:g}"
        return joint.fitted(chains, f"{self.kernel.name}{cold}", likelihood)


def _in_order(values: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """What was kept of every chain, a (k, ...) for each draw, one chain after the other: (s, ...)."""
    by_chain = torch.stack(values, 1)  # (k, draws, ...)
    return torch.cat([mine[:n] for mine, n in zip(by_chain, lengths, strict=True)])
