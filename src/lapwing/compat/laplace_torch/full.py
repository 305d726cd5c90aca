"""The dense curvature: P = H / (σ² T) + A, (p, p)."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.curvature import Full, State
from lapwing.operators import linalg
from lapwing.tangent import TangentModel


class FullLaplace(ParametricLaplace):
    """All weights, with the dense curvature."""

    _key = ("all", "full")
    _structure = Full("primal")

    @property
    def posterior_precision(self) -> Tensor:
        """P, (p, p)."""
        return linalg.to_dense(self._precision()).to(self._dtype)

    @property
    def posterior_scale(self) -> Tensor:
        """The lower triangular R with R Rᵀ = P⁻¹, (p, p)."""
        return self._root.to(self._dtype)

    @property
    def posterior_covariance(self) -> Tensor:
        """P⁻¹, (p, p)."""
        return (self._root @ self._root.mT).to(self._dtype)

    @property
    def _root(self) -> Tensor:
        """R in float64, made once for each prior and noise: the Cholesky factor of P with its order turned around."""
        posterior = self._posterior
        if self._rooted is None or self._rooted[0] is not posterior:
            flipped = torch.linalg.cholesky(linalg.to_dense(posterior).flip(-2, -1))
            eye = torch.eye(len(flipped), dtype=flipped.dtype, device=flipped.device)
            self._rooted = posterior, torch.linalg.solve_triangular(flipped.flip(-2, -1).mT, eye, upper=False)
        return self._rooted[1]

    _rooted: tuple[object, Tensor] | None = None

    def _colored(self, noise: Tensor) -> Tensor:
        return noise @ self.posterior_scale.mT

    def _unpacked(self, H: Tensor, tangent: TangentModel) -> State:
        return self._restored(tangent, {"gram": (H.double().to(self._device) / self._unit).unsqueeze(0)})
