"""The tangent model of a network."""

from lapwing.tangent.linearize import TangentModel, linearize

__all__ = ["TangentModel", "linearize"]
