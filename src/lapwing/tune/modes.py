"""Whether the trained weights can be a mode of the posterior at all.

A layer whose output is normalized may be scaled at will, f(x, k·w) = f(x, w), while the prior prefers it small: the log
joint density rises all the way to w = 0, and training stops somewhere on the way.
"""

from __future__ import annotations

from torch import nn

from lapwing.errors import warn
from lapwing.tangent import TangentModel
from lapwing.tree import layer_of


def normalized_by(tangent: TangentModel) -> tuple[str, ...]:
    """The normalization layers that follow a selected parameter, in the order of the model."""
    layers = {layer_of(name) for name in tangent.layout.names}
    modules = list(tangent.model.named_modules())
    first = next((i for i, (name, _) in enumerate(modules) if name in layers and name), 0)
    return tuple(name for name, module in modules[first + 1 :] if _normalizes(module))


def _normalizes(module: nn.Module) -> bool:
    return type(module).__name__.rstrip("123d").endswith("Norm") and not list(module.children())


def warn_no_mode(tangent: TangentModel) -> None:
    """Warn where normalization layers leave the trained weights no mode."""
    found = normalized_by(tangent)
    if found:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        warn(
            f"normalization layers ({shown}) leave the posterior without a mode, and the evidence at the trained "
            "weights is then biased; center='tangent' takes it at the mode of the tangent model",
        )
