"""Expectations over outputs f as weighted sums  E g(f) ≈ Σ_s w_s g(f_s).  For f ~ N(μ, V), always at the same z:

    line     f_s = μ + √diag V · z_s, z_s an even grid over ±12: the trapezoidal rule, whose error for an analytic g
             falls exponentially in the number of points. For g of one output at a time
    cloud    f_s = μ + L z_s, L Lᵀ = V, z_s quasi-random points: with the full covariance
    drawn    f_s draws of another kind, of equal weight unless told otherwise

Where there are several likelihoods, one for each of several sources of f, nodes know theirs.
Shapes: s nodes, n inputs, c outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.outputs.points import DRAWS, psd_root, quasi_normal

REACH = 12  # standard deviations at which the line ends
LEAST_NODES, MOST_NODES = 16, 1024  # nodes of the line in one standard deviation, at the least and at the most


@dataclass(frozen=True, eq=False)
class Nodes:
    """Values of f with the weights that they have in a sum."""

    f: Tensor  # (s, n, c)
    log_weight: Tensor  # (s, 1), or (s, n); sums to one over s
    source: Tensor | None = None  # (s,): which of several a node is from; None where there is one

    def average(self, values: Tensor) -> Tensor:
        """Σ_s w_s g_s for values g (s, n, ...)."""
        w = self.log_weight.exp()
        return torch.tensordot(w[:, 0], values, 1) if w.shape[1] == 1 else torch.einsum("sn,sn...->n...", w, values)

    def log_average(self, log_values: Tensor) -> Tensor:
        """log Σ_s w_s exp(l_s) for l (s, n)."""
        return torch.logsumexp(log_values + self.log_weight, 0)

    def split(self, size: int) -> list[Nodes]:
        """Of so many inputs each."""
        f = self.f.split(size, 1)
        each = self.log_weight.split(size, 1) if self.log_weight.shape[1] > 1 else [self.log_weight] * len(f)
        return [replace(self, f=some, log_weight=w) for some, w in zip(f, each, strict=True)]

    def inside(self, likelihood: Likelihood) -> tuple[Nodes, float]:
        """Those at which f means something, weighted anew, and the most weight that was outside."""
        inside = likelihood.inside(self.f)  # (s, n)
        if bool(inside.all()):
            return self, 0.0
        log_weight = torch.where(inside, self.log_weight, -math.inf)
        kept = torch.logsumexp(log_weight, 0)
        if bool((kept == -math.inf).any()):
            raise InvalidValue(
                f"no draw of f is one that {likelihood.name} can take; the posterior is too wide there for draws: use "
                "link='auto'"
            )
        first = inside.to(torch.uint8).argmax(0)  # any that can be evaluated: its weight is zero
        spare = self.f[first, torch.arange(len(first), device=first.device)]
        found = torch.where(inside.unsqueeze(-1), self.f, spare)
        return replace(self, f=found, log_weight=log_weight - kept), float(1 - kept.exp().min())


def line(mean: Tensor, var: Tensor, steps: int = LEAST_NODES) -> Nodes:
    """For each output by itself: μ and variance (n, c)."""
    z, log_weight = (t.to(mean) for t in _grid(steps))
    return Nodes(mean + var.clamp(min=0).sqrt() * z[:, None, None], log_weight[:, None])


def cloud(mean: Tensor, cov: Tensor) -> Nodes:
    """For all outputs of an input together: μ (n, c), V (n, c, c)."""
    z = quasi_normal(DRAWS, mean.shape[-1]).to(mean)
    return drawn(mean + torch.einsum("nab,sb->sna", psd_root(cov), z))


def drawn(f: Tensor, log_weight: Tensor | None = None) -> Nodes:
    """Draws f (s, n, c), of log-weights (s,) if they are not equal."""
    equal = f.new_full((len(f), 1), -math.log(len(f)))
    return Nodes(f, equal if log_weight is None else log_weight.to(f)[:, None])


def joined(parts: Sequence[Nodes], log_weight: Tensor, sources: Sequence[int]) -> Nodes:
    """Those of several parts of one mixture, with log-weights (k,); each part has so many sources of its own."""
    starts = torch.tensor([0, *sources]).cumsum(0).tolist()
    source = [
        start + (torch.zeros(len(p.f), dtype=torch.long) if p.source is None else p.source)
        for start, p in zip(starts, parts, strict=False)
    ]
    n = parts[0].f.shape[1]
    weights = [(p.log_weight + w).expand(-1, n) for p, w in zip(parts, log_weight, strict=True)]
    return Nodes(torch.cat([p.f for p in parts]), torch.cat(weights), torch.cat(source))


def fine(sharpness: Tensor) -> Tensor:
    """How many steps resolve p(y | f) along the line, a power of two: it is 1/√sharpness of a standard deviation wide,
    and four steps within that leave an error of rounding. (N,) -> (N,), integers."""
    wanted = 4 * sharpness.double().nan_to_num(nan=0.0, posinf=float(MOST_NODES**2)).sqrt()
    return (2 ** wanted.clamp(LEAST_NODES, MOST_NODES).log2().ceil()).long()


@functools.lru_cache(maxsize=8)
def _grid(steps: int) -> tuple[Tensor, Tensor]:
    z = torch.linspace(-REACH, REACH, 2 * REACH * steps + 1, dtype=torch.float64)
    return z, torch.log_softmax(-0.5 * z.square(), 0)
