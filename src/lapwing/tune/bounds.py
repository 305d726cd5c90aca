"""Where hyperparameters may go, where they start, and the record of how they went.

A precision can run away where the data say nothing, and a noise go to zero where they are fitted exactly; so

    λ_g in [1e-6, 1e6] × mean(diag G_g),      σ in [1e-6, 1e3] × standard deviation of the targets

Priors and likelihoods say such bounds of each hyperparameter that they have (`limits`). G_g is taken at the noise that
was given and, where the noise moves too, at that of the residuals: the wider bound.
A search that ends at a bound stops there, warns once, and says so in `at_bound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lapwing.curvature import State
from lapwing.errors import InvalidValue, warn
from lapwing.evidence import mean_curvature
from lapwing.likelihoods import Likelihood
from lapwing.priors import Prior

P = TypeVar("P", bound=Prior)
EDGE = 1e-3  # nats from a bound that count as at it


@dataclass(frozen=True)
class Tuning:
    """How a tuning went: `trace` is the log evidence after each step."""

    method: str
    center: str
    trace: tuple[float, ...]
    iterations: int
    converged: bool
    at_bound: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    passes: int = 0  # over the data; the trained weights as center need none
    residual: float = 0.0  # of v*, see lw.center
    note: str = ""  # what was found about the network, and done
    train_nll: tuple[float, ...] = ()  # of some training data, under the posterior and the network; () if not compared


@dataclass(frozen=True)
class Box:
    """Bounds and a start in log space of the hyperparameters that move: {name: (g,)}."""

    low: dict[str, Tensor]
    high: dict[str, Tensor]
    start: dict[str, Tensor]
    names: dict[str, tuple[str, ...]]  # of each value
    floors: tuple[str, ...] = ()  # whose lower bound is meant: to end there is nothing to warn of

    def at_bound(self, log_values: dict[str, Tensor]) -> tuple[str, ...]:
        """The names of those that are at a bound, but at no floor."""
        out: list[str] = []
        for key, value in log_values.items():
            hit = self._at(self.high, key, value)
            if key not in self.floors:
                hit = hit | self._at(self.low, key, value)
            labels = self.names.get(key) or ("",) * value.numel()
            out += [f"{key}[{labels[i]}]" if labels[i] else key for i in hit.reshape(-1).nonzero().flatten().tolist()]
        return tuple(dict.fromkeys(out))

    def at_floor(self, log_values: dict[str, Tensor]) -> tuple[str, ...]:
        """The names of those that are at a floor."""
        return tuple(key for key in self.floors if bool(self._at(self.low, key, log_values[key]).any()))

    def _at(self, bound: dict[str, Tensor], key: str, value: Tensor) -> Tensor:
        return (value - bound[key]).abs() < EDGE


def box(state: State, prior: Prior, likelihood: Likelihood, fixed: tuple[str, ...]) -> Box:
    """What prior and likelihood say of where their hyperparameters may go, but for the fixed."""
    known = {**prior.hyperparameters, **likelihood.hyperparameters}
    shared = prior.hyperparameters.keys() & likelihood.hyperparameters.keys()
    if shared:
        raise InvalidValue(f"prior and likelihood both call a hyperparameter {sorted(shared)}; rename the prior's")
    unknown = [name for name in fixed if name not in known]
    if unknown:
        raise InvalidValue(f"fixed={unknown} names no hyperparameter; they are {list(known)}")
    if all(name in fixed for name in known):
        raise InvalidValue(f"all hyperparameters {list(known)} are fixed; there is nothing to tune")
    low, high, start = {}, {}, {}
    noises = [likelihood]  # the curvature that bounds λ is that of the noise: of the user's, and of the residuals'
    for name, limits in likelihood.limits(state.statistics).items():
        if name not in fixed:
            low[name], high[name], start[name] = limits
            noises.append(likelihood.moved({name: start[name]}))
    if not all(name in fixed for name in prior.hyperparameters):
        curved = torch.stack([mean_curvature(state, prior, noise) for noise in noises])
        for name, limits in prior.limits(curved, state.tangent.theta.to(torch.float64)).items():
            if name not in fixed:
                low[name], high[name], start[name] = limits
    return Box(low, high, start, prior.labels())


def at_values(prior: P, likelihood: Likelihood, log_values: dict[str, Tensor]) -> tuple[P, Likelihood]:
    """The prior and likelihood at these coordinates of their hyperparameters, by name."""
    parts = [{k: log_values[k] for k in one.hyperparameters if k in log_values} for one in (prior, likelihood)]
    return prior.moved(parts[0]) if parts[0] else prior, likelihood.moved(parts[1]) if parts[1] else likelihood


def warn_bound(at_bound: tuple[str, ...], why: str = "the data do not determine it") -> None:
    """Warn of a search that ended at a bound, and name the first four."""
    if at_bound:
        shown = ", ".join(at_bound[:4]) + (f" and {len(at_bound) - 4} more" if len(at_bound) > 4 else "")
        warn(f"tuning stopped at a bound for {shown}: {why} (see la.tuning.at_bound)")
