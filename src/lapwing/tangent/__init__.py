"""The tangent model of a network."""

from lapwing.tangent.model import TangentModel, linearize

__all__ = ["TangentModel", "linearize"]
