"""The curvature of a network over data."""

from lapwing.curvature import rules
from lapwing.curvature.accumulate import accumulate, probe
from lapwing.curvature.ekfac import EigenKronecker
from lapwing.curvature.factor import Factor
from lapwing.curvature.full import Full
from lapwing.curvature.layered import Block, Diagonal, Kronecker
from lapwing.curvature.lowrank import LowRank
from lapwing.curvature.matrix_free import MatrixFree
from lapwing.curvature.parts import Part
from lapwing.curvature.removal import vanished, without
from lapwing.curvature.state import Memo, State
from lapwing.curvature.structure import BUDGET, Accumulator, Probe, Structure, register

__all__ = [
    "BUDGET",
    "Accumulator",
    "Block",
    "Diagonal",
    "EigenKronecker",
    "Factor",
    "Full",
    "Kronecker",
    "LowRank",
    "MatrixFree",
    "Memo",
    "Part",
    "Probe",
    "State",
    "Structure",
    "accumulate",
    "probe",
    "register",
    "rules",
    "vanished",
    "without",
]
