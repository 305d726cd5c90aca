"""A precision in whitened coordinates is pushed by rows of the Jacobian, as what it is made of: streamed where the dual
form streams its own."""

from __future__ import annotations

from typing import Any

from lapwing.operators import HeldRows, RootPlusDiagonal, Whitened
from lapwing.outputs import Outputs
from lapwing.push.root import by_ranges
from lapwing.push.runs import At
from lapwing.push.verb import push


@push.register
def _(precision: Whitened, at: At) -> Outputs:
    inner: Any = precision.inner
    if isinstance(inner, RootPlusDiagonal) and not isinstance(inner.rows, HeldRows):
        return by_ranges(precision, at)
    return push.dispatch(object)(precision, at)
