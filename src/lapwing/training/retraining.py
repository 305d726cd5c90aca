"""MacKay's original: train to the end, update λ by γ, retrain, repeat.

    θ ← argmin −Σ log p(y | f(x, θ)) + ½ ‖θ − m‖²_A       (the user's `train`)
    λ_g ← γ_g / ‖θ_g − m_g‖²,   σ² ← SSE / (N·C − γ)      (Eq. 7)

until |γ_g − λ_g ‖θ_g − m_g‖²| ≤ tolerance · max(1, γ_g) and log σ moves by less than the tolerance. Where training ends
at a mode, a fixed point is a stationary point of the evidence.

D. MacKay. A practical Bayesian framework for backpropagation networks. Neural Computation, 1992.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.api import Laplace, laplace
from lapwing.curvature import State
from lapwing.data import as_batches
from lapwing.errors import InvalidValue, warn
from lapwing.training.history import EvidenceRecord, History, recorded
from lapwing.training.loss import TrainingLoss, begin
from lapwing.tune.bounds import Box, at_values, box
from lapwing.tune.fixed_point import update

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
    objective = begin(model, batches, likelihood, prior, fixed, settings)
    first = objective.likelihood  # its noise bounds the search: bounds must not move with the noise
    records: list[EvidenceRecord] = []
    for number in range(1, rounds + 1):
        train(model, objective)
        la = laplace(model, batches, objective.likelihood, prior=objective.prior, **settings)
        bounds = box(la.state, objective.prior, first, fixed)
        wanted, gap = _update(la.state, objective, bounds)
        records.append(_record(number, la.state, objective, len(bounds.at_bound(wanted))))
        if gap <= tolerance:
            return la, History(tuple(records), converged=True)
        objective = _moved(objective, wanted)
    warn(
        f"MacKay's updates did not settle to {tolerance:g} in {rounds} rounds; train longer in each, give more rounds, "
        "or a larger tolerance",
    )
    return la, History(tuple(records), converged=False)


def _update(state: State, objective: TrainingLoss, bounds: Box) -> tuple[dict[str, Tensor], float]:
    """Where MacKay's update wants the log hyperparameters, and how far that is."""
    now = {**objective.prior.coordinates(), **objective.likelihood.coordinates()}
    values = {name: now[name].reshape(start.shape) for name, start in bounds.start.items()}
    with torch.inference_mode(False):
        return update(state, objective.prior, objective.likelihood, bounds, values)


def _moved(objective: TrainingLoss, log_values: dict[str, Tensor]) -> TrainingLoss:
    prior, likelihood = at_values(objective.prior, objective.likelihood, log_values)
    return TrainingLoss(objective.model, prior, likelihood, objective.n)


def _record(number: int, state: State, objective: TrainingLoss, at_bound: int) -> EvidenceRecord:
    prior, likelihood = objective.prior, objective.likelihood
    with torch.no_grad():
        loss = prior.price(state.tangent.theta) - likelihood.log_likelihood(state.statistics)
    return recorded(number, state, prior, likelihood, at_bound, float(loss) / state.n, {})
