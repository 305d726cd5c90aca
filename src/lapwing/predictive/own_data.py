"""Whether a posterior still fits the data that it was fitted to, by one comparison on a few of them:

    mean −log p(y_n | x_n, D)    beside    mean −log p(y_n | f(x_n))        over rows of training data

A posterior loses a little to its network there. In classifiers that fit their data closely the curvature is next to
nothing, the evidence picks a prior that is too weak, and the loss can be all that was learnt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing.data import passes, ranks_of
from lapwing.errors import warn
from lapwing.likelihoods import Likelihood
from lapwing.outputs import WIDE
from lapwing.posterior import Gaussian
from lapwing.predictive.predicting import predict
from lapwing.tree import rows_of

EXAMPLES = 64  # of the first batch
NATS = 0.1  # a row, that a posterior may lose at the least; beyond, no more than its network's own


def training_nll(posterior: Gaussian, likelihood: Likelihood, batches: Any, budget: int) -> tuple[float, ...]:
    """The mean −log p of a row under the posterior, and under the network alone, on some training data; () where it is
    not compared: no classes, or predictions that are not cheap (many outputs, inputs that cannot be cut)."""
    if not likelihood.classes:
        return ()
    ranks = ranks_of(batches)
    with ranks.sharing_errors("predicting training data"), torch.no_grad():
        sums = _sums(posterior, likelihood, batches, budget)
    mine, network, rows = ranks.total([sums], "the fit of training data")[0].tolist()
    return (mine / rows, network / rows) if rows else ()


def _sums(posterior: Gaussian, likelihood: Likelihood, batches: Any, budget: int) -> Tensor:
    """Σ −log p of the posterior, of the network, and the number of rows, (3,)."""
    tangent = posterior.tangent
    first = next(passes(batches, tangent.device), None)
    if first is None:
        return torch.zeros(3, dtype=torch.float64)
    x, y = first
    if tangent.separable(x):
        x, y = rows_of(x, slice(0, EXAMPLES)), y[:EXAMPLES]
    positions, outputs = tangent.output_shape(x)
    if len(y) > EXAMPLES or positions * outputs > WIDE:
        return torch.zeros(3, dtype=torch.float64)
    made = predict(posterior, likelihood.plain, x, memory_budget=budget)
    made = replace(made, likelihood=likelihood.predictive)  # the targets are those of the fit: weighted, ignored
    certain = replace(made, outputs=made.outputs.scaled(0.0))
    mine, network = made.log_prob(y), certain.log_prob(y)
    return -torch.tensor([float(mine.sum()), float(network.sum()), -len(y) * positions], dtype=torch.float64)


def unfit(nll: tuple[float, ...]) -> str:
    """In words, that a posterior has lost what its network learnt; "" where it has not, or where that is not known."""
    if not nll or not nll[0] - nll[1] > max(NATS, nll[1]):
        return ""
    return f"predicts its own training data with an NLL of {nll[0]:.3g}, where the network has {nll[1]:.2g}"


def warn_unfit(nll: tuple[float, ...]) -> None:
    """Say so, and what to call."""
    if words := unfit(nll):
        warn(
            f"the posterior {words}: unless the network has memorized wrong labels, its prior is too weak (the "
            "evidence picks such priors for classifiers that fit their data closely), and predictions are not sure "
            "enough. With held-out data, call tuned(method='validation', data=...); without, fit with "
            "likelihood='classification', whose curvature does not vanish. la.check() has the figures",
        )
