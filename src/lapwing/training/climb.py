"""Steps uphill on the evidence at the current weights, with the curvature G fixed (Eq. 5):

    log Z(λ, σ) = log p(D | θ, σ) − ½ ‖θ − m‖²_A − ½ [log|w G + A| − log|A|],      A = diag λ_g,  w = σ⁻²

by Adam on (log λ, log σ), with a rate that falls to 0, inside the bounds of `tune/bounds.py`; and hyperparameters of
the network itself, parameters that are no weights, by the slope of `tune/surrogate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import tree
from lapwing.curvature import State
from lapwing.errors import InvalidValue, NotConverged
from lapwing.evidence import log_evidence, scatter
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.priors import Gaussian
from lapwing.training.history import summary
from lapwing.tune.bounds import Box, at_values
from lapwing.tune.surrogate import Surrogate, ascend


@torch.inference_mode(False)
def climb(
    state: State, prior: Gaussian, likelihood: Likelihood, bounds: Box, steps: int, lr: float
) -> tuple[Gaussian, Likelihood, tuple[str, ...]]:
    """The prior and likelihood after some steps of Adam from where they are, and the names of those at a bound."""
    now = {**prior.coordinates(), **likelihood.coordinates()}
    values = {
        key: now[key].reshape(start.shape).clamp(bounds.low[key], bounds.high[key]).requires_grad_()
        for key, start in bounds.start.items()
    }
    value_at = fixed_curvature(state, prior, likelihood)
    optimizer = torch.optim.Adam(list(values.values()), lr=lr, maximize=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            value = value_at(*at_values(prior, likelihood, values))
            finite(float(value.detach()), [*values])
            value.backward()
        optimizer.step()
        with torch.no_grad():
            for key, log_value in values.items():
                log_value.clamp_(bounds.low[key], bounds.high[key])
    final = {key: log_value.detach() for key, log_value in values.items()}
    return *at_values(prior, likelihood, final), bounds.at_bound(final)


def fixed_curvature(state: State, prior: Gaussian, likelihood: Likelihood) -> Callable[[Gaussian, Likelihood], Tensor]:
    """(prior, likelihood) ↦ log Z with what does not move made once. Noise per output mixes the curvature anew."""
    if len(likelihood.curvature_weights(state.factor.kind)) > 1 or state.terms > 1:
        return lambda prior, likelihood: log_evidence(state, prior, likelihood)
    unit = state.structure.operator(state, torch.ones(1, dtype=torch.float64, device=state.tangent.device))
    diagonal = linalg.diagonal(unit) if linalg.is_diagonal(unit) else None
    square = scatter(state, prior)

    def value_at(prior: Gaussian, likelihood: Likelihood) -> Tensor:
        a, w = prior.operator(), likelihood.curvature_weights(state.factor.kind)[0].to(square.device)
        if diagonal is None:
            ratio = linalg.logdet(linalg.shift(linalg.scale(unit, w), a)) - a.logdet()
        else:  # as many hyperparameters as weights, maybe: few kernels a step
            ratio = torch.log1p(w * diagonal / a.dense()).sum()
        quadratic = (prior.precision.reshape(-1) * square).sum()
        return likelihood.log_likelihood(state.statistics) - 0.5 * quadratic - 0.5 * ratio

    return value_at


def finite(value: float, names: list[str]) -> float:
    """The log evidence, which must be finite."""
    if not math.isfinite(value):
        raise NotConverged(
            f"the log evidence became {value} while tuning {names}; hold one of them with fixed=, or check the scale "
            "of the targets. Nothing was changed"
        )
    return value


# -- hyperparameters of the network itself ---------------------------------------------------------------------------


def matched(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The parameters that globs mean, in the order of the model."""
    if not isinstance(patterns, Sequence) or isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise InvalidValue(f"hyperparameters is a list of globs over parameter names, got {patterns!r}")
    names = [n for n, p in model.named_parameters() if p.requires_grad] if patterns else []
    for pattern in patterns:
        if not tree.chosen(pattern, names):
            raise InvalidValue(
                f"hyperparameters: {pattern!r} matches no parameter that requires grad; they are {names}"
            )
    meant = {name for pattern in patterns for name in tree.chosen(pattern, names)}
    found = tuple(n for n in names if n in meant)
    if found and len(found) == len(names):
        raise InvalidValue("hyperparameters= takes every parameter, and leaves no weight to be Bayesian about")
    return found


def weights_beside(model: nn.Module, names: tuple[str, ...]) -> Any:
    """The subset of weights that leaves these parameters out."""
    return [n for n, p in model.named_parameters() if p.requires_grad and n not in names] if names else "all"


def shown(model: nn.Module, names: tuple[str, ...], taken: set[str]) -> dict[str, float]:
    """Their values for a record, apart from those of prior and likelihood, whatever they are called."""
    found = {f"model.{n}" if n in taken else n: model.get_parameter(n) for n in names}
    return {k: v for name, t in found.items() for k, v in summary(name, t).items()}


def move(model: nn.Module, names: tuple[str, ...], objective: Surrogate, data: Any, lr: float) -> None:
    """One pass of Adam over the data moves the model's parameters in place."""
    moved = ascend(objective, names, data, lr)
    bad = [name for name, value in moved.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise NotConverged(f"the evidence's slope in {bad} is not finite; lower hyper_lr, or leave them out")
    with torch.no_grad():
        for name, value in moved.items():
            model.get_parameter(name).copy_(value)
