"""The exact diagonal of the curvature: diag(G)_i = Σ_n Σ_k (S_nᵀJ_n)²_ki, summed over shared positions first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.accumulate import Accumulator, Probe
from lapwing.curvature.factor import Factor
from lapwing.curvature.full import BUDGET
from lapwing.curvature.state import State
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.tangent import TangentModel, pieces_of


@dataclass(frozen=True)
class Diagonal:
    memory_budget: int = field(default=BUDGET, compare=False)

    def __str__(self) -> str:
        return "diag"

    def resolved(self, probe: Probe, factor: Factor) -> Diagonal:
        if factor.kind == "hessian":
            raise InvalidValue("factor='hessian' needs structure='full'; use factor='exact' with 'diag'")
        return self

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor) -> Accumulator:
        return SquareSum(tangent, len(likelihood.curvature_weights(factor.kind)), self.memory_budget)

    def operator(self, state: State, weights: Tensor) -> DiagonalOperator:
        return DiagonalOperator(weights @ state.sums["diagonal"].to(weights), state.layout.size)

    def coverage(self, tangent: TangentModel) -> dict[str, str]:
        return dict.fromkeys(tangent.layout.names, "exact diagonal")


class SquareSum:
    def __init__(self, tangent: TangentModel, groups: int, budget: int) -> None:
        self.tangent, self.groups, self.budget = tangent, groups, budget
        self.sum = torch.zeros(groups, tangent.layout.size, dtype=torch.float64, device=tangent.device)

    def forward(self, x: Any) -> Tensor:
        return self.tangent(x)

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        each = u.shape[1] * self.tangent.layout.size * 8
        for piece, cotangent in pieces_of(x, u.to(f), each, self.budget // 4):
            rows = self.tangent.pulled(piece, cotangent)  # (n, K, p)
            for g in range(self.groups):
                mine = rows if self.groups == 1 else rows[:, g :: self.groups]
                self.sum[g] += mine.reshape(-1, rows.shape[-1]).square().sum(0, dtype=torch.float64)

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        return {"diagonal": self.sum}, ()
