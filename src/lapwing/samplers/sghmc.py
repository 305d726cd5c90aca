"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin 2014, Eq. 15), with minibatch.py's ĝ, G and ε:

    u ← (1 − a) u + (ε/2) G ĝ(q) + √(aεG) ξ,   q ← q + u,   ξ ~ N(0, I)

a is the friction, 1 − a the momentum of SGD. At a = 1 it is SGLD. Its distribution is π as ε → 0 only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.arguments import as_ranks
from lapwing.errors import InvalidValue
from lapwing.samplers.adaptation import Stage, State
from lapwing.samplers.minibatch import Minibatch
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target, targeted
from lapwing.samplers.walk import Plan, walked
from lapwing.shell import Fitted


@dataclass(frozen=True)
class Sghmc:
    """The transition."""

    discrete: ClassVar[bool] = False
    by: Minibatch
    friction: float  # a

    def __post_init__(self) -> None:
        a = given.real(self.friction, "friction")
        if a.ndim or not 0 < float(a) <= 1:
            raise InvalidValue(f"friction lies in (0, 1], 0.1 for a momentum of 0.9, got {a.tolist()}")

    @property
    def name(self) -> str:
        """With what was added to it."""
        return "".join(("cyclical " * self.by.cyclical, "preconditioned " * (self.by.rmsprop is not None), "sghmc"))

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """The chains' places, at rest."""
        return {**self.by.begin(target, q, streams), "velocity": torch.zeros_like(q)}

    def step(self, target: Target, state: State, streams: Streams, stage: Stage) -> tuple[State, State]:
        """A step of every chain."""
        (eps, warm), metric, q, a = self.by.at(stage), self.by.metric(state), state["q"], self.friction
        noise = (warm * a * eps * metric).sqrt() * streams.normal(q.shape[1])
        u = (1 - a) * state["velocity"] + 0.5 * eps * metric * state["gradient"] + noise
        return self.by.moved(target, {**state, "velocity": u}, q + u, streams), {}


def sghmc(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    step: float,
    friction: float = 0.1,
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
    """The posterior by steps with momentum and minibatches. friction: a, 1 minus the momentum; the other arguments are
    those of `sgld`."""
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        target = targeted(model, data, likelihood, prior, temperature, subset, forward)
        kernel = Sghmc(Minibatch(step, batch, cycles is not None, rmsprop), friction)
        plan = Plan(chains, draws, warmup, thin, 1 if cycles is None else cycles)
    return walked(target, kernel, plan, start, generator, progress, checkpoint, every, ranks)
