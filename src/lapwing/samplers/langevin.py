"""Unadjusted Langevin dynamics (Parisi 1981):

    q ← q + (ε/2) ∇ log π(q) + √ε ξ,   ξ ~ N(0, I)

Nothing is refused, so its distribution is π as ε → 0 only: of N(0, 1) it has the variance 1/(1 − ε/4), and past ε = 4
over the largest curvature it diverges.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing.arguments import as_ranks
from lapwing.samplers.adaptation import Stage, State, check_step
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target, targeted
from lapwing.samplers.walk import Plan, walked
from lapwing.shell import Fitted


@dataclass(frozen=True)
class Langevin:
    """The transition."""

    name: ClassVar[str] = "langevin"
    discrete: ClassVar[bool] = False
    step_size: float

    def __post_init__(self) -> None:
        check_step(self.step_size)

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """The chains' places, densities and gradients."""
        value, g = target.value_and_grad(q)
        return {"q": q, "log_density": value, "gradient": g}

    def step(self, target: Target, state: State, streams: Streams, stage: Stage) -> tuple[State, State]:
        """A step of every chain."""
        q, eps = state["q"], self.step_size
        q = q + 0.5 * eps * state["gradient"] + eps**0.5 * streams.normal(q.shape[1])
        value, g = target.value_and_grad(q)
        return {"q": q, "log_density": value, "gradient": g}, {"log_density": value}


def langevin(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    step: float,
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
    """The posterior by unadjusted Langevin steps, one gradient over all data each. step: ε, which nothing adapts: halve
    it until predictions stay as they are; the other arguments are those of `hmc`."""
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        target = targeted(model, data, likelihood, prior, temperature, subset, forward)
        kernel, plan = Langevin(step), Plan(chains, draws, warmup, thin)
    return walked(target, kernel, plan, start, generator, progress, checkpoint, every, ranks)
