"""The Metropolis-adjusted Langevin algorithm (Roberts & Tweedie 1996):

    q′ = q + (ε/2) v ∇ log π(q) + √(εv) ξ,   ξ ~ N(0, I)
    taken with the probability min(1, π(q′) g(q | q′) / (π(q) g(q′ | q))),   g(q′ | q) the density of that normal

It is one leapfrog step of HMC, ε its square. The warm-up moves ε to an acceptance of 0.574, and learns v.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing.arguments import as_ranks
from lapwing.samplers.adaptation import Adaptation, Stage, State
from lapwing.samplers.metropolis import accept_probability
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target, targeted
from lapwing.samplers.walk import Plan, walked
from lapwing.shell import Fitted


def log_proposal(new: Tensor, q: Tensor, gradient: Tensor, step: Tensor, variance: Tensor) -> Tensor:
    """log g(q′ | q) but for a constant, (k,)."""
    away = new - q - 0.5 * step * variance * gradient
    return -0.5 * (away.square() / (step * variance)).sum(1)


@dataclass(frozen=True)
class Mala:
    """The transition."""

    name: ClassVar[str] = "mala"
    discrete: ClassVar[bool] = False
    step_size: float | None

    @property
    def adaptation(self) -> Adaptation:
        """How the warm-up moves ε and v."""
        return Adaptation(0.574, self.step_size)

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """The chains' places, densities and gradients, with what the warm-up learns."""
        value, g = target.value_and_grad(q)
        return {**self.adaptation.begin(q), "q": q, "log_density": value, "gradient": g}

    def step(self, target: Target, state: State, streams: Streams, stage: Stage) -> tuple[State, State]:
        """A Langevin step of every chain, accepted or refused."""
        q, here, g, v = (state[name] for name in ("q", "log_density", "gradient", "variance"))
        step = state["log_step"].exp().to(q)
        new = q + 0.5 * step * v * g + (step * v).sqrt() * streams.normal(q.shape[1])
        there, slope = target.value_and_grad(new)
        back, forth = log_proposal(q, new, slope, step, v), log_proposal(new, q, g, step, v)
        acceptance = accept_probability(there + back - here - forth)
        taken = streams.uniform() < acceptance
        row = taken.unsqueeze(1)
        q, here, g = torch.where(row, new, q), torch.where(taken, there, here), torch.where(row, slope, g)
        state = {**state, "q": q, "log_density": here, "gradient": g}
        return self.adaptation.update(state, stage, acceptance, q, self.name, streams), {
            "acceptance": acceptance,
            "log_density": here,
        }


def mala(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    prior: Any = 1.0,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 500,
    temperature: float = 1.0,
    step: float | None = None,
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
    """The posterior by adjusted Langevin steps, one gradient over all data each. step: ε, which is then not adapted;
    the other arguments are those of `hmc`."""
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        target = targeted(model, data, likelihood, prior, temperature, subset, forward)
        kernel, plan = Mala(step), Plan(chains, draws, warmup, thin)
    return walked(target, kernel, plan, start, generator, progress, checkpoint, every, ranks)
