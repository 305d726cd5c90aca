"""A few eigenpairs of the true Hessian: P = U diag(l) Uᵀ / (σ² T) + A, U (p, k).

Those of the largest |l|, of which the ones above 1e-6 are kept, as laplace-torch takes them (there by a package that no
registry has). They come from the dense Hessian, (p, p), so this is for networks whose `full` curvature fits in memory;
for larger ones Lapwing's own `structure="lowrank"` sketches the Gauss-Newton matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.compat.laplace_torch.curvature import AsdfghjklHessian
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.curvature import Full, State
from lapwing.errors import InvalidValue
from lapwing.operators import Diagonal, HeldRows, RootPlusDiagonal
from lapwing.operators.memo import RowGrams
from lapwing.tangent import TangentModel

LEAST = 1e-6  # eigenvalue that is kept
RANK = 10  # eigenpairs, unless backend_kwargs={"low_rank": ...} says otherwise


class LowRankLaplace(ParametricLaplace):
    """All weights, with a few eigenpairs of the Hessian."""

    _key = ("all", "lowrank")
    _structure = Full("primal")

    def __init__(
        self, model: nn.Module, likelihood: Any, backend: Any = AsdfghjklHessian, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(model, likelihood, *args, backend=backend, **kwargs)
        if self._factor.kind != "hessian":
            raise InvalidValue(f"lowrank takes eigenpairs of the Hessian: give a backend ...Hessian, got {backend!r}")

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Find the eigenpairs over a loader."""
        if not override:
            raise InvalidValue("eigenpairs do not add over data; fit all of them at once, override=True")
        super().fit(train_loader, True, progress_bar)

    def _summed(self, loader: Any, progress: bool) -> State:
        state = super()._summed(loader, progress)
        values, vectors = torch.linalg.eigh(state.sums["gram"][0])
        largest = values.abs().argsort(descending=True)[: self._backend_kwargs.get("low_rank", RANK)]
        kept = largest[values[largest] > LEAST]
        return replace(state, sums={"vectors": vectors[:, kept], "values": values[kept]})

    def _operator(self, weight: Tensor | None = None) -> RootPlusDiagonal:
        state = self._fitted
        vectors, values = state.sums["vectors"], state.sums["values"]
        weight = values.new_ones(1) if weight is None else weight.double().reshape(1)
        rows = HeldRows((vectors * values.sqrt()).mT)
        return RootPlusDiagonal(rows, Diagonal(weight, len(values)), memo=state.factorizations(RowGrams))

    @property
    def H(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors (p, k) and eigenvalues (k,)."""
        sums = self._fitted.sums
        return sums["vectors"].to(self._dtype), sums["values"].to(self._dtype)

    @property
    def posterior_precision(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """U (p, k) and l / (σ² T) (k,), and the prior's diagonal (p,)."""
        vectors, values = self.H
        return (vectors, self._H_factor * values), self.prior_precision_diag

    def _colored(self, noise: Tensor) -> Tensor:
        """D^-½ (I + W Wᵀ)^-½ z, W = D^-½ U l^½, by the eigenpairs s of WᵀW: (1 + s)^-½ − 1 over s, stable at 0."""
        (vectors, values), prior = self.posterior_precision
        W = vectors * values.sqrt() * prior.rsqrt().unsqueeze(-1)
        s, Q = torch.linalg.eigh(W.mT @ W)
        root, WQ = (1 + s.clamp(min=0)).sqrt(), W @ Q
        return (noise - (noise @ WQ / (root * (1 + root))) @ WQ.mT) * prior.rsqrt()

    def _packed(self) -> tuple[Tensor, Tensor]:
        return self.H

    def _unpacked(self, H: Any, tangent: TangentModel) -> State:
        vectors, values = (t.double().to(self._device) for t in H)
        return self._restored(tangent, {"vectors": vectors, "values": values})
