"""A Gaussian process of finite rank, given data: the kernel is φ(x) φ(x')ᵀ for k features φ (c, k) of an input.

    h(x) = m(x) + φ(x) z,    z ~ N(0, c⁻¹ I) before,    z ~ N(0, (Σ_n φ_nᵀ Λ_n φ_n + c I)⁻¹) after

m is the network's own output. What lies outside the features has no variance, unless `outside` says what the kernel has
there, which no data have told of: cov = φ P⁻¹ φᵀ + c⁻¹ (k − φ φᵀ), the sparse process of inducing points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.operators import linalg
from lapwing.outputs import Normal
from lapwing.posterior.base import check_inputs
from lapwing.tangent import TangentModel
from lapwing.tangent.graph import graph_where_asked


@dataclass(frozen=True, eq=False)
class Process:
    """Features with the data's curvature in them."""

    tangent: TangentModel
    features: Callable[[Any], tuple[Tensor, Tensor]]  # x -> m (n, ..., c) and φ (k, n, ..., c)
    gram: Tensor  # Σ φᵀ Λ φ, (k, k)
    prior_precision: Tensor  # c, 0-dim
    outside: Callable[[Any, Tensor, bool], Tensor] | None = None  # x, φ, joint -> k − φ φᵀ, in the shape of covariances

    @cached_property
    def precision(self) -> Tensor:
        """Of z, (k, k)."""
        eye = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        return self.gram + self.prior_precision * eye

    @graph_where_asked
    def outputs(self, x: Any, joint: bool = False) -> Normal:
        """N(m(x), φ P⁻¹ φᵀ)."""
        check_inputs(x)
        f, features = self.features(x)
        half = torch.linalg.solve_triangular(self._root, features.flatten(1).to(self._root), upper=False)
        if joint:
            cov = (half.mT @ half).reshape(*f.shape, *f.shape)
        else:
            half = half.reshape(features.shape)
            cov = torch.einsum("k...a,k...b->...ab", half, half)
        if self.outside is not None:
            cov = cov + self.outside(x, features, joint).to(cov) / self.prior_precision
        return Normal(f, cov.to(f), joint)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n weights of the features, (n, k): n functions m(x) + φ(x) z, without what is outside of them."""
        n, generator = given.whole(n, "the number of draws"), given.generator(generator)
        noise = linalg.standard_normal((n, len(self.gram)), generator, self.gram)
        return torch.linalg.solve_triangular(self._root.mT, noise.mT, upper=True).mT

    @cached_property
    def _root(self) -> Tensor:
        return linalg.cholesky(self.precision)[0]

    def __str__(self) -> str:
        return f"a process of {len(self.gram)} features"
