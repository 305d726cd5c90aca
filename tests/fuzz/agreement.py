"""When two numbers are the same, and whether the user's things were left as they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
LOADED = {torch.float64: 1e-9, torch.float32: 1e-4}  # a loaded network may run by another route, and rounds so
FLOOR = 1e-3  # prior precisions are 0.3 and more, and rounding of what is zero is no difference


class Difference(Exception):
    """Two numbers that must be equal are not."""


def agree(law: str, found: Tensor, expected: Tensor, tolerance: float, scale: float = 0.0) -> None:
    """Equal within a tolerance of the largest expected number, or of a scale."""
    found, expected = found.detach().double(), expected.detach().double()
    if found.shape != expected.shape:
        raise Difference(f"{law}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not bool(torch.isfinite(found).all()):
        raise Difference(f"{law}: NaN or infinite")
    size = max(scale, float(expected.abs().max()) if expected.numel() else 0.0, FLOOR)
    error = float((found - expected).abs().max()) / size if found.numel() else 0.0
    if error > tolerance:
        raise Difference(f"{law}: off by {error:.2g} of {size:.3g}, more than {tolerance:.0e}")


# -- the user's things are left as they were -----------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a fit may not change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {k: t.detach().clone() for k, t in tensors.items()},
        "objects": {k: id(t) for k, t in tensors.items()},
        "flags": {k: (t.requires_grad, t.grad is None) for k, t in tensors.items()},
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "forwards": ["forward" in vars(m) for m in model.modules()],
        "random": torch.get_rng_state(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
    }


def untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for key, value in before.items():
        new = after[key]
        if isinstance(value, Tensor):
            same = torch.equal(value, new)
        elif key == "values":
            same = value.keys() == new.keys() and all(torch.equal(value[k], new[k]) for k in value)
        else:
            same = value == new
        if not same:
            raise Difference(f"untouched: the user's {key} changed")
