"""Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011). With H(q, m) = −log π(q) + ½ Σ v m², m ~ N(0, 1/v):

    m ← m + (ε/2) ∇ log π(q),   q ← q + ε v m,   m ← m + (ε/2) ∇ log π(q)        L times: the leapfrog

and (q′, m′) is taken with the probability min(1, e^{H − H′}). The leapfrog is reversible and keeps volumes, so that π
stays as it is; its error in H is of order ε². v are the inverse masses, the coordinates' variances in the warm-up,
which moves ε to an acceptance of 0.8. Each trajectory's ε is stretched by up to a fifth either way, so that no L·ε is
a period of the target. Shapes: q, m (k, d).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.arguments import as_ranks
from lapwing.samplers.adaptation import Adaptation, Stage, State
from lapwing.samplers.metropolis import accept_probability
from lapwing.samplers.streams import Streams
from lapwing.samplers.target import Target, targeted
from lapwing.samplers.walk import Plan, walked
from lapwing.shell import Fitted

JITTER = 0.2
DIVERGED = 1000.0  # an error in H beyond which a trajectory has left the level of its energy, as in Stan


class Place(NamedTuple):
    """Of every chain: where it is, its momentum, and log π with its gradient."""

    q: Tensor  # (k, d)
    momentum: Tensor  # (k, d)
    log_density: Tensor  # (k,)
    gradient: Tensor  # (k, d)

    def energy(self, variance: Tensor) -> Tensor:
        """H, (k,)."""
        return 0.5 * (variance * self.momentum.square()).sum(1) - self.log_density


def leapfrog(
    value_and_grad: Callable[[Tensor], tuple[Tensor, Tensor]], at: Place, step: Tensor, variance: Tensor, steps: int
) -> Place:
    """So many steps of length ε (k, 1), with half-kicks at both ends."""
    q, m, value, g = at
    m, stride = m + 0.5 * step * g, step * variance
    for i in range(steps):
        q = q + stride * m
        value, g = value_and_grad(q)
        m = m + (step if i < steps - 1 else 0.5 * step) * g
    return Place(q, m, value, g)


@dataclass(frozen=True)
class Hmc:
    """The transition."""

    name: ClassVar[str] = "hmc"
    discrete: ClassVar[bool] = False
    leapfrog: int
    step_size: float | None

    def __post_init__(self) -> None:
        given.whole(self.leapfrog, "leapfrog", 1)

    @property
    def adaptation(self) -> Adaptation:
        """How the warm-up moves ε and v."""
        return Adaptation(0.8, self.step_size)

    def begin(self, target: Target, q: Tensor, streams: Streams) -> State:
        """The chains' places, densities and gradients, with what the warm-up learns."""
        value, g = target.value_and_grad(q)
        return {**self.adaptation.begin(q), "q": q, "log_density": value, "gradient": g}

    def step(self, target: Target, state: State, streams: Streams, stage: Stage) -> tuple[State, State]:
        """A trajectory of every chain, its end accepted or refused."""
        variance, q = state["variance"], state["q"]
        stretch = 1 + JITTER * (2 * streams.uniform(1) - 1)
        at = Place(q, streams.normal(q.shape[1]) / variance.sqrt(), state["log_density"], state["gradient"])
        end = leapfrog(target.value_and_grad, at, state["log_step"].exp().to(q) * stretch, variance, self.leapfrog)
        before, after = at.energy(variance), end.energy(variance)
        acceptance = accept_probability(before - after)
        taken = streams.uniform() < acceptance
        row, value = taken.unsqueeze(1), torch.where(taken, end.log_density, at.log_density)
        moved = {"q": torch.where(row, end.q, q), "gradient": torch.where(row, end.gradient, at.gradient)}
        state = {**state, **moved, "log_density": value}
        state = self.adaptation.update(state, stage, acceptance, state["q"], self.name, streams)
        divergent = ~(after - before <= DIVERGED)
        energy = torch.where(taken, after, before)
        return state, {"acceptance": acceptance, "energy": energy, "divergent": divergent, "log_density": value}


def hmc(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    prior: Any = 1.0,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 500,
    temperature: float = 1.0,
    leapfrog: int = 20,
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
    """The posterior of a network's weights by Hamiltonian Monte Carlo, all chains at once.

    data, likelihood, prior, subset, forward: as in `lw.laplace`; the prior may be any proper one, and a noise with a
    density (`lw.likelihoods.Gaussian(noise=lw.priors.Gamma(0.5, 1.0))`) is sampled with the weights.
    draws, warmup: of each chain; a draw is the last of `thin` transitions, of `leapfrog` gradients over all data each.
    temperature: T of p(D, θ)^{1/T}. step: ε, which is then not adapted, nor are masses. start: the "trained" weights
    for every chain, draws of the "prior" (R-hat is a test of chains that begin apart), or weights (chains, p).
    checkpoint: a file that is written after `every` (100) transitions; a call that finds it goes on to the same bits.
    process_group: "world" or a torch.distributed group, each process of which calls this with the same arguments and
    all the data: it walks a share of the chains, and has the draws of all of them in the end.
    """
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        target = targeted(model, data, likelihood, prior, temperature, subset, forward)
        kernel, plan = Hmc(leapfrog, step), Plan(chains, draws, warmup, thin)
    return walked(target, kernel, plan, start, generator, progress, checkpoint, every, ranks)
