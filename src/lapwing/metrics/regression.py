"""Real-valued predictions: F the predictive distribution of each output, y (n, ...) what happened.

    CRPS        ∫ (F(t) − 1[y ≤ t])² dt = E|Y − y| − ½ E|Y − Y'|,  in the units of y
                Gaussian, z = (y − μ)/σ:   σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π)
                s draws, sorted:           mean|Y_i − y| − Σ_i (2i − s − 1) Y_i / (s (s − 1)),  unbiased
    interval    the quantiles (1 ± level)/2;  coverage: how often y lies within;  sharpness: how wide it is
    RMSE        √ mean (E[Y] − y)²
    PIT         F(y), uniform if predictions are right; of draws, those below y and half of those at y; so of counts

Outputs are scored one by one: `each=True` has the shape of y. A Prediction that is not Gaussian is scored by its
distribution function, where that is known, else by draws of it. The CRPS of F is by quadrature: for any m,

    ∫ (F(t) − 1[y ≤ t])² dt = ∫_0^∞ F(m − t)² + (1 − F(m + t))² dt + ∫_m^y 2F(t) − 1 dt

in Gauss-Legendre panels [0, 2s], [2s, 4s], [4s, 8s], … about the middle m of F, s its spread: F is smooth, and where
its tails are heavy they are so on the scale of t. For counts Σ_k (F(k) − 1[y ≤ k])².
"""

from __future__ import annotations

import functools
import math
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import NotConverged
from lapwing.given import share
from lapwing.metrics.inputs import (
    Forecast,
    check_drawn,
    check_targets,
    finite,
    no_nan,
    of_arrays,
    refuse_classes,
    response,
)
from lapwing.metrics.scores import mean_or_each
from lapwing.predictive import Prediction

AT_ONCE = 64  # inputs: few enough for the nodes of their f to stay in caches
DRAWS = 64  # of y, to tell the middle and the spread
NODES, PANELS = 10, 60
COUNT = 512  # twice the largest of some draws, up to which counts are summed over
SMALL = 1e-8  # share of the score that may be left in the tails


@overload
def crps(predicted: Forecast, y: Tensor, *, each: Literal[False] = False) -> float: ...
@overload
def crps(predicted: Forecast, y: Tensor, *, each: Literal[True]) -> Tensor: ...
@of_arrays
def crps(predicted: Forecast, y: Tensor, *, each: bool = False) -> float | Tensor:
    """The continuous ranked probability score: the absolute error of a point forecast, for distributions."""
    if isinstance(predicted, Prediction) and not predicted.gaussian:
        check_drawn(predicted, y)
        if _summable(predicted, y):
            return mean_or_each(_quadrature(predicted, y), each)
    given = response(predicted, y)
    if isinstance(given, tuple):
        mean, std = given
        z = (y.to(mean) - mean) / std
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        scores = std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
        return mean_or_each(scores, each)
    away, s = (given - y.to(given)).sort(0).values, len(given)  # about y, so that nothing cancels
    weight = (2 * torch.arange(1, s + 1, device=given.device).to(given) - s - 1) / (s * (s - 1))
    return mean_or_each(away.abs().mean(0) - torch.tensordot(weight, away, 1), each)


@of_arrays
def pit(predicted: Forecast, y: Tensor) -> Tensor:
    """F(y) of each output, of y's shape."""
    if isinstance(predicted, Prediction) and not predicted.gaussian and predicted.has_cdf:
        check_drawn(predicted, y)
        return no_nan(_distribution(predicted, y.to(predicted.f_mean.device, torch.float64)), "values of F")
    given = response(predicted, y)
    if isinstance(given, tuple):
        mean, std = given
        return torch.special.ndtr((y.to(mean) - mean) / std)
    y = y.to(given)
    return ((given < y).double() + 0.5 * (given == y).double()).mean(0)


def _distribution(predicted: Prediction, y: Tensor) -> Tensor:
    """F(y); of counts the mean of F(y) and F(y − 1)."""
    at = predicted.cdf(y)
    return at - 0.5 * predicted.pmf(y) if predicted.likelihood.counts else at


@of_arrays
def interval(predicted: Forecast, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """The central interval that should hold y with probability `level`: its ends, each of y's shape."""
    level = share(level, "the level of an interval")
    if isinstance(predicted, Prediction):
        refuse_classes(predicted)
        low, high = (predicted.quantile(q).double() for q in ((1 - level) / 2, (1 + level) / 2))
        return no_nan(low, "lower ends"), no_nan(high, "upper ends")
    given = response(predicted)
    if isinstance(given, tuple):
        mean, std = given
        away = std * torch.special.ndtri(std.new_tensor(0.5 + level / 2))
        return mean - away, mean + away
    ordered = given.sort(0).values
    return _quantile(ordered, (1 - level) / 2), _quantile(ordered, (1 + level) / 2)


@overload
def coverage(predicted: Forecast, y: Tensor, level: float = 0.95, *, each: Literal[False] = False) -> float: ...
@overload
def coverage(predicted: Forecast, y: Tensor, level: float = 0.95, *, each: Literal[True]) -> Tensor: ...
@of_arrays
def coverage(predicted: Forecast, y: Tensor, level: float = 0.95, *, each: bool = False) -> float | Tensor:
    """How often y lies within the central interval: `level`, if error bars are right."""
    low, high = interval(predicted, level)
    check_targets(y, low.shape)
    y = y.to(low)
    return mean_or_each(((low <= y) & (y <= high)).double(), each)


@of_arrays
def sharpness(predicted: Forecast, level: float = 0.95) -> float:
    """The mean width of the central interval: the smaller the better, among predictions that cover as they say."""
    low, high = interval(predicted, level)
    return float((high - low).mean())


@of_arrays
def rmse(predicted: Forecast, y: Tensor) -> float:
    """The root of the mean squared error of E[y], over all outputs: of a Prediction, of Gaussians (mean, std), of draws
    (s, *y.shape), or of point predictions of y's shape."""
    if isinstance(predicted, Prediction):
        refuse_classes(predicted)
        mean = predicted.mean
    elif isinstance(predicted, tuple) or finite(predicted, "the predictions").shape != y.shape:
        found = response(predicted, y)
        mean = found[0] if isinstance(found, tuple) else found.mean(0)
    else:
        mean = predicted
    check_targets(y, mean.shape)
    return float((mean.detach().double() - y.to(mean).double()).square().mean().sqrt())


def _quantile(ordered: Tensor, q: float) -> Tensor:
    """Linear between order statistics, as torch.quantile, which in older versions takes no more than 2²⁴ numbers."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    return torch.lerp(ordered[low], ordered[min(low + 1, len(ordered) - 1)], place - low)


# -- the CRPS of a distribution function ----------------------------------------------------------------------------


def _summable(predicted: Prediction, y: Tensor) -> bool:
    """Whether F is known and can be summed up: as an integral over f, or over counts that are not large."""
    if predicted.gaussian or not predicted.has_cdf:
        return False
    if not predicted.likelihood.counts:
        return predicted.smooth
    return 2 * max(float(predicted.sample(DRAWS).amax()), float(y.amax())) <= COUNT


def _quadrature(predicted: Prediction, y: Tensor) -> Tensor:
    """Of each target by itself, of y's shape, float64."""
    one = _of_counts if predicted.likelihood.counts else _of_numbers
    y = y.detach().to(predicted.f_mean.device, torch.float64)
    pieces = [slice(start, start + AT_ONCE) for start in range(0, len(y), AT_ONCE)]
    return torch.cat([one(predicted[piece], y[piece]) for piece in pieces])


def _of_numbers(predicted: Prediction, y: Tensor) -> Tensor:
    some = predicted.sample(DRAWS).double().sort(0).values
    middle, unit = some[DRAWS // 2], some[3 * DRAWS // 4] - some[DRAWS // 4]
    sign, reach = torch.sign(y - middle), (y - middle).abs()
    out, low, high = torch.zeros_like(y), torch.zeros_like(unit), 2 * unit
    for _ in range(PANELS):
        tails, a, b = torch.zeros_like(y), torch.minimum(low, reach), torch.minimum(high, reach)
        for x, w in _rule():
            t = torch.lerp(low, high, x)
            tails += w * (high - low) * (predicted.cdf(middle - t).square() + (1 - predicted.cdf(middle + t)).square())
        for x, w in _rule() if bool((b > a).any()) else ():
            out += w * (b - a) * sign * (2 * predicted.cdf(middle + sign * torch.lerp(a, b, x)) - 1)
        out += tails
        if bool((reach <= high).all()) and bool((tails <= SMALL * out).all()):
            return out
        low, high = high, 2 * high
    raise NotConverged(
        "the tails of a predicted distribution are so heavy that its ranked probability score is infinite"
    )


def _of_counts(predicted: Prediction, y: Tensor) -> Tensor:
    out, F, k, left = torch.zeros_like(y), torch.zeros_like(y), 0, True
    while left:
        F += predicted.pmf(torch.full_like(y, k))
        term = (F - (y <= k).to(y)).square()
        out += term
        k += 1
        left = bool((y >= k).any()) or bool((k * term > SMALL * out).any())
    return out


@functools.cache
def _rule() -> list[tuple[float, float]]:
    """Nodes and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(NODES)
    return list(zip((0.5 + 0.5 * x).tolist(), (0.5 * w).tolist(), strict=True))
