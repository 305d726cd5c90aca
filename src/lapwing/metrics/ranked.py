"""The continuous ranked probability score of a distribution function F at y, by quadrature: for any m,

    ∫ (F(t) − 1[y ≤ t])² dt = ∫_0^∞ F(m − t)² + (1 − F(m + t))² dt + ∫_m^y 2F(t) − 1 dt

in Gauss-Legendre panels [0, 2s], [2s, 4s], [4s, 8s], … about the middle m of F, s its spread: F is smooth, and where
its tails are heavy they are so on the scale of t. For counts Σ_k (F(k) − 1[y ≤ k])².
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import NotConverged
from lapwing.predictive import Prediction

AT_ONCE = 64  # inputs: few enough for the nodes of their f to stay in caches
DRAWS = 64  # of y, to tell the middle and the spread
NODES, PANELS = 10, 60
COUNT = 512  # twice the largest of some draws, up to which counts are summed over
SMALL = 1e-8  # share of the score that may be left in the tails


def known(predicted: Prediction, y: Tensor) -> bool:
    """Whether F is known and can be summed up: as an integral over f, or over counts that are not large."""
    if predicted.gaussian or not predicted.has_cdf:
        return False
    if not predicted.likelihood.counts:
        return predicted.smooth
    return 2 * max(float(predicted.sample(DRAWS).amax()), float(y.amax())) <= COUNT


def score(predicted: Prediction, y: Tensor) -> Tensor:
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
