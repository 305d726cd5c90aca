"""A dense precision takes rows of the Jacobian as outer products where a layer has them so: those are never formed."""

from __future__ import annotations

import torch

from lapwing.curvature.cover import cover
from lapwing.curvature.rows import RowMaker
from lapwing.operators import Dense, linalg
from lapwing.outputs import Normal
from lapwing.push.runs import At
from lapwing.push.verb import by_rows, push
from lapwing.tangent.rows import units


@push.register
def _(precision: Dense, at: At) -> Normal:
    maker = RowMaker(at.tangent, at.parts or cover(at.tangent, at.x))
    fs, covs = [], []
    for piece, record in at.runs(maker.run):
        f = record.f.detach()
        outer = None if at.joint else maker.head(record)
        if outer is None and not at.joint and f.ndim == 2:
            outer = maker.outer(record, units(f))
        fs.append(f)
        if outer is not None:
            covs.append(linalg.covariance(precision, outer).reshape(*f.shape, f.shape[-1]))
        else:
            covs.append(by_rows(precision, f, maker.rows(record, piece, units(f), at.budget // 6), at.joint))
    return Normal(torch.cat(fs), torch.cat(covs), at.joint)
