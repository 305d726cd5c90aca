"""The tangent model of a network."""

from lapwing.tangent.linearize import TangentModel, linearize
from lapwing.tangent.rows import StreamedRows, pieces_of

__all__ = ["StreamedRows", "TangentModel", "linearize", "pieces_of"]
