"""The curvature of a network over data."""

from lapwing.curvature.accumulate import Probe, accumulate, probe
from lapwing.curvature.diagonal import Diagonal
from lapwing.curvature.factor import Factor
from lapwing.curvature.full import BUDGET, Full
from lapwing.curvature.state import State

__all__ = ["BUDGET", "Diagonal", "Factor", "Full", "Probe", "State", "accumulate", "probe"]
