"""Centers in a file: v* of the tangent model and of the process, and the likelihood's sums at them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing.center import Center
from lapwing.errors import BrokenFile
from lapwing.likelihoods import Likelihood
from lapwing.packing import Entries, Tensors, pack_plain, sound, unpack_plain
from lapwing.tree import Layout

CENTER = ("iterations", "residual", "passes")  # of a Center, beside its tensors
POSITIVE = ("count", "weight")  # statistics that no data leave at 0


def moved_center(center: Center | None, device: torch.device) -> Center | None:
    """On a device."""
    if center is None:
        return None
    statistics = {key: value.to(device) for key, value in center.statistics.items()}
    constant = None if center.constant is None else center.constant.to(device)
    return replace(center, vector=center.vector.to(device), statistics=statistics, constant=constant)


def pack_center(center: Center | None, name: str = "center") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A center as tensors and a header, by its name."""
    if center is None:
        return {}, {f"{name}_map": None}
    tensors = {f"{name}.vector": center.vector}
    tensors |= {} if center.constant is None else {f"{name}.constant": center.constant}
    tensors |= {f"{name}.statistics.{k}": v for k, v in center.statistics.items()}
    return tensors, {f"{name}_map": pack_plain(center, CENTER)}


def take_statistics(held: Tensors, prefix: str, likelihood: Likelihood, n: int) -> dict[str, Tensor]:
    """The likelihood\'s sums, checked against themselves and the number of examples."""
    found = {key: held.finite(prefix + key, dtype=torch.float64) for key in held.under(prefix)}
    with sound(f"its {prefix[:-1]}"):
        likelihood.check_shapes(found)
        if any(not bool((found[key] > 0).all()) for key in POSITIVE if key in found):
            raise BrokenFile(f"its {prefix[:-1]} are of no data")
        count = float(found["count"].min()) if "count" in found and "weight" not in found else n
        if count < n:
            raise BrokenFile(f"its {prefix[:-1]} are of {count:g} targets, and it has {n} examples")
        if not bool(torch.isfinite(likelihood.log_likelihood(found))):
            raise BrokenFile(f"its {prefix[:-1]} give no log-likelihood")
    return found


def take_center(
    entries: Entries, held: Tensors, layout: Layout, likelihood: Likelihood, n: int, name: str = "center"
) -> Center | None:
    """A center by its name, checked; None where none was saved."""
    kept = entries.take(f"{name}_map", "dict | None")
    if kept is None:
        return None
    found = unpack_plain(Center, kept, f"its {name}", CENTER)
    vector = held.finite(f"{name}.vector", (layout.size,), torch.float64)
    constant = held.finite(f"{name}.constant", dtype=torch.float64) if f"{name}.constant" in held.left else None
    if (name == "process" and constant is None) or (constant is not None and constant.ndim != 1):
        raise BrokenFile(f"its {name} has constants {constant if constant is None else tuple(constant.shape)}")
    return Center(vector, take_statistics(held, f"{name}.statistics.", likelihood, n), **found, constant=constant)
