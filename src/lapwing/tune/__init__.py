"""Tuning: the prior and noise that the evidence picks."""

from lapwing.tune.bounds import Tuning, warn_bound
from lapwing.tune.em import em
from lapwing.tune.evidence import evidence
from lapwing.tune.fixed_point import mackay
from lapwing.tune.modes import warn_no_mode
from lapwing.tune.surrogate import slope
from lapwing.tune.tracking import Tracker
from lapwing.tune.validation import validation

__all__ = [
    "Tracker",
    "Tuning",
    "em",
    "evidence",
    "mackay",
    "slope",
    "validation",
    "warn_bound",
    "warn_no_mode",
]
