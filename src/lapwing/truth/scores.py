"""What a posterior's predictions are worth, and how far they are from the reference's.

classes      accuracy, NLL, ECE;   agreement, total variation ½ Σ_c |p_c − q_c|
real values  RMSE, NLL, coverage of the 95 % interval;   total variation ½ Σ_b |P(y in b) − Q(y in b)| over 200 bins
both         joint log-likelihood of κ = 1 … 5 inputs; AUROC of unknown inputs, by the prediction's entropy or variance
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.predictive import Prediction
from lapwing.truth.methods import Trial

KAPPAS = (1, 2, 3, 4, 5)
BINS = 200
REACH = 6.0  # standard deviations that bins span beyond either prediction


def scored(
    trial: Trial, x: Any, y: Tensor, truth: Prediction, unknown: Any, members: Tensor | None
) -> dict[str, float]:
    """{metric: value} of a posterior at test inputs."""
    pred = trial.fit.predict(x, **trial.asked)
    together = pred if pred.drawn else trial.fit.predict(x, joint=True, **trial.asked)
    found = _of_classes(pred, truth, y, members) if pred.likelihood.classes else _of_values(pred, truth, y)
    for kappa in KAPPAS:
        found[f"joint {kappa}"] = metrics.joint_log_likelihood(together, y, kappa)
    if unknown is not None:
        found["ood"] = metrics.auroc(_doubt(pred), _doubt(trial.fit.predict(unknown, **trial.asked)))
    return found


def _of_classes(pred: Prediction, truth: Prediction, y: Tensor, members: Tensor | None) -> dict[str, float]:
    found = {"accuracy": metrics.accuracy(pred, y), "nll": metrics.nll(pred, y), "ece": metrics.ece(pred, y)}
    found |= {"agreement": metrics.agreement(pred, truth), "variation": metrics.total_variation(pred, truth)}
    if members is not None:
        found["members"] = metrics.ensemble_equivalent(pred, members, y)
    return found


def _of_values(pred: Prediction, truth: Prediction, y: Tensor) -> dict[str, float]:
    found = {"rmse": metrics.rmse(pred, y), "nll": metrics.nll(pred, y), "coverage": metrics.coverage(pred, y)}
    return found | {"variation": variation(pred, truth)}


def variation(p: Prediction, q: Prediction) -> float:
    """½ Σ_b |P(b) − Q(b)| of each target over equal bins and both tails, mean over inputs and targets."""
    low = torch.minimum(p.mean - REACH * p.std, q.mean - REACH * q.std).double()
    high = torch.maximum(p.mean + REACH * p.std, q.mean + REACH * q.std).double()
    last = torch.zeros_like(low)
    total, before = last, (last, last)
    for k in range(BINS + 1):
        edge = low + (high - low) * k / BINS
        here = p.cdf(edge.to(p.mean)).double(), q.cdf(edge.to(q.mean)).double()
        total = total + ((here[0] - before[0]) - (here[1] - before[1])).abs()
        before = here
    return float((total + (before[1] - before[0]).abs()).mean() / 2)


def _doubt(pred: Prediction) -> Tensor:
    """How unsure a prediction is of y, one number an input, (n,)."""
    if pred.likelihood.classes:
        p = pred.probs.double()
        p = p if p.shape[-1] > 1 else torch.cat([1 - p, p], -1)
        return torch.special.entr(p).sum(-1).flatten()
    return pred.total.double().sum(-1).flatten()
