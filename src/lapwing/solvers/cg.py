"""Preconditioned conjugate gradients for many right-hand sides at once:  K x = b,  K symmetric positive definite.

    r = b − K x,   z = M⁻¹ r,   d ← z + (rᵀz / r'ᵀz') d,   x ← x + (rᵀz / dᵀK d) d          (each row of b its own)

b (k, p). A column (a row of b) that has met ‖r‖ ≤ tolerance·‖b‖ is frozen, and K is no longer applied to it. What is
updated drifts from b − K x by rounding, so that is computed anew now and then, and in the end for every column: a
column that missed starts again from there, unless it no longer gains: then, if K x is another when it is asked for
again, K is not one matrix, and that is an error. Columns may be spread over processes, which then ask for products
together, with none of their own once those are done. Columns may also have a matrix each, K + E_column, where `extra`
gives E v. Source: Shewchuk 1994, B3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotPositiveDefinite
from lapwing.solvers.product import Anywhere, Product, here, product, same

REFRESH = 50  # steps after which b − K x is computed anew
DRIFT = 0.1  # how far, of its size, it may be from what is updated


@dataclass(frozen=True, eq=False)
class Solution:
    """What K x = b was solved to, column by column."""

    x: Tensor  # (k, p), float64
    residual: Tensor  # (k,), ‖b − K x‖ / ‖b‖, of x as it is given
    steps: int  # of the column that took most
    converged: bool  # every residual is within the tolerance
    products: int = 0  # calls of mv: passes, where K is a sum over data


@torch.no_grad()
def cg(
    mv: Product,
    b: Tensor,
    preconditioner: Product | None = None,
    x0: Tensor | None = None,
    tolerance: float = 1e-6,
    max_steps: int = 1_000,
    anywhere: Anywhere = here,
    extra: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Solution:
    """Solve K x = b for the rows of b (k, p) from x0 (zero unless given); preconditioner applies M⁻¹ ≈ K⁻¹. Where rows
    have matrices of their own, extra(v, rows) is what to add to K v, for v (m, p) and the numbers (m,) of its rows.

    It never raises for want of convergence: the caller knows what to advise, and asks `converged`.
    """
    _check(b, x0, tolerance, max_steps)
    precondition = preconditioner or (lambda r: r)

    def image_of(v: Tensor, rows: Tensor) -> Tensor:
        out = product(mv, v[rows])
        return out if extra is None else out + extra(v[rows], rows).to(out)

    b = b.to(torch.float64)
    size = b.norm(dim=-1)  # (k,)
    goal = tolerance * size
    x = torch.zeros_like(b) if x0 is None else x0.to(b).clone()
    x[size == 0] = 0  # the answer
    r, d, rho = b.clone(), torch.zeros_like(b), torch.ones_like(goal)
    steps = products = 0
    left = size > 0  # columns that are not known to be done
    if x0 is not None and anywhere(bool(left.any())):
        r[left] -= image_of(x, left.nonzero().squeeze(-1))
        products, left = 1, left & (r.norm(dim=-1) > goal)
    best, least, last = x.clone(), r.norm(dim=-1), torch.full_like(goal, float("inf"))
    running = left.clone()
    while anywhere(bool(left.any())):
        some = running.nonzero().squeeze(-1)
        z = precondition(r[some]).to(b)
        before, rho[some] = rho[some], _positive((r[some] * z).sum(-1), "the preconditioner")
        d[some] = z + (rho[some] / before).unsqueeze(-1) * d[some]
        image = image_of(d, some)  # K d
        length = rho[some] / _positive((d[some] * image).sum(-1), "the matrix")
        x[some] += length.unsqueeze(-1) * d[some]
        r[some] -= length.unsqueeze(-1) * image
        steps, products = steps + 1, products + 1
        running = running & (r.norm(dim=-1) > goal)
        ended = steps == max_steps or not anywhere(bool(running.any()))
        if not ended and steps % REFRESH:
            continue
        some = (left if ended else running).nonzero().squeeze(-1)
        true = b[some] - image_of(x, some)
        products += 1
        now = true.norm(dim=-1)
        better = now < least[some]
        best[some[better]], least[some[better]] = x[some[better]], now[better]
        # Where rounding has parted r from b − K x, begin anew from the latter; give up where that no longer gains.
        parted = (now > goal[some]) & (((true - r[some]).norm(dim=-1) > DRIFT * now) | ~running[some])
        again, r[some[parted]] = some[parted], true[parted]
        stuck = again[least[again] >= 0.5 * last[again]]
        last[again] = least[again]
        d[again], rho[again], running[again] = 0.0, 1.0, True
        left[some[now <= goal[some]]] = False
        left[stuck] = running[stuck] = False
        if anywhere(len(stuck) > 0):
            same(*(image_of(b, stuck[:1]) for _ in range(2)))
            products += 2
        if steps == max_steps:
            break
    residual = least / size.clamp(min=torch.finfo(b.dtype).tiny)
    return Solution(best, residual, steps, bool((least <= goal).all()), products)


def _positive(values: Tensor, what: str) -> Tensor:
    if not torch.isfinite(values).all():
        raise InvalidValue(f"NaN or infinite values in a product with {what}; check it and its data")
    if bool((values <= 0).any()):
        raise NotPositiveDefinite(
            f"conjugate gradients need {what} positive definite: got vᵀMv = {float(values.min()):.3g}; "
            "add a (larger) prior precision"
        )
    return values


def _check(b: Tensor, x0: Tensor | None, tolerance: float, max_steps: int) -> None:
    if b.ndim != 2 or not b.is_floating_point():
        raise InvalidValue(f"b must be floating point of shape (k, p), got {b.dtype} of shape {tuple(b.shape)}")
    if not torch.isfinite(b).all():
        raise InvalidValue("b holds NaN or infinite values; a linear system needs finite ones")
    if x0 is not None and x0.shape != b.shape:
        raise InvalidValue(f"x0 must have the shape of b, {tuple(b.shape)}; got {tuple(x0.shape)}")
    if not tolerance > 0 or max_steps < 1:
        raise InvalidValue(f"give tolerance > 0 and max_steps >= 1; got {tolerance} and {max_steps}")
