"""log p(y, v) of the tangent model, as a function of v and its outputs z = h(·, v), (m, c):

Σ_m log p(y_m | z_m) − ½ ‖v − m‖²_A  + const,     gradient  Jᵀ ∂ log p(y | z) − A(v − m)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.center.jacobian import Jacobian
from lapwing.curvature.products import output_curvature
from lapwing.likelihoods import Likelihood
from lapwing.operators import Dense, Diagonal, HeldRows, RootPlusDiagonal, linalg

HESSIAN_SIDE = 4_000  # rows or columns of J, the fewer of them, up to which the Hessian is made
ROUNDING = 30  # of an output, in units of its last place


@dataclass(frozen=True, eq=False)
class TangentJoint:
    """The log joint density of targets and weights under the tangent model."""

    jacobian: Jacobian
    likelihood: Likelihood
    precision: Any  # P = Ĝ + A, an operator
    a: Any  # A, an operator
    m: Tensor  # prior mean, (p,)

    @property
    def weights(self) -> Tensor:
        """The curvature weights of the likelihood, (h,)."""
        return self.likelihood.curvature_weights("exact").to(self.m)

    def score(self, z: Tensor) -> Tensor:
        """∂ log p(y | z), (m, c)."""
        return self.likelihood.gradient(z, self.jacobian.y)

    def curvature_times(self, z: Tensor, v: Tensor) -> Tensor:
        """−∂² log p(y | z) v, (k, m, c)."""
        return output_curvature(self.likelihood, z, self.jacobian.y, v)

    def gradient(self, v: Tensor, pulled: Tensor) -> Tensor:
        """Of the log joint density, uphill: Jᵀ score − A(v − m)."""
        return pulled - linalg.mv(self.a, v - self.m)

    @property
    def has_hessian(self) -> bool:
        """Whether the Hessian can be made and factorized: J in memory, and its sides short enough."""
        sides = [len(self.m)] if self.jacobian.rows is None else [sum(self.jacobian.counts), len(self.m)]
        return self.jacobian.held and min(sides) <= HESSIAN_SIDE

    def hessian(self, z: Tensor) -> Any:
        """Σ J_nᵀ Λ(z_n) J_n, as an operator."""
        rows, head = self.jacobian.rows, self.jacobian.head
        root = self.likelihood.scaled_root(z, self.jacobian.y)  # (m, c, q)
        if head is not None:
            return Dense(self.jacobian.total(head.gram(root))[0])
        assert rows is not None
        r = torch.einsum("mcq,mcp->mqp", root, rows.reshape(*z.shape, rows.shape[1])).flatten(0, 1)
        if sum(self.jacobian.counts) < r.shape[1]:
            r = torch.cat(self.jacobian.ranks.joined([r], "rows of the Hessian"))
            return RootPlusDiagonal(HeldRows(r), Diagonal(r.new_ones(1), len(r)))
        return Dense(self.jacobian.total(r.mT @ r)[0])

    def size(self, v: Tensor) -> float:
        """max(1, ‖v − m‖_A), what a residual is relative to: √γ at the precision that the evidence picks."""
        return max(1.0, float(((v - self.m) * linalg.mv(self.a, v - self.m)).sum().sqrt()))

    def rounding(self, v: Tensor, z: Tensor) -> float:
        """The residual that rounding of the outputs leaves: ‖Λ^½ δz‖ for δz of the last place of z."""
        jacobian = self.jacobian
        reach = torch.stack([z, jacobian.f])
        loss = (reach * torch.stack([self.curvature_times(z, one.unsqueeze(0))[0] for one in reach])).sum()
        (loss,) = jacobian.total(loss)
        return ROUNDING * jacobian.eps * (float(loss.clamp(min=0).sqrt()) / self.size(v) + 1)
