"""Words that a Laplace object takes for where it is centered and what predictions are about."""

from __future__ import annotations

from lapwing.errors import InvalidValue
from lapwing.given import near

CENTERS = ("tangent", "map", "process")
MEANS = ("network", "tangent", "process", "mixture", "auto")


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
