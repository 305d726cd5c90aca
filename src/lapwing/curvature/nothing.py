"""No curvature, G ≈ 0: what the prior alone knows, and the preconditioner of matrix-free products without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lapwing.curvature.factor import Factor
from lapwing.curvature.parts import Part
from lapwing.curvature.state import State
from lapwing.curvature.structure import Accumulator, Kept, Probe, Structure, register
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.tangent import TangentModel
from lapwing.tree import Layout


@register
@dataclass(frozen=True)
class Nothing(Structure):
    """G ≈ 0: what the prior alone knows."""

    def __str__(self) -> str:
        return "none"

    def resolved(self, probe: Probe, factor: Factor) -> Nothing:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        return self

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        return OutputsOnly(tangent)

    def operator(self, state: State, weights: Tensor) -> DiagonalOperator:
        """Zero, as an operator."""
        return DiagonalOperator(weights.new_zeros(1), state.layout.size)

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, "nothing")

    def keeps(self, layout: Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        return {}, {}


class OutputsOnly:
    """An accumulator that runs the network, for the likelihood's statistics, and sums nothing."""

    mutable = ()

    def __init__(self, tangent: TangentModel) -> None:
        self.forward = tangent

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add nothing."""

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        """No sums, and no batches."""
        return {}, ()
