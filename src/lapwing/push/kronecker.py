"""A Kronecker product: eigenvectors of both factors, after the scales of a prior that differs between weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.parts import Part
from lapwing.operators import KroneckerPlusDiagonal
from lapwing.push.basis import Diagonalized, in_basis, rotated


@in_basis.register
def _(op: KroneckerPlusDiagonal, part: Part, view: Any, g: Tensor) -> Diagonalized:
    _, ua, _, ub = op.decomposition
    if not op.plain:
        u, e = (t.rsqrt().to(g) for t in op.separated)
        g = g * u
        ua = torch.diag_embed(e) if ua is None else e.unsqueeze(-1) * ua.to(g)
    return rotated(op, view, g, ua, ub)
