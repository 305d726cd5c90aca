"""Samples of one linear system: how they are solved for, what they are, and what is remembered of them.

z ~ N(0, M⁻¹),    γ_g = E z_gᵀ(Gz)_g,    tr[R_hᵀR_h M⁻¹] = E ‖R_h z‖²            M = G + D, G = RᵀWR
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lapwing.distributed import ALONE, Ranks
from lapwing.operators.diagonal import Diagonal
from lapwing.solvers import Estimate
from lapwing.solvers.estimate import mean_of


@dataclass(frozen=True)
class SolvePlan:
    """How solves are made."""

    samples: int
    solver: str  # "cg" or "sgd"
    preconditioner: str  # its name
    tolerance: float  # of ‖b − M x‖ / ‖b‖, in the unit of D; for samples of the data's part of b
    max_steps: int  # of CG or Lanczos, or passes' worth of minibatches
    seed: int
    memory_budget: int


@dataclass(frozen=True, eq=False)
class Samples:
    """Draws of N(0, M⁻¹) at t = 1, what they say of γ, and how well they were solved for."""

    z: Tensor = field(repr=False)  # (k, p): of k samples that are spread over ranks, this rank's
    gamma: Tensor = field(repr=False)  # z_gᵀ(Gz)_g, (k, g)
    squares: Tensor = field(repr=False)  # ‖R_h z‖², (k, h)
    residual: float  # the largest ‖b − M z‖ / ‖RᵀW^½ e‖, in the unit of D
    steps: int
    passes: int
    solver: str
    preconditioner: str
    ranks: Ranks = ALONE  # that the samples are spread over

    @property
    def dimension(self) -> Estimate:
        """γ in all, with its standard error."""
        return mean_of(self.gamma.sum(-1))

    def share(self, ranks: Ranks) -> Tensor:
        """Those of this rank, of samples that are to be spread over ranks, or are."""
        return self.z[ranks.share(len(self.z))] if self.ranks.alone else self.z

    def __repr__(self) -> str:
        return (
            f"{len(self.gamma)} samples by {self.solver} (preconditioner {self.preconditioner}): {self.steps} steps, "
            f"{self.passes} passes over the data, residual {self.residual:.2g}"
        )


@dataclass(eq=False)
class Remembered:
    """Of R: the base noise, and what belongs to the last W and D, under a name for them."""

    noise: Tensor | None = None  # R_hᵀ e of this rank's samples, (h, k, p)
    samples: tuple[Any, Samples, Diagonal] | None = None  # with D
    logdet: tuple[Any, Estimate] | None = None  # log|M| at t = 1
