"""The dual form: rows of the training data are streamed beside those of the inputs, a range of parameters at a time.
Rows that are held in memory are a low rank's, and pushed as any operator is."""

from __future__ import annotations

from typing import Any

from lapwing.curvature.rows import StreamedRows
from lapwing.operators import HeldRows, RootPlusDiagonal, linalg
from lapwing.outputs import Normal, Outputs
from lapwing.push.runs import At
from lapwing.push.verb import push
from lapwing.tangent.rows import units


@push.register
def _(precision: RootPlusDiagonal, at: At) -> Outputs:
    if isinstance(precision.rows, HeldRows):
        return push.dispatch(object)(precision, at)
    return by_ranges(precision, at)


def by_ranges(precision: Any, at: At) -> Outputs:
    """The outputs by ranges of parameters, for a precision whose `covariance` takes rows by ranges."""
    f = at.tangent(at.x)
    if at.joint:
        at.check_joint(f)
    rows = StreamedRows(at.tangent, ((at.x, units(f)),), at.budget)
    blocks = linalg.covariance(precision, (rows, f.numel() if at.joint else f.shape[-1]))
    return Normal(f, blocks.reshape(*f.shape, *(f.shape if at.joint else f.shape[-1:])), at.joint)
