"""The distribution of one target y, a mixture over the outputs f, and its quantiles:

    F(y) = Σ_s w_s F(y | f_s),   quantile(q) = the least y with F(y) ≥ q

F is known through the likelihood's own distribution function; its inverse is found within brackets, among integers for
counts. Nodes f_s (s, n, c), targets y (n, t). Chandrupatla 1997. Where f has a graph, so has the quantile, of F(y) = q.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.errors import NotConverged, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.outputs import Nodes

DOUBLINGS = 200
FEW = 16  # draws of y at the mean of f, to tell where to look
ROUNDING = 1e-12  # of a sum of weights
REPEATS = 16  # draws of y at each node, where there is no distribution function
PIECE = 2**15  # outputs f at once: few enough to stay in caches, of which each step reads them all


def quantile(likelihood: Likelihood, nodes: Nodes, q: float) -> Tensor:
    """(n, t), float64; the likelihood has a distribution function."""
    size = max(1, PIECE // nodes.f[:, 0].numel())
    return torch.cat([_quantile(likelihood, some, q) for some in nodes.split(size)])


def _quantile(likelihood: Likelihood, nodes: Nodes, q: float) -> Tensor:
    def F(y: Tensor) -> Tensor:
        each = likelihood.cdf(nodes.f, y)
        assert each is not None
        return nodes.average(each)

    with torch.no_grad():
        first, mean = likelihood.distinct[0], nodes.average(nodes.f)
        some = first.sample(mean.expand(FEW, *mean.shape), torch.Generator().manual_seed(0))
        center, width = some.median(0).values, some.amax(0) - some.amin(0)
        if likelihood.counts:
            return _least_integer(F, q, torch.zeros_like(center))
        found = _inverse(F, q, center, torch.where(width > 0, width, 1 + center.abs()))
    return _with_graph(F, q, found) if nodes.f.requires_grad and torch.is_grad_enabled() else found


def _with_graph(F: Callable[[Tensor], Tensor], q: float, y: Tensor) -> Tensor:
    """A quantile y as a function of what F depends on: F(y) = q, so dy = −dF / F'(y). Each Newton step from a constant
    y doubles the derivatives that are right; two have the first and the second."""
    for _ in range(2):
        at = y if y.requires_grad else y.detach().requires_grad_()
        (density,) = torch.autograd.grad(F(at).sum(), at, create_graph=True)
        y = y - (F(y) - q) / density
    return y


def sample_quantile(likelihood: Likelihood, nodes: Nodes, q: float) -> Tensor:
    """The same from draws of y at the nodes."""
    if nodes.f.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{likelihood.name} has no distribution function, so its quantiles are those of draws, which have no "
            "gradient in the inputs; read them under torch.no_grad()"
        )
    generator = torch.Generator().manual_seed(0)
    y, order = torch.cat([likelihood.sample(nodes.f, generator).double() for _ in range(REPEATS)]).sort(0)
    w = nodes.log_weight.exp().expand(-1, y.shape[1]).repeat(REPEATS, 1).unsqueeze(-1) / REPEATS
    reached = w.expand_as(y).gather(0, order).cumsum(0) >= q - ROUNDING
    return y.gather(0, reached.to(torch.uint8).argmax(0, keepdim=True))[0]


def value_quantile(values: Tensor, nodes: Nodes, q: float) -> Tensor:
    """Of values (s, n, ...) at the nodes themselves: linear between the middles of their weights, as torch.quantile for
    equal ones."""
    ordered, order = values.sort(0)
    w = nodes.log_weight.exp().reshape(len(values), -1, *[1] * (values.ndim - 2)).expand_as(values).gather(0, order)
    middle = w.cumsum(0) - 0.5 * w
    place = (middle - middle[0]) / (middle[-1] - middle[0])
    above = (place < q).sum(0, keepdim=True).clamp(1, len(values) - 1)
    (low, high), (start, end) = ([t.gather(0, i)[0] for i in (above - 1, above)] for t in (ordered, place))
    return torch.lerp(low, high, torch.where(end > start, (q - start) / (end - start), 0.0).clamp(0, 1))


def _inverse(F: Callable[[Tensor], Tensor], q: float, center: Tensor, width: Tensor) -> Tensor:
    """By Chandrupatla's method: inverse quadratic interpolation where the last three points say that it can be trusted,
    else a halving of the bracket [a, b], of which a is the newer end."""
    a, b = _beyond(lambda y: F(y) < q, center, -width), _beyond(lambda y: F(y) >= q, center, width)
    fa, fb = F(a) - q, F(b) - q
    eps, t = torch.finfo(a.dtype).eps, torch.full_like(a, 0.5)
    done = torch.zeros_like(a, dtype=torch.bool)
    while True:
        y = torch.where(done, a, a + t * (b - a))
        fy = F(y) - q
        same = (fy < 0) == (fa < 0)
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = y, fy
        least = 2 * eps * torch.maximum(torch.maximum(a.abs(), b.abs()), width) / (b - a).abs()  # share of the bracket
        done = done | (least > 0.5) | (fa.abs() <= 4 * eps * q)  # as far as F is known
        if bool(done.all()):
            return torch.where(fa.abs() < fb.abs(), a, b)
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        trusted = (phi.square() < xi) & ((1 - phi).square() < 1 - xi)
        jump = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        t = torch.minimum(torch.where(trusted, jump, 0.5).clamp(min=least), 1 - least)


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
    raise NotConverged(
        "a predicted quantile was not enclosed: the posterior over f is so wide that y is beyond 1e60 (raise the prior "
        "precision), or the distribution function does not tend to 0 and 1"
    )
