"""Words that a Laplace object takes for where it is centered and what predictions are about."""

from __future__ import annotations

from lapwing.errors import InvalidValue


def checked_center(center: str) -> str:
    """A center by its name."""
    if center not in ("tangent", "map"):
        raise InvalidValue(f"center must be 'tangent' or 'map' (the trained weights), got {center!r}")
    return center


def checked_mean(mean: str) -> str:
    """A predictive mean by its name."""
    if mean not in ("network", "tangent"):
        raise InvalidValue(f"mean must be 'network' or 'tangent', got {mean!r}")
    return mean
