"""What a report says of predictions at test data: the fit's, and beside it the plain network's.

    gain = mean over examples of (NLL of the network − NLL of the fit), in nats an example, with its standard error

The plain network predicts by its outputs f(x, θ*) alone. Where the noise of a Gaussian is to be known, that is the root
mean square of its residuals on the training data: what one would plug in without a posterior. NLL of an example (n,) is
a mean over its positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import metrics, tree
from lapwing.data import as_batches, passes
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Likelihood, Several
from lapwing.outputs.draws import Draws
from lapwing.outputs.normal import Normal
from lapwing.predictive import Prediction
from lapwing.predictive.batched import in_turn
from lapwing.solvers.estimate import FEWEST, Estimate

NETWORK = "plain network"
LEVEL = 0.95  # of intervals


@dataclass(frozen=True, eq=False)
class Scored:
    """Predictions at the test data, and how good they are. Fields are None where the likelihood has no such thing."""

    name: str
    prediction: Prediction
    nll: Tensor  # (n,), nats
    scores: dict[str, float]
    labels: Tensor | None = None  # of classes: those that were predicted, (n, ...)
    uncertainty: Tensor | None = None  # (n,): 1 − p of the most probable class, or the standard deviation of y
    loss: Tensor | None = None  # (n,): share of wrong labels, or mean absolute error
    reliability: metrics.Reliability | None = None  # of classes
    pit: Tensor | None = None  # of numbers: F(y), of y's shape
    interval: tuple[Tensor, Tensor] | None = None  # of numbers: the ends of the central interval of LEVEL

    @property
    def classes(self) -> bool:
        """Whether y is a class."""
        return self.prediction.likelihood.classes

    @cached_property
    def risk(self) -> metrics.SelectiveRisk | None:
        """The loss of those that are answered, the most certain first."""
        if self.uncertainty is None or self.loss is None:
            return None
        return metrics.selective_risk(self.uncertainty, self.loss)


@dataclass(frozen=True, eq=False)
class ReportFacts:
    """Test data, and predictions of them: of the plain network where there is one, and of one fit or several."""

    inputs: Any
    targets: Tensor
    fits: tuple[Scored, ...]
    network: Scored | None
    notes: tuple[str, ...]  # what there is not, and why
    novelty: Tensor  # (n,), ood_score of the first fit
    unlike: Tensor | None = None  # (m,), that of inputs that are unlike the training data

    @property
    def n(self) -> int:
        """Test examples."""
        return len(self.targets)

    @property
    def all(self) -> tuple[Scored, ...]:
        """The network first."""
        return (*([] if self.network is None else [self.network]), *self.fits)

    def gain(self, fit: Scored, over: Scored | None = None) -> Estimate | None:
        """How much lower its NLL is than that of another, the plain network unless told; None where there is none."""
        over = over or self.network
        return None if over is None else metrics.paired(over.nll, fit.nll)


def gather(fits: dict[str, Any], test: Any, ood: Any = None) -> ReportFacts:
    """Of {name: fit} at test data, a pair (X, y) or batches; ood: inputs that are unlike the training data."""
    first = next(iter(fits.values()))
    batches = list(passes(as_batches(test), first.tangent.device, label="test"))
    y = torch.cat([y for _, y in batches])
    if len(y) < FEWEST:
        raise InvalidValue(f"a report needs at least {FEWEST} test examples for a standard error, got {len(y)}")
    inputs = [x for x, _ in batches]
    with torch.no_grad():
        found = tuple(scored(name, in_turn(fit.predict, inputs), y) for name, fit in fits.items())
        network, notes = _network(list(fits.values()), inputs, y)
        unlike = None if ood is None else _novelty(first.predict(ood))
    return ReportFacts(tree.joined(inputs), y, found, network, notes, _novelty(found[0].prediction), unlike)


def scored(name: str, prediction: Prediction, y: Tensor) -> Scored:
    """Predictions held to targets y."""
    each = metrics.nll(prediction, y, each=True)
    nll = each.reshape(len(each), -1).mean(1)
    found = (_of_classes if prediction.likelihood.classes else _of_numbers)(prediction, y)
    return Scored(name, prediction, nll, {"nll": float(nll.mean()), **found.pop("scores")}, **found)


def _of_classes(prediction: Prediction, y: Tensor) -> dict[str, Any]:
    p = prediction.likelihood.class_probs(prediction.probs).double()  # (n, ..., c)
    y = hard_labels(prediction, y).reshape(p.shape[:-1])
    right = metrics.accuracy(p, y, each=True)
    binned = metrics.reliability(p, y)
    scores = {
        "accuracy": float(right.mean()),
        "confidence": float(p.amax(-1).mean()),
        "ece": binned.ece,
        "brier": metrics.brier(p, y),
    }
    flat = {"uncertainty": _by_example(1 - p.amax(-1)), "loss": _by_example(1 - right)}
    return {"scores": scores, "labels": p.argmax(-1), "reliability": binned, **flat}


def hard_labels(prediction: Prediction, y: Tensor) -> Tensor:
    """Labels; of targets that are probabilities of classes, the most probable one."""
    soft = prediction.likelihood.response == "softmax" and y.is_floating_point()
    return y.argmax(-1) if soft else y.long()


def _of_numbers(prediction: Prediction, y: Tensor) -> dict[str, Any]:
    y = prediction.likelihood.aligned(prediction.f_mean, y)
    if not _says(prediction, "mean", "std") or y.shape != prediction.mean.shape:  # targets with noise of their own, say
        return {"scores": {}}
    error = (prediction.mean.double() - y).abs()
    low, high = ends = metrics.interval(prediction, LEVEL)
    scores = {
        "rmse": metrics.rmse(prediction, y),
        "coverage": float(((low <= y) & (y <= high)).double().mean()),
        "sharpness": float((high - low).mean()),
    }
    flat = {"uncertainty": _by_example(prediction.std.double()), "loss": _by_example(error)}
    return {"scores": scores, "pit": metrics.pit(prediction, y), "interval": ends, **flat}


def _says(prediction: Prediction, *names: str) -> bool:
    try:
        return all(getattr(prediction, name) is not None for name in names)
    except Unsupported:  # a likelihood without them: the report has the NLL alone
        return False


def _by_example(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def _novelty(prediction: Prediction) -> Tensor:
    return _by_example(prediction.ood_score.double())


# -- the plain network -----------------------------------------------------------------------------------------------


def _network(fits: list[Any], inputs: list[Any], y: Tensor) -> tuple[Scored | None, tuple[str, ...]]:
    """That of all fits, by its outputs alone under the first one's likelihood; or why there is none."""
    if len({id(fit.tangent.model) for fit in fits}) > 1:
        return None, ("These are of different networks: the report of each fit holds it to its own.",)
    fit = fits[0]
    likelihood = fit.likelihood.plain.predictive
    if isinstance(likelihood, Several):
        return None, ("There is no plain network to compare with: the noise was drawn together with the weights.",)
    f = torch.cat([fit.tangent(x) for x in inputs])
    return scored(NETWORK, certain(plug_in(fit, likelihood), f), y), ()


def plug_in(fit: Any, likelihood: Likelihood) -> Likelihood:
    """With the noise that the network's residuals on the training data have, where sums over these are known."""
    state = getattr(fit, "state", None)
    floors = {} if state is None else likelihood.floors(state.statistics)
    return likelihood.moved(floors) if floors else likelihood


def certain(likelihood: Likelihood, f: Tensor) -> Prediction:
    """Of outputs f (n, ..., c) that are known."""
    if likelihood.classes:
        return Prediction(likelihood, Draws(f.unsqueeze(0)))
    return Prediction(likelihood, Normal(f, f.new_zeros(*f.shape, f.shape[-1])))
