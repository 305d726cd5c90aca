"""Passes over the data of a fit, counted and held to it: products with the true GGN, and sums of gradients.

bᵀK⁻¹b is by conjugate gradients on M⁻¹, M near K = G + A, between two ends: what a residual r leaves open,

    0 ≤ rᵀK⁻¹r ≤ rᵀA⁻¹r
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import fixed
from lapwing.certify.leave_one_out import random_signs
from lapwing.curvature import State
from lapwing.curvature.products import gauss_newton
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.posterior import prior_precision
from lapwing.priors import Prior
from lapwing.solvers import Estimate, cg
from lapwing.solvers.estimate import ratio_of

TOLERANCE = {torch.float64: 1e-6}  # of CG, by the network's dtype
COARSE = 1e-3  # where products are rounded to float32 or less
CG_STEPS = 500  # a pass over the data each
HELD = 12  # vectors that a solve holds for each column


@dataclass
class Reader:
    """Products with the true curvature over the data, counted."""

    state: State
    prior: Prior
    likelihood: Likelihood
    batches: Any
    progress: bool
    passes: int = 0
    n: int = 0  # examples in the last pass, on this rank
    inputs: Tensor = field(default_factory=fixed.no_sums)  # their sums

    @property
    def ranks(self) -> Ranks:
        """The processes that share the data."""
        return loading.ranks_of(self.batches)

    @property
    def tolerance(self) -> float:
        """Of the residual of a solve."""
        return TOLERANCE.get(self.state.tangent.dtype, COARSE)

    def product(self, v: Tensor) -> Tensor:
        """(G + A) v."""
        self.passes += 1
        gv = gauss_newton(self.state.tangent, self.likelihood, self.batches, v, self.progress)
        return gv + linalg.mv(prior_precision(self.prior, self.state), v)

    def each(self, label: str) -> Iterator[tuple[Any, Tensor]]:
        """One pass over this rank's data."""
        self.passes += 1
        self.n, self.inputs = 0, fixed.no_sums()
        for x, y in loading.passes(self.batches, self.state.tangent.device, self.progress, label):
            self.n += len(y)
            self.inputs += fixed.input_sums(x, len(y))
            yield x, y

    def check(self) -> None:
        """Raise unless the last pass was over as many examples as were fitted."""
        n = self.ranks.count(self.n, "the number of examples")
        if n != self.state.n:
            raise InvalidValue(
                f"the curvature was summed over {self.state.n} examples and the data hold {n}; "
                "certify with the data of the fit"
            )
        fixed.check_inputs(self.ranks.total([self.inputs], "sums of the inputs")[0], self.state.inputs)

    def pulled(self, k: int, generator: torch.Generator) -> Tensor:
        """j = Σ_n J_nᵀu_n for k vectors of signs over all outputs, (k, p)."""
        tangent = self.state.tangent
        total = torch.zeros(k, tangent.layout.size, dtype=torch.float64, device=tangent.device)
        own = self.ranks.own(generator)
        with self.ranks.sharing_errors("vectors of signs"):
            for x, _ in self.each("predictions"):
                f = tangent(x)
                total += tangent.vjps(x, random_signs((k, *f.shape), own, f)).to(total)
        self.check()
        return self.ranks.total([total], "vectors of signs")[0]


# -- solves ----------------------------------------------------------------------------------------------------------


def solved(
    reader: Reader, near: linalg.Operator, b: Tensor, extra: Callable[[Tensor, Tensor], Tensor] | None, budget: int
) -> tuple[tuple[Tensor, Tensor], float, str]:
    """The two ends of bᵀK⁻¹b, (k,) each, which are one where conjugate gradients converged; the largest residual, and a
    note where they did not. Columns in as few groups as fit the memory budget."""

    def closer(v: Tensor) -> Tensor:
        return linalg.solve(near, v)

    low, high, worst, steps, converged = [], [], 0.0, 0, True
    for rows in torch.arange(len(b)).split(max(1, budget // (8 * HELD * b.shape[-1]))):
        some, more = b[rows], None if extra is None else _of(extra, rows)
        found = cg(reader.product, some, closer, tolerance=reader.tolerance, max_steps=CG_STEPS, extra=more)
        value, gap = (some * found.x).sum(-1), torch.zeros_like(some[:, 0])
        if not found.converged:
            image = reader.product(found.x)
            r = some - (image if more is None else image + more(found.x, torch.arange(len(some))))
            a = prior_precision(reader.prior, reader.state)
            value, gap = value + (r * found.x).sum(-1), (r * linalg.solve(a, r)).sum(-1)
        low.append(value)
        high.append(value + gap)
        worst, steps = max(worst, float(found.residual.max())), max(steps, found.steps)
        converged = converged and found.converged
    note = f"conjugate gradients stopped at a residual of {worst:.2g} after {steps} steps, above {reader.tolerance:g}; "
    note += "intervals of variances hold whatever that leaves open"
    return (torch.cat(low), torch.cat(high)), worst, "" if converged else note


def _of(extra: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """extra, for rows that are numbered within a group."""
    return lambda v, some: extra(v, rows[some.cpu()])


def ratio(ours: Tensor, low: Tensor, high: Tensor) -> Estimate:
    """mean(ours) / mean(true) − 1, the true ones between low and high."""
    return (ratio_of(ours, low) - 1).wider(*(ratio_of(ours, high) - 1).interval)
