"""The tangent model of a network."""

from lapwing.tangent.linearize import linearize
from lapwing.tangent.model import TangentModel

__all__ = ["TangentModel", "linearize"]
