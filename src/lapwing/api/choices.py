"""Words that a Laplace object takes for where it is centered and what predictions are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lapwing.errors import InvalidValue
from lapwing.given import near
from lapwing.posterior.mixture import log_weights

CENTERS = ("tangent", "map", "process")
PARTS = ("network", "tangent", "process")  # that a mixture can be made of
MEANS = (*PARTS, "mixture", "auto")


def checked_center(center: str) -> str:
    """A center by its name."""
    if center not in CENTERS:
        raise InvalidValue(
            f"center must be 'tangent', 'map' (the trained weights) or 'process' (about a constant), got {center!r}"
            f"{near(center, CENTERS)}"
        )
    return center


def checked_mean(mean: str) -> str:
    """A predictive mean by its name."""
    if mean not in MEANS:
        raise InvalidValue(f"mean must be one of {MEANS}, got {mean!r}{near(mean, MEANS)}")
    return mean


def weighed_means(mean: str | Mapping[str, Any]) -> dict[str, float]:
    """The means that predictions are a mixture of, with weights that sum to one; "mixture" is two in equal parts."""
    if mean == "mixture":
        return {"network": 0.5, "process": 0.5}
    if not isinstance(mean, Mapping):
        return {checked_mean(mean): 1.0}
    if not mean or any(name not in PARTS for name in mean):
        raise InvalidValue(f"a mixture of means is {{name: weight}} of some of {PARTS}, got {dict(mean)!r}")
    return dict(zip(mean, log_weights([*mean.values()], len(mean)).exp().tolist(), strict=True))
