"""Tuning: the prior and noise that the evidence picks."""

from lapwing.tune.bounds import Tuning
from lapwing.tune.evidence import evidence
from lapwing.tune.fixed_point import mackay

__all__ = ["Tuning", "evidence", "mackay"]
