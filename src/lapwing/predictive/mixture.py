"""The distribution of one target y, a mixture over the outputs f, and its quantiles:

    F(y) = Σ_s w_s F(y | f_s),   quantile(q) = the least y with F(y) ≥ q

F is known through the likelihood's own distribution function; its inverse is found within brackets, among integers for
counts. Nodes f_s (s, n, c), targets y (n, t). ITP: Oliveira and Takahashi 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.errors import NotConverged
from lapwing.likelihoods import Likelihood
from lapwing.predictive.nodes import Nodes

DOUBLINGS = 200
FEW = 16  # draws of y at the mean of f, to tell where to look
REPEATS = 16  # draws of y at each node, where there is no distribution function


def quantile(likelihood: Likelihood, nodes: Nodes, q: float) -> Tensor:
    """(n, t), float64; the likelihood has a distribution function."""
    nodes = Nodes(nodes.f.double(), nodes.log_weight.double())

    def F(y: Tensor) -> Tensor:
        each = likelihood.cdf(nodes.f, y)
        assert each is not None
        return nodes.average(each)

    some = likelihood.sample(nodes.average(nodes.f).expand(FEW, *nodes.f.shape[1:]), torch.Generator().manual_seed(0))
    center, width = some.median(0).values, some.amax(0) - some.amin(0)
    if likelihood.counts:
        return _least_integer(F, q, torch.zeros_like(center))
    return _inverse(F, q, center, torch.where(width > 0, width, 1 + center.abs()))


def sample_quantile(likelihood: Likelihood, nodes: Nodes, q: float) -> Tensor:
    """The same from draws of y, at nodes of equal weight."""
    f = nodes.f.repeat(REPEATS, 1, 1)
    y = likelihood.sample(f, torch.Generator().manual_seed(0)).double().sort(0).values
    return y[max(0, math.ceil(q * len(y)) - 1)]


def _inverse(F: Callable[[Tensor], Tensor], q: float, center: Tensor, width: Tensor) -> Tensor:
    """By the ITP method: bisection's worst case, and where F is smooth the few steps of a secant."""
    low, high = _beyond(lambda y: F(y) < q, center, -width), _beyond(lambda y: F(y) >= q, center, width)
    under, over = F(low) - q, F(high) - q
    start, eps = high - low, torch.finfo(low.dtype).eps
    exact = 4 * eps * torch.maximum(torch.maximum(low.abs(), high.abs()), width)
    slack = exact * 2 ** torch.ceil(torch.log2(start / exact))
    while bool((high - low > 2 * exact).any()):
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        secant = (over * low - under * high) / (over - under)
        toward = torch.sign(middle - secant)
        pushed = secant + toward * torch.minimum(0.2 * (2 * half).square() / start, (middle - secant).abs())
        r = (slack - half).clamp(min=0)  # how far from the middle it may go and still be done in time
        y = torch.where((pushed - middle).abs() <= r, pushed, middle - toward * r)
        slack = 0.5 * slack
        away = F(y) - q
        below, met = away < 0, away.abs() <= 4 * eps * q  # as far as F is known
        low, under = torch.where(below | met, y, low), torch.where(below, away, under)
        high, over = torch.where(below & ~met, high, y), torch.where(below, over, away)
    return 0.5 * (low + high)


def _least_integer(F: Callable[[Tensor], Tensor], q: float, zero: Tensor) -> Tensor:
    low, high = zero - 1, _beyond(lambda y: F(y) >= q, zero, zero + 1)  # F(−1) = 0
    while bool((high - low > 1).any()):
        middle = torch.floor(0.5 * (low + high))
        below = (F(middle.clamp(min=0)) < q) | (middle < 0)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def _beyond(reached: Callable[[Tensor], Tensor], start: Tensor, step: Tensor) -> Tensor:
    """start + 2ᵏ step for the least k at which it is reached, each element by itself."""
    for _ in range(DOUBLINGS):
        there = reached(start + step)
        if bool(there.all()):
            return start + step
        step = torch.where(there, step, 2 * step)
    raise NotConverged("a predicted quantile was not enclosed: the distribution function does not tend to 0 and 1")
