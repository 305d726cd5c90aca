"""Symmetric matrices that know their structure, and the verbs of linear algebra on them."""

from lapwing.operators import linalg
from lapwing.operators.dense import Dense
from lapwing.operators.diagonal import Diagonal
from lapwing.operators.root import HeldRows, RootPlusDiagonal

__all__ = ["Dense", "Diagonal", "HeldRows", "RootPlusDiagonal", "linalg"]
