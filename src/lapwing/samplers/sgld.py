"""Stochastic gradient Langevin dynamics (Welling & Teh 2011), with minibatch.py's ĝ, G and ε:

    q ← q + (ε/2) G ĝ(q) + √(εG) ξ,   ξ ~ N(0, I)

Its distribution is π as ε → 0 only: a step of a given size blurs it, and the minibatch's noise widens it by more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing.arguments import as_ranks
from lapwing.samplers.adaptation import Stage, State
from lapwing.samplers.minibatch import Minibatch
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target, targeted
from lapwing.samplers.walk import Plan, walked
from lapwing.shell import Fitted


@dataclass(frozen=True)
class Sgld:
    """The transition."""

    discrete: ClassVar[bool] = False
    by: Minibatch

    @property
    def name(self) -> str:
        """With what was added to it."""
        return "".join(("cyclical " * self.by.cyclical, "preconditioned " * (self.by.rmsprop is not None), "sgld"))

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """The chains' places."""
        return self.by.begin(target, q, streams)

    def step(self, target: Target, state: State, streams: Streams, stage: Stage) -> tuple[State, State]:
        """A step of every chain."""
        (eps, warm), metric, q = self.by.at(stage), self.by.metric(state), state["q"]
        noise = (warm * eps * metric).sqrt() * streams.normal(q.shape[1])
        return self.by.moved(target, state, q + 0.5 * eps * metric * state["gradient"] + noise, streams), {}


def sgld(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    step: float,
    batch: int = 32,
    cycles: int | None = None,
    rmsprop: float | None = None,
    prior: Any = 1.0,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 500,
    temperature: float = 1.0,
    thin: int = 1,
    start: Any = "trained",
    subset: Any = "all",
    forward: Any = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    process_group: Any = None,
) -> Fitted:
    """The posterior by Langevin steps with minibatches.

    step: ε, the variance of a step's noise; about a hundredth of the posterior's variances is a start (theirs are near
    1/n where data say much). batch: examples a step, of each chain. cycles: cosine cycles of the step size, each with
    its part of warm-up and draws. rmsprop: the decay α of the preconditioner, such as 0.99; ε is then in its unit. The
    other arguments are those of `hmc`; a draw is the last of `thin` steps."""
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        target = targeted(model, data, likelihood, prior, temperature, subset, forward)
        kernel = Sgld(Minibatch(step, batch, cycles is not None, rmsprop))
        plan = Plan(chains, draws, warmup, thin, 1 if cycles is None else cycles)
    return walked(target, kernel, plan, start, generator, progress, checkpoint, every, ranks)
