"""Choosing between models by their evidence, and weighing them by held-out data."""

from lapwing.selection.compare import Comparison, Row, check_same, compare
from lapwing.selection.stacking import held_out_densities, stacked

__all__ = ["Comparison", "Row", "check_same", "compare", "held_out_densities", "stacked"]
