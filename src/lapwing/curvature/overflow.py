"""Sums that are not finite, and why: the network has a derivative that is not finite, or finite ones overflow.

Kronecker factors and diagonals are sums of squares in the network's dtype. float32 ends at 3.4e38, so derivatives or
inputs of 1e20 are too large for it, though each is finite. The two are told apart by the mean over examples and outputs

    (1/nc) Σ_n J_nᵀ 1

which is finite where all derivatives are, and not where one is not (0 · ∞ is NaN): one reverse pass a batch, and only
once something went wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from lapwing import data as loading
from lapwing.curvature.state import State
from lapwing.errors import InvalidValue
from lapwing.tangent import TangentModel

KINKS = "a square root or a norm at zero, an infinite buffer"


def check_sums(state: State, batches: Any = None) -> State:
    """The state, if its sums are finite; else an error that says why, as far as the data are there to tell."""
    if all(bool(torch.isfinite(t).all()) for t in state.sums.values()):
        return state
    tangent, ranks = state.tangent, loading.ranks_of(batches)
    what = "the curvature holds NaN or infinite values, though the outputs do not: "
    if batches is None:
        raise InvalidValue(f"{what}{overflowed(tangent)}; or the network has a derivative that is not finite ({KINKS})")
    with ranks.sharing_errors("looking for derivatives that are not finite"):
        found = next((bad for x, _ in loading.passes(batches, tangent.device) if (bad := not_finite(tangent, x))), None)
    bad = ranks.first(found, "derivatives that are not finite")
    raise InvalidValue(what + (overflowed(tangent) if bad is None else not_finite_by(bad, tangent)))


def not_finite(tangent: TangentModel, x: Any) -> list[str] | None:
    """The parameters by which the network's derivative at some of these inputs is not finite; None if there is none."""
    f = tangent(x)
    grads = tangent.vjp(x, torch.full_like(f, 1 / max(1, f.numel())))
    return [name for name, g in grads.items() if not bool(torch.isfinite(g).all())] or None


def overflowed(tangent: TangentModel) -> str:
    """That sums overflow, and what to do, in words."""
    dtype = tangent.sum_dtype
    return f"sums of squares overflow {_name(dtype)}, which ends at {torch.finfo(dtype).max:.2g}; {remedy(tangent)}"


def remedy(tangent: TangentModel) -> str:
    """What to do about numbers that are too large, in words."""
    wider = "" if tangent.dtype == torch.float64 else ", or fit network.double()"
    return f"scale the inputs, the targets or the noise{wider}"


def not_finite_by(names: list[str], tangent: TangentModel) -> str:
    """That a derivative is not finite, by which parameters, and what to do, in words."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    wider = "" if tangent.dtype == torch.float64 else f"; or it is beyond {_name(tangent.dtype)}: try network.double()"
    return (
        f"the network has a derivative that is not finite, by {names[0]}{more} ({KINKS}{wider}); change that layer or "
        "leave it out with subset="
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
