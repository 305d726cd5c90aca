"""Pushing a posterior to outputs: f(x) ~ N(f(x, θ*), J(x) M⁻¹ J(x)ᵀ) for the precision M of the weights (Eq. 4).

One verb, dispatched on the operator M; each operator's way stands in a file named after it. An operator without one is
pushed by rows of the Jacobian, through linalg.covariance.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.cover import cover
from lapwing.curvature.rows import RowMaker
from lapwing.operators import linalg
from lapwing.outputs import Normal, Outputs
from lapwing.push.runs import At
from lapwing.tangent.rows import units


@singledispatch
def push(precision: Any, at: At) -> Outputs:
    """The outputs at some inputs; covariances in float64."""
    maker = RowMaker(at.tangent, at.parts or cover(at.tangent, at.x))
    fs, covs = [], []
    for piece, record in at.runs(maker.run):
        f = record.f.detach()
        fs.append(f)
        covs.append(by_rows(precision, f, maker.rows(record, piece, units(f), at.budget // 6), at.joint))
    return Normal(torch.cat(fs), torch.cat(covs), at.joint)


def by_rows(precision: Any, f: Tensor, pieces: Any, joint: bool) -> Tensor:
    """J M⁻¹ Jᵀ for pieces of the rows of J (n, q·c, p) at outputs f (n, ..., c)."""
    if joint:
        rows = torch.cat(list(pieces)).to(torch.float64).reshape(1, f.numel(), -1)
        return linalg.covariance(precision, rows).reshape(*f.shape, *f.shape)
    c, found = f.shape[-1], []
    for rows in pieces:
        found.append(linalg.covariance(precision, rows.to(torch.float64).reshape(-1, c, rows.shape[-1])))
    return torch.cat(found).reshape(*f.shape, c)
