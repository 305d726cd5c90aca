"""What a posterior's predictions are worth, and how far they are from the reference's.

classes      accuracy, NLL, ECE;   agreement, total variation ½ Σ_c |p_c − q_c|
real values  RMSE, NLL, coverage of the 95 % interval;   total variation ½ Σ_b |P(y in b) − Q(y in b)| over 200 bins
             of the reference Q and both tails: those of P may be of any width, one draw far out included
both         joint log-likelihood of κ = 1 … 5 inputs; AUROC of unknown inputs, by the prediction's entropy or variance

Sets of κ are drawn within pieces of 60 test inputs in the order given, since a covariance over all of them is (n c)².
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lapwing import metrics, tree
from lapwing.metrics.equivalent import Ladder
from lapwing.metrics.inputs import DRAWS
from lapwing.metrics.joint import log_probs_of, sets_of, together
from lapwing.predictive import Prediction
from lapwing.truth.methods import Trial

KAPPAS = (1, 2, 3, 4, 5)
PIECE = 60  # test inputs that are predicted together: each κ divides it
BINS = 200
REACH = 6.0  # standard deviations of the reference that bins span on either side of its mean


def scored(
    trial: Trial, x: Any, y: Tensor, truth: Prediction, unknown: Any = None, ladder: Ladder | None = None
) -> dict[str, float]:
    """{metric: value} of a posterior at test inputs."""
    pred = trial.fit.predict(x, **trial.asked)
    found = _of_classes(pred, truth, y, ladder) if pred.likelihood.classes else _of_values(pred, truth, y)
    found |= _of_sets(trial, pred, x, y)
    if unknown is not None:
        found["ood"] = metrics.auroc(_doubt(pred), _doubt(trial.fit.predict(unknown, **trial.asked)))
    return found


def _of_sets(trial: Trial, pred: Prediction, x: Any, y: Tensor) -> dict[str, float]:
    """Joint log-likelihoods, of sets within pieces of the inputs: the same sets for every method."""
    found: dict[int, list[Tensor]] = {kappa: [] for kappa in KAPPAS}
    for rows in (slice(start, start + PIECE) for start in range(0, len(y), PIECE)):
        if pred.drawn:
            some = Prediction(pred.likelihood, pred.outputs[rows])
        else:
            some = trial.fit.predict(tree.map_tensors(itemgetter(rows), x), joint=True, **trial.asked)
        for kappa, values in _of_piece(some, y[rows]).items():
            found[kappa].append(values)
    return {f"joint {kappa}": float(torch.cat(each).mean()) for kappa, each in found.items()}


def _of_piece(pred: Prediction, y: Tensor) -> dict[int, Tensor]:
    """That of each set, from one lot of draws for all κ."""
    kappas = [kappa for kappa in KAPPAS if kappa <= len(y)]
    if pred.gaussian:
        return {kappa: metrics.joint_log_likelihood(pred, y, kappa, each=True) for kappa in kappas}
    known = log_probs_of(pred, y, DRAWS, torch.Generator().manual_seed(0))
    return {kappa: together(*known, *sets_of(len(y), kappa, None, None)) for kappa in kappas}


def _of_classes(pred: Prediction, truth: Prediction, y: Tensor, ladder: Ladder | None) -> dict[str, float]:
    found = {"accuracy": metrics.accuracy(pred, y), "nll": metrics.nll(pred, y), "ece": metrics.ece(pred, y)}
    found |= {"agreement": metrics.agreement(pred, truth), "variation": metrics.total_variation(pred, truth)}
    return found if ladder is None else {**found, "members": ladder.members_of(pred)}


def _of_values(pred: Prediction, truth: Prediction, y: Tensor) -> dict[str, float]:
    found = {"rmse": metrics.rmse(pred, y), "nll": metrics.nll(pred, y), "coverage": metrics.coverage(pred, y)}
    return found | {"variation": variation(pred, truth)}


def variation(p: Prediction, q: Prediction) -> float:
    """½ Σ_b |P(b) − Q(b)| of each target over equal bins of q and both tails, mean over inputs and targets."""
    low, high = (q.mean - REACH * q.std).double(), (q.mean + REACH * q.std).double()
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
