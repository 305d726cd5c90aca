"""Random-walk Metropolis (Metropolis et al. 1953):

    q′ = q + ε √v ξ,   ξ ~ N(0, I),        taken with the probability min(1, π(q′)/π(q))

Weights without a gradient (`lw.priors.Bernoulli`) are flipped instead, 1 to ε p of them, any as likely. Both proposals
are as likely forth as back. The warm-up moves ε to an acceptance of 0.234, the best in many dimensions (Roberts, Gelman
& Gilks 1997), and learns v, the coordinates' variances.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing.arguments import as_ranks
from lapwing.samplers.adaptation import Adaptation, Stage, State
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target, targeted
from lapwing.samplers.walk import Plan, walked
from lapwing.shell import Fitted


@dataclass(frozen=True)
class Metropolis:
    """The transition."""

    name: ClassVar[str] = "metropolis"
    discrete: ClassVar[bool] = True
    step_size: float | None

    @property
    def adaptation(self) -> Adaptation:
        """How the warm-up moves ε, a length."""
        return Adaptation(0.234, self.step_size)

    def share(self, target: Target) -> Adaptation:
        """How it moves ε, a share of binary weights."""
        return Adaptation(0.234, self.step_size, (1 / target.split, 1.0))

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """The chains' places and their densities, with what the warm-up learns."""
        return {**self.adaptation.begin(q), "q": q, "log_density": target.value(q)}

    def step(self, target: Target, state: State, streams: Streams, stage: Stage) -> tuple[State, State]:
        """A proposal of every chain, accepted or refused."""
        q, here = state["q"], state["log_density"]
        new = self.proposal(target, q, state, streams)
        there = target.value(new)
        acceptance = accept_probability(there - here)
        taken = streams.uniform() < acceptance
        q, here = torch.where(taken.unsqueeze(1), new, q), torch.where(taken, there, here)
        by = self.share(target) if target.joint.prior.discrete else self.adaptation
        state = by.update({**state, "q": q, "log_density": here}, stage, acceptance, q, self.name, streams)
        return state, {"acceptance": acceptance, "log_density": here}

    def proposal(self, target: Target, q: Tensor, state: State, streams: Streams) -> Tensor:
        """Where each chain would go, (k, d)."""
        step = state["log_step"].exp().to(q.device)
        prior, p = target.joint.prior, target.split
        if not prior.discrete:
            return q + step * state["variance"].sqrt() * streams.normal(q.shape[1])
        most = (step * p).round().clamp(1, p)
        count = 1 + (streams.uniform(1) * most).floor()
        which = streams.uniform(p).argsort(1).argsort(1) < count
        free = q[:, p:] + step * streams.normal(q.shape[1] - p)  # a noise that is sampled too
        return torch.cat([prior.flipped(q[:, :p], which), free], 1)


def accept_probability(log_ratio: Tensor) -> Tensor:
    """min(1, e^r), (k,); 0 where r is not a number."""
    return torch.where(log_ratio.isnan(), 0.0, log_ratio.clamp(max=0).exp())


def metropolis(
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
    """The posterior by random-walk Metropolis: no gradient, one pass over the data a step. For few weights, or binary
    ones. step: ε, which is then not adapted; the other arguments are those of `hmc`."""
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        target = targeted(model, data, likelihood, prior, temperature, subset, forward)
        kernel, plan = Metropolis(step), Plan(chains, draws, warmup, thin)
    return walked(target, kernel, plan, start, generator, progress, checkpoint, every, ranks)
