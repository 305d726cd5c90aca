"""The one loop of every sampler: warm-up, draws, chains that diverge, progress, checkpoints.

    state = kernel.begin(target, q)                             all that changes; its "q" (k, d): the chains' places
    state, told = kernel.step(target, state, streams, stage)    one transition; told {name: (k,)} of each chain

A walk is warm-up and then draws, or `cycles` of both in turn. A chain whose place is no longer finite has diverged: it
stops, is named, and keeps the draws that it has. Shapes: k chains, d coordinates, s draws in all.
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
from lapwing.errors import InvalidValue, NotConverged, Unsupported, warn
from lapwing.likelihoods import Several
from lapwing.posterior import Chains
from lapwing.samplers.adaptation import Stage, State
from lapwing.samplers.journal import WalkJournal, opened
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target
from lapwing.shell import Fitted


class TransitionKernel(Protocol):
    """One method's transition; its fields are what it was told."""

    @property
    def name(self) -> str:
        """What it is called in messages and in `repr`."""

    discrete: ClassVar[bool]  # whether it can move weights that have no gradient

    def begin(self, target: Target, q: Tensor) -> State:
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
) -> Fitted:
    """The posterior that a kernel's chains find."""
    prior, tangent = target.joint.prior, target.joint.tangent
    if prior.discrete and not kernel.discrete:
        raise Unsupported(
            f"{kernel.name} follows a gradient, and the weights of {type(prior).__name__} have none; use "
            "lw.samplers.metropolis, which flips them"
        )
    generator = given.generator(generator)
    with opened(target, kernel, plan, generator, start, checkpoint, every) as journal, target.running():
        streams = Streams.of(generator, plan.chains, tangent.device)
        q = target.start(as_start(start, tangent, prior, plan.chains, generator))
        found = Walk(target, kernel, plan, streams, journal)
        found.run(q, progress)
        return found.fitted()


@dataclass
class Walk:
    """Chains under way."""

    target: Target
    kernel: TransitionKernel
    plan: Plan
    streams: Streams
    journal: WalkJournal | None
    state: State = field(default_factory=dict)
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
            fine = torch.isfinite(state["q"]).all(1) & self.alive
            self._name_diverged(t, self.alive & ~fine)
            self.alive, self.state = fine, {**state, "q": torch.where(fine.unsqueeze(1), state["q"], self.state["q"])}
            if self.plan.keeps(t):
                self.kept.append(self.state["q"])
                self.lengths += fine
                self._tell(told)
            if not bool(fine.any()):
                break
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
                f"chain {bad + 1} starts where log p(D, θ) is {float(value[bad])}; give start= weights at which it is "
                "finite, and check inputs and targets"
            )
        self.state = self.kernel.begin(self.target, q)

    def _steps(self, progress: bool) -> Iterator[int]:
        steps = range(self.first, self.plan.steps)
        return iter(
            tqdm(steps, self.kernel.name, self.plan.steps, initial=self.first, disable=not progress, leave=False)
        )

    def _tell(self, told: State) -> None:
        for name, value in told.items():
            self.told.setdefault(name, []).append(value)

    def _name_diverged(self, t: int, which: Tensor) -> None:
        for chain in which.nonzero().flatten().tolist():
            warn(
                f"chain {chain + 1} of {self.kernel.name} diverged in step {t + 1} of {self.plan.steps}: its weights "
                f"are not finite; it is stopped, and its {int(self.lengths[chain])} draws so far are kept; take a "
                "smaller step",
            )

    def fitted(self) -> Fitted:
        """What was found, as a network with a posterior."""
        if not int(self.lengths.sum()):
            raise NotConverged(f"every chain of {self.kernel.name} diverged before its first draw; take a smaller step")
        lengths = tuple(self.lengths.tolist())
        told = {name: _in_order(values, lengths) for name, values in self.told.items()}
        with torch.no_grad():
            weights, scales, values = self.target.named(_in_order(self.kept, lengths))
        joint = self.target.joint
        chains = Chains(joint.tangent, weights, None, tuple(n for n in lengths if n), told, {**scales, **values})
        likelihood = Several(joint.likelihood, values) if values else None
        cold = "" if self.target.temperature == 1 else f" at temperature {self.target.temperature:g}"
        return joint.fitted(chains, f"{self.kernel.name}{cold}", likelihood)


def _in_order(values: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """What was kept of every chain, a (k, ...) for each draw, one chain after the other: (s, ...)."""
    by_chain = torch.stack(values, 1)  # (k, draws, ...)
    return torch.cat([mine[:n] for mine, n in zip(by_chain, lengths, strict=True)])
