"""A diagonal precision of a layer: its weights are the basis."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lapwing.curvature.parts import Part
from lapwing.operators import Diagonal
from lapwing.push.basis import Diagonalized, in_basis


@in_basis.register
def _(op: Diagonal, part: Part, view: Any, g: Tensor) -> Diagonalized:
    return view, g, (1 / op.dense()).reshape(part.shape).to(g)
