"""The curvature of a network over data."""

from lapwing.curvature import rules
from lapwing.curvature.accumulate import BUDGET, Probe, accumulate, probe
from lapwing.curvature.ekfac import EigenKronecker
from lapwing.curvature.factor import Factor
from lapwing.curvature.full import Full
from lapwing.curvature.layered import Block, Diagonal, Kronecker
from lapwing.curvature.lowrank import LowRank
from lapwing.curvature.matrix_free import MatrixFree
from lapwing.curvature.parts import Part
from lapwing.curvature.removal import vanished, without
from lapwing.curvature.state import State, register

__all__ = [
    "BUDGET",
    "Block",
    "Diagonal",
    "EigenKronecker",
    "Factor",
    "Full",
    "Kronecker",
    "LowRank",
    "MatrixFree",
    "Part",
    "Probe",
    "State",
    "accumulate",
    "probe",
    "register",
    "rules",
    "vanished",
    "without",
]
