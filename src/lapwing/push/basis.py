"""The basis in which a layer's posterior is diagonal, for those operators that have one."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lapwing.curvature.parts import Part

Diagonalized: TypeAlias = tuple[Any, Tensor, Tensor]  # inputs, gradients, and the variances V (b, o, i)


@singledispatch
def in_basis(op: Any, part: Part, view: Any, g: Tensor) -> Diagonalized | None:
    """Inputs and output gradients g (k, n, s, b, o) in that basis, and V there; None where there is none."""
    return None


def rotated(op: Any, view: Any, g: Tensor, ua: Tensor | None, ub: Tensor) -> Diagonalized:
    """By eigenvectors of the inputs' factor (None: those of the identity) and of the gradients'."""
    turned = torch.einsum("knsbo,boq->knsbq", g, ub.to(g))
    return view.rotated(None if ua is None else ua.to(g)), turned, (1 / op.precision).to(g)
