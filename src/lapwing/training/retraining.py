"""MacKay's original: train to the end, update λ by γ, retrain, repeat.

    θ ← argmin −Σ log p(y | f(x, θ)) + ½ ‖θ − m‖²_A       (the user's `train`)
    λ_g ← γ_g / ‖θ_g − m_g‖²,   σ² ← SSE / (N·C − γ)      (Eq. 7)

until |γ_g − λ_g ‖θ_g − m_g‖²| ≤ tolerance · max(1, γ_g) and log σ moves by less than the tolerance. Where training ends
at a mode, a fixed point is a stationary point of the evidence.

D. MacKay. A practical Bayesian framework for backpropagation networks. Neural Computation, 1992.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.api import Laplace, laplace
from lapwing.curvature import State
from lapwing.data import as_batches
from lapwing.errors import InvalidValue, LapwingWarning, NotConverged
from lapwing.evidence import effective_dimension, noise_slope, scatter
from lapwing.likelihoods import Likelihood
from lapwing.priors import Gaussian
from lapwing.training.history import EvidenceRecord, History, recorded
from lapwing.training.loss import TrainingLoss, begin
from lapwing.tune.bounds import Box, at_values, box

TOLERANCE = 1e-3
ROUNDS = 50


def mackay(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    train: Callable[[nn.Module, TrainingLoss], object],
    *,
    structure: Any = "auto",
    prior: Any = 1.0,
    factor: Any = "auto",
    fixed: tuple[str, ...] = (),
    tolerance: float = TOLERANCE,
    rounds: int = ROUNDS,
    forward: Any = None,
) -> tuple[Laplace, History]:
    """Alternate the user's training and MacKay's update; the Laplace object at the end, and the record of each round.

    train(model, penalty): trains the model in place, to the end. `penalty(model)` is ½ ‖θ − m‖²_A / N, to be added to
    a mean negative log-likelihood at the noise `penalty.likelihood`; `penalty.loss(model(x), y)` is their sum.
    The other arguments are those of `lw.laplace`. Rounds that run out are a warning, and `history.converged` is False.
    """
    if not callable(train):
        raise InvalidValue(f"train must be a function train(model, penalty), got {type(train).__name__}")
    given.whole(rounds, "rounds", 1)
    if not tolerance > 0:
        raise InvalidValue(f"tolerance must be positive, got {tolerance!r}")
    fixed = (fixed,) if isinstance(fixed, str) else tuple(fixed)
    batches = as_batches(data)
    settings = {"structure": structure, "factor": factor, "subset": "all", "forward": forward}
    objective = begin(model, batches, likelihood, prior, fixed, **settings)
    first = objective.likelihood  # its noise bounds the search: bounds must not move with the noise
    records: list[EvidenceRecord] = []
    for number in range(1, rounds + 1):
        train(model, objective)
        la = laplace(model, batches, objective.likelihood, prior=objective.prior, **settings)
        bounds = box(la.state, objective.prior, first, fixed)
        wanted, settled = _update(la.state, objective.prior, objective.likelihood, bounds, tolerance)
        records.append(_record(number, la.state, objective, bounds.at_bound(wanted)))
        if settled:
            return la, History(tuple(records), converged=True)
        objective = _moved(objective, wanted)
    warnings.warn(
        f"MacKay's updates did not settle to {tolerance:g} in {rounds} rounds; train longer in each, give more rounds, "
        "or a larger tolerance",
        LapwingWarning,
        stacklevel=2,
    )
    return la, History(tuple(records), converged=False)


def _moved(objective: TrainingLoss, log_values: dict[str, Tensor]) -> TrainingLoss:
    prior, likelihood = at_values(objective.prior, objective.likelihood, log_values)
    return TrainingLoss(objective.model, prior, likelihood, objective.n)


def _update(
    state: State, prior: Gaussian, likelihood: Likelihood, bounds: Box, tolerance: float
) -> tuple[dict[str, Tensor], bool]:
    """log γ_g/‖θ_g‖² and the noise's, inside their bounds; and whether they stand still."""
    wanted: dict[str, Tensor] = {}
    settled, at = True, {**prior.coordinates(), **likelihood.coordinates()}
    with torch.inference_mode(False):
        if any(name in bounds.start for name in prior.hyperparameters):
            found = effective_dimension(state, prior, likelihood), scatter(state, prior)
            wanted |= {name: value for name, value in prior.wanted(*found).items() if name in bounds.start}
            for name, gap in prior.gap(*found).items():
                settled &= name not in wanted or not bool(
                    ((gap > tolerance) & _moves(at[name], wanted, name, bounds)).any()
                )
        for name in likelihood.hyperparameters:
            if name in bounds.start:
                wanted |= likelihood.wanted(state.statistics, noise_slope(state, prior, likelihood, name))
                far = (wanted[name] - at[name]).abs() > tolerance
                settled &= not bool((far & _moves(at[name], wanted, name, bounds)).any())
    for key, value in wanted.items():
        if not bool(torch.isfinite(value).all()):
            raise NotConverged(f"MacKay's update of {key} is not finite; check the weights and the curvature")
        wanted[key] = value.clamp(bounds.low[key], bounds.high[key])
    return wanted, settled


def _moves(now: Tensor, wanted: dict[str, Tensor], key: str, bounds: Box) -> Tensor:
    """Whether the update moves a value once it is held inside its bounds."""
    inside = wanted[key].clamp(bounds.low[key], bounds.high[key])
    return (inside - now.reshape(inside.shape)).abs() > 1e-12


def _record(number: int, state: State, objective: TrainingLoss, at_bound: tuple[str, ...]) -> EvidenceRecord:
    prior, likelihood = objective.prior, objective.likelihood
    with torch.no_grad():
        loss = prior.price(state.tangent.theta) - likelihood.log_likelihood(state.statistics)
    return recorded(number, state, prior, likelihood, at_bound, float(loss) / state.n, {})
