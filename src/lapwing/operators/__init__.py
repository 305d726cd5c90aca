"""Symmetric matrices that know their structure, and the verbs of linear algebra on them."""

from lapwing.operators import linalg
from lapwing.operators.blocks import Blocks
from lapwing.operators.dense import Dense, OuterRows
from lapwing.operators.diagonal import Diagonal
from lapwing.operators.eigen import EigenPlusDiagonal
from lapwing.operators.kronecker import KroneckerPlusDiagonal
from lapwing.operators.mixed import Mixed
from lapwing.operators.root import HeldRows, RootPlusDiagonal
from lapwing.operators.streamed import Samples, Streamed
from lapwing.operators.system import SolvePlan
from lapwing.operators.whitened import Whitened, plus, whiten
from lapwing.operators.whitening import WhiteBlock, Whitening

__all__ = [
    "Blocks",
    "Dense",
    "Diagonal",
    "EigenPlusDiagonal",
    "HeldRows",
    "KroneckerPlusDiagonal",
    "Mixed",
    "OuterRows",
    "RootPlusDiagonal",
    "Samples",
    "SolvePlan",
    "Streamed",
    "WhiteBlock",
    "Whitened",
    "Whitening",
    "linalg",
    "plus",
    "whiten",
]
