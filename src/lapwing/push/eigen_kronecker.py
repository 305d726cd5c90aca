"""A diagonal in the eigenbasis of a Kronecker product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lapwing.curvature.parts import Part
from lapwing.operators import EigenPlusDiagonal
from lapwing.push.basis import Diagonalized, in_basis, rotated


@in_basis.register
def _(op: EigenPlusDiagonal, part: Part, view: Any, g: Tensor) -> Diagonalized:
    return rotated(op, view, g, op.ua, op.ub)
