"""The middle of Rᵀ W R, by a root of its own: W = V Vᵀ, V (m, r).

    half(W, u)    u V          (..., m) -> (..., r)
    back(W, e)    e Vᵀ         (..., r) -> (..., m)
    trace(W, K)   tr W K       (..., m, m) -> (...)

W is a Diagonal, V = W^½, or `Mixed`, which couples each a rows that follow one another: V = I ⊗ L.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal


@dataclass(frozen=True, eq=False)
class Mixed:
    """W = V Vᵀ (m, m) with V = I ⊗ L: `copies` of L on the diagonal."""

    uniform: ClassVar[bool] = False
    values: Tensor  # L (a, b)
    copies: int = 1  # m / a

    @property
    def size(self) -> int:
        """m."""
        return self.copies * len(self.values)


@linalg.verb
def half(w: Any, u: Tensor) -> Tensor:  # type: ignore[empty-body]
    """u V (..., r), for u (..., m)."""


@linalg.verb
def back(w: Any, e: Tensor) -> Tensor:  # type: ignore[empty-body]
    """e Vᵀ (..., m), for e (..., r)."""


@linalg.verb
def trace(w: Any, k: Tensor) -> Tensor:  # type: ignore[empty-body]
    """tr W K (...), for K (..., m, m)."""


@half.register
def _(w: Diagonal, u: Tensor) -> Tensor:
    return u * w.dense().sqrt()


@back.register
def _(w: Diagonal, e: Tensor) -> Tensor:
    return e * w.dense().sqrt()


@trace.register
def _(w: Diagonal, k: Tensor) -> Tensor:
    return k.diagonal(dim1=-2, dim2=-1) @ w.dense()


@half.register
def _(w: Mixed, u: Tensor) -> Tensor:
    return (u.unflatten(-1, (w.copies, -1)) @ w.values).flatten(-2)


@back.register
def _(w: Mixed, e: Tensor) -> Tensor:
    return (e.unflatten(-1, (w.copies, -1)) @ w.values.mT).flatten(-2)


@trace.register
def _(w: Mixed, k: Tensor) -> Tensor:
    blocks = k.unflatten(-1, (w.copies, -1)).unflatten(-3, (w.copies, -1))  # (..., n, a, n, a)
    return (blocks.diagonal(dim1=-4, dim2=-2).sum(-1) * (w.values @ w.values.mT)).sum((-2, -1))


@linalg.scale.register
def _(w: Mixed, s: Tensor) -> Mixed:
    return replace(w, values=w.values * s.sqrt())
