"""The diagonal of the curvature: p = diag H / (σ² T) + diag A, (p,)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.compat.laplace_torch.parts import parts_of
from lapwing.curvature import Diagonal, State
from lapwing.operators import Diagonal as Entries
from lapwing.operators import linalg
from lapwing.tangent import TangentModel


class DiagLaplace(ParametricLaplace):
    """All weights, with the diagonal of the curvature."""

    _key = ("all", "diag")
    _structure = Diagonal()

    @property
    def H(self) -> Tensor:
        """diag H, (p,)."""
        return linalg.diagonal(self._operator()).to(self._dtype)

    @property
    def posterior_precision(self) -> Tensor:
        """diag P, (p,)."""
        return linalg.diagonal(self._precision()).to(self._dtype)

    @property
    def posterior_variance(self) -> Tensor:
        """1 / diag P, (p,)."""
        return 1 / self.posterior_precision

    @property
    def posterior_scale(self) -> Tensor:
        """The standard deviations of the weights, (p,)."""
        return self.posterior_precision.rsqrt()

    def _logdet(self) -> Tensor:
        """Σ log p, from one vector for all layers."""
        state = self._fitted
        if self._flat is None or self._flat[0] is not state:
            self._flat = state, linalg.diagonal(self._operator())
        return linalg.logdet(
            linalg.shift(Entries(self._H_factor.double() * self._flat[1], self._groups.size), self._prior)
        )

    _flat: tuple[State, Tensor] | None = None

    def _covariance(self, rows: Tensor) -> Tensor:
        """In the dtype of the rows, float32 or better: no difference is taken."""
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        half = wide * linalg.diagonal(self._posterior).rsqrt().to(wide)
        return (half @ half.mT).to(rows.dtype)

    def _colored(self, noise: Tensor) -> Tensor:
        return noise * self.posterior_scale

    def _unpacked(self, H: Any, tangent: TangentModel) -> State:
        parts, H = parts_of(self._structure, tangent), H.double().to(self._device) / self._unit
        sums = {f"{part.name}/diagonal": H[part.index(tangent.layout).to(H.device)].unsqueeze(0) for part in parts}
        return self._restored(tangent, sums, parts)
