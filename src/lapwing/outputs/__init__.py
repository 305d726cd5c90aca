"""Distributions over the outputs of a network: what every posterior gives, and all that a prediction takes."""

from lapwing.outputs.base import Outputs
from lapwing.outputs.blend import Blend
from lapwing.outputs.draws import WIDE, Draws
from lapwing.outputs.nodes import Nodes
from lapwing.outputs.normal import Normal
from lapwing.outputs.spread import Spread

__all__ = ["WIDE", "Blend", "Draws", "Nodes", "Normal", "Outputs", "Spread"]
