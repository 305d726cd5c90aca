"""The tangent model of a network."""

from lapwing.tangent.linearize import TangentModel, linearize
from lapwing.tangent.pieces import pieces_of

__all__ = ["TangentModel", "linearize", "pieces_of"]
