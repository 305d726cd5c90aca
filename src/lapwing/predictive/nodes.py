"""Expectations over the outputs f ~ N(μ, V), as weighted sums  E g(f) ≈ Σ_s w_s g(f_s),  always at the same z:

    line     f_s = μ + √diag V · z_s, z_s an even grid over ±12: the trapezoidal rule, whose error for an analytic g
             falls exponentially in the number of points. For g of one output at a time
    cloud    f_s = μ + L z_s, L Lᵀ = V, z_s quasi-random points: with the full covariance
    drawn    f_s draws of another kind, of equal weight

Shapes: s nodes, n inputs, c outputs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.predictive.link import DRAWS, psd_root, quasi_normal

REACH = 12  # standard deviations at which the line ends
LEAST_NODES, MOST_NODES = 16, 1024  # nodes of the line in one standard deviation, at the least and at the most


@dataclass(frozen=True, eq=False)
class Nodes:
    f: Tensor  # (s, n, c)
    log_weight: Tensor  # (s, 1), or (s, n); sums to one over s

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
        return [Nodes(*one) for one in zip(f, each, strict=True)]

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
        found = Nodes(torch.where(inside.unsqueeze(-1), self.f, spare), log_weight - kept)
        return found, float(1 - kept.exp().min())


def line(mean: Tensor, var: Tensor, steps: int = LEAST_NODES) -> Nodes:
    """For each output by itself: μ and variance (n, c)."""
    z, log_weight = (t.to(mean) for t in _grid(steps))
    return Nodes(mean + var.clamp(min=0).sqrt() * z[:, None, None], log_weight[:, None])


def cloud(mean: Tensor, cov: Tensor) -> Nodes:
    """For all outputs of an input together: μ (n, c), V (n, c, c)."""
    z = quasi_normal(DRAWS, mean.shape[-1]).to(mean)
    return drawn(mean + torch.einsum("nab,sb->sna", psd_root(cov), z))


def drawn(f: Tensor) -> Nodes:
    return Nodes(f, f.new_full((len(f), 1), -math.log(len(f))))


def fine(sharpness: Tensor) -> Tensor:
    """How many steps resolve p(y | f) along the line, a power of two: it is 1/√sharpness of a standard deviation wide,
    and four steps within that leave an error of rounding. (N,) -> (N,), integers."""
    wanted = 4 * sharpness.double().nan_to_num(nan=0.0, posinf=float(MOST_NODES**2)).sqrt()
    return (2 ** wanted.clamp(LEAST_NODES, MOST_NODES).log2().ceil()).long()


@functools.lru_cache(maxsize=8)
def _grid(steps: int) -> tuple[Tensor, Tensor]:
    z = torch.linspace(-REACH, REACH, 2 * REACH * steps + 1, dtype=torch.float64)
    return z, torch.log_softmax(-0.5 * z.square(), 0)
