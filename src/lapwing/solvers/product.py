"""Products with a matrix that is known by them alone: K v for the rows of v, checked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.errors import InvalidValue

Product = Callable[[Tensor], Tensor]  # (k, p) -> (k, p), for any k

Anywhere = Callable[[bool], bool]  # whether it is so in any process, of those that columns are spread over

CHANGED = 0.01  # of its length, by which a product may differ when it is asked for again


def here(so: bool) -> bool:
    """`Anywhere`, in one process."""
    return so


def product(mv: Product, v: Tensor) -> Tensor:
    """K v in the dtype of v, of its shape and finite."""
    out = mv(v)
    if out.shape != v.shape:
        raise InvalidValue(f"mv must keep the shape of its vectors: got {tuple(out.shape)} for {tuple(v.shape)}")
    if not torch.isfinite(out).all():
        raise InvalidValue("NaN or infinite values in a product with the matrix; check it and its data")
    return out.to(v)


def same(first: Tensor, again: Tensor) -> None:
    """Raise unless two products with the same vectors agree to more than rounding."""
    away = float((first - again).norm() / first.norm().clamp(min=torch.finfo(first.dtype).tiny))
    if away > CHANGED:
        raise InvalidValue(
            f"the matrix changes between products: the same vector gave another one, {away:.2g} of its length away; "
            "where products are passes over data, give a loader with the same examples in each pass (no augmentation, "
            "no dropped batch, no dropout)"
        )


def steady(mv: Product) -> Product:
    """mv, whose first vector rides along in the second call, and must have the same product there."""
    seen: list[tuple[Tensor, Tensor]] = []

    def checked(v: Tensor) -> Tensor:
        if len(seen) != 1:
            out = product(mv, v)
        else:
            out, again = product(mv, torch.cat([v, seen[0][0]])).split([len(v), 1])
            same(seen[0][1], again)
        if len(seen) < 2:
            seen.append((v[:1].clone(), out[:1].clone()))
        return out

    return checked
