"""A Laplace object of other data: more of them, or fewer, at the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lapwing import curvature
from lapwing.arguments import as_shard
from lapwing.curvature import State, accumulate
from lapwing.curvature.overflow import check_sums
from lapwing.data import Joined, ranks_of
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import linalg
from lapwing.posterior import placed
from lapwing.priors import Prior

if TYPE_CHECKING:
    from lapwing.api.object import Laplace


def updated(la: Laplace, more_data: Any, generator: torch.Generator | None, progress: bool) -> Laplace:
    """As `Laplace.updated` says."""
    generator = generator or torch.Generator().manual_seed(la.state.n)
    structure, factor, added = la.state.structure, la.state.factor, as_shard(more_data, ranks_of(la.data))
    more = accumulate(
        structure,
        la.tangent,
        la.likelihood,
        added,
        factor,
        generator=generator,
        progress=progress,
        basis=la.state if la.state.basis else None,
    )
    data = None if la.data is None else Joined((la.data, added))
    state = check_sums(la.state + more)
    return replace(la.forgetful(), state=state, prior=placed(la.prior, state), data=data)


def without(la: Laplace, data: Any, progress: bool) -> Laplace:
    """As `Laplace.without` says."""
    if la.streams:
        raise Unsupported("matrix_free keeps no sums to take data out of; fit again on the data that stay")
    gone = accumulate(
        la.state.structure,
        la.tangent,
        la.likelihood,
        as_shard(data, ranks_of(la.data)),
        la.state.factor,
        progress=progress,
        basis=la.state if la.state.basis else None,
    )
    state = curvature.without(la.state, gone, la.likelihood)
    return replace(la.forgetful(), state=state, prior=_placed_without(la, state), data=None)


def _placed_without(la: Laplace, state: State) -> Prior:
    """The prior after a removal; a g-prior needs each weight's second moment, and rounding is none."""
    if la.prior.of_curvature:
        before, left = (linalg.diagonal(s.structure.operator(s, s.unit_weights)) for s in (la.state, state))
        lost = curvature.vanished(before, left, state)
        if lost:
            raise InvalidValue(
                f"{lost} weights had curvature from these data alone: what is left of it is rounding, and the "
                "g-prior is made of it; fit again on the data that stay, or use another prior"
            )
    return placed(la.prior, state)
