"""Variational inference over a network's weights: the nearest q of a family, by gradients of the evidence's bound."""

from lapwing.variational.linearized import TangentVariational, tangent
from lapwing.variational.methods import layerwise, mean_field
from lapwing.variational.posterior import Bound, Variational

__all__ = ["Bound", "TangentVariational", "Variational", "layerwise", "mean_field", "tangent"]
