"""bᵀK⁻¹b by conjugate gradients on M⁻¹, M near K = G + A, between two ends: what a residual r leaves open,

0 ≤ rᵀK⁻¹r ≤ rᵀA⁻¹r
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.certify.reader import Reader
from lapwing.operators import linalg
from lapwing.posterior import prior_precision
from lapwing.solvers import Estimate, cg
from lapwing.solvers.estimate import ratio_of

CG_STEPS = 500  # a pass over the data each
HELD = 12  # vectors that a solve holds for each column


@dataclass(frozen=True, eq=False)
class Solved:
    """bᵀK⁻¹b, (k,), between two ends, which are one where conjugate gradients converged."""

    ends: tuple[Tensor, Tensor]
    residual: float
    note: str


def solved(
    reader: Reader, near: Any, b: Tensor, extra: Callable[[Tensor, Tensor], Tensor] | None, budget: int
) -> Solved:
    """Columns in as few groups as fit the memory budget."""

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
    return Solved((torch.cat(low), torch.cat(high)), worst, "" if converged else note)


def _of(extra: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """extra, for rows that are numbered within a group."""
    return lambda v, some: extra(v, rows[some.cpu()])


def ratio(ours: Tensor, low: Tensor, high: Tensor) -> Estimate:
    """mean(ours) / mean(true) − 1, the true ones between low and high."""
    return (ratio_of(ours, low) - 1).wider(*(ratio_of(ours, high) - 1).interval)
