"""The distribution of one target y, a mixture over the outputs f, and its quantiles:

    F(y) = Σ_s w_s F(y | f_s),   quantile(q) = the least y with F(y) ≥ q

F is known through the likelihood's own distribution function; its inverse is found by bisection, among integers for
counts. Nodes f_s (s, n, c), targets y (n, t).
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
REPEATS = 16  # draws of y at each node, where there is no distribution function


def quantile(likelihood: Likelihood, nodes: Nodes, q: float) -> Tensor:
    """(n, t), float64; the likelihood has a distribution function."""
    nodes = Nodes(nodes.f.double(), nodes.log_weight.double())

    def F(y: Tensor) -> Tensor:
        each = likelihood.cdf(nodes.f, y)
        assert each is not None
        return nodes.average(each)

    mean = nodes.average(likelihood.mean(nodes.f))
    if likelihood.counts:
        return _least_integer(F, q, mean)
    center = torch.where(torch.isfinite(mean), mean, 0.0)
    variance = nodes.average(likelihood.variance(nodes.f) + (likelihood.mean(nodes.f) - center).square())
    width = torch.where(torch.isfinite(variance) & (variance > 0), variance.sqrt(), 1 + center.abs())
    return _inverse(F, q, center, width)


def sample_quantile(likelihood: Likelihood, nodes: Nodes, q: float) -> Tensor:
    """The same from draws of y, at nodes of equal weight."""
    f = nodes.f.repeat(REPEATS, 1, 1)
    y = likelihood.sample(f, torch.Generator().manual_seed(0)).double().sort(0).values
    return y[max(0, math.ceil(q * len(y)) - 1)]


def _inverse(F: Callable[[Tensor], Tensor], q: float, center: Tensor, width: Tensor) -> Tensor:
    low = _beyond(lambda y: F(y) < q, center, -width)
    high = _beyond(lambda y: F(y) >= q, center, width)
    eps = torch.finfo(low.dtype).eps
    while bool((high - low > 4 * eps * torch.maximum(torch.maximum(low.abs(), high.abs()), width)).any()):
        middle = 0.5 * (low + high)
        below = F(middle) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


def _least_integer(F: Callable[[Tensor], Tensor], q: float, mean: Tensor) -> Tensor:
    low = torch.full_like(mean, -1.0)  # F = 0
    high = _beyond(lambda y: F(y) >= q, torch.zeros_like(mean), (2 * mean).ceil().clamp(min=1, max=2.0**40))
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
