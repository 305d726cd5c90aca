"""Choosing between models by their evidence."""

from lapwing.selection.compare import Comparison, Row, compare

__all__ = ["Comparison", "Row", "compare"]
