"""Scores of each example, and their mean. p (n, ..., c) probabilities, y (n, ...) labels.

    NLL        −log p(y), in nats: all outputs of an example together; infinite where what happened had probability 0
    Brier      ‖p − onehot(y)‖², from 0 to 2
    accuracy   1[argmax p = y]

Two models on the same examples: d = a − b, and its standard error sd(d)/√n, which is far smaller than those of a and b.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.metrics.inputs import Forecast, class_probs, finite, no_nan, of_arrays, response, tensor
from lapwing.predictive import Prediction
from lapwing.solvers.estimate import FEWEST, Estimate, mean_of


@overload
def nll(predicted: Forecast, y: Tensor, *, each: Literal[False] = False) -> float: ...
@overload
def nll(predicted: Forecast, y: Tensor, *, each: Literal[True]) -> Tensor: ...
@of_arrays
def nll(predicted: Forecast, y: Tensor, *, each: bool = False) -> float | Tensor:
    """−log p(y) of a Prediction, of class probabilities, or of independent Gaussians (mean, std), each (n, ..., c)."""
    if isinstance(predicted, Prediction):
        if predicted.joint:
            raise InvalidValue(
                "a joint prediction has one log-probability, of all targets together; predict with joint=False, or use "
                "joint_log_likelihood"
            )
        return mean_or_each(-predicted.log_prob(tensor(y, "the targets")).double(), each)
    if isinstance(predicted, tuple):
        mean, std = response(predicted, y)
        z = (y.to(mean) - mean) / std
        terms = 0.5 * z.square() + std.log() + 0.5 * math.log(2 * math.pi)
        return mean_or_each(terms.sum(-1) if terms.ndim > 1 else terms, each)
    p, y = class_probs(predicted, y)
    return mean_or_each(-p.gather(-1, y.unsqueeze(-1)).squeeze(-1).log(), each)


@overload
def brier(predicted: Prediction | Tensor, y: Tensor, *, each: Literal[False] = False) -> float: ...
@overload
def brier(predicted: Prediction | Tensor, y: Tensor, *, each: Literal[True]) -> Tensor: ...
@of_arrays
def brier(predicted: Prediction | Tensor, y: Tensor, *, each: bool = False) -> float | Tensor:
    """Σ_c (p_c − 1[y = c])², from 0 to 2; twice (p − y)² for a binary label, which counts as two classes."""
    p, y = class_probs(predicted, y)
    onehot = torch.nn.functional.one_hot(y, p.shape[-1])
    return mean_or_each((p - onehot).square().sum(-1), each)


@overload
def accuracy(predicted: Prediction | Tensor, y: Tensor, *, each: Literal[False] = False) -> float: ...
@overload
def accuracy(predicted: Prediction | Tensor, y: Tensor, *, each: Literal[True]) -> Tensor: ...
@of_arrays
def accuracy(predicted: Prediction | Tensor, y: Tensor, *, each: bool = False) -> float | Tensor:
    """1 where the most probable class is the label, else 0."""
    p, y = class_probs(predicted, y)
    return mean_or_each((p.argmax(-1) == y).double(), each)


@of_arrays
def paired(a: Tensor, b: Tensor) -> Estimate:
    """The mean of a − b over the same examples (n, ...), its standard error and 90 % interval."""
    if tensor(a, "the first scores").shape != tensor(b, "the second scores").shape or not a.ndim:
        raise InvalidValue(f"paired scores must be of the same examples, got {tuple(a.shape)} and {tuple(b.shape)}")
    difference = finite(a, "the first scores").double() - finite(b, "the second scores").to(a.device)
    each = difference.reshape(len(difference), -1).mean(-1)  # positions of an example are not independent of each other
    if len(each) < FEWEST:
        raise InvalidValue(f"a standard error needs at least {FEWEST} examples, got {len(each)}")
    return mean_of(each)


def mean_or_each(scores: Tensor, each: bool) -> float | Tensor:
    """The mean of scores, or the scores themselves, one an example."""
    scores = no_nan(scores.detach(), "scores")
    return scores if each else float(scores.mean())
