"""Randomized Nyström approximation of a symmetric positive semidefinite G, by one product with test vectors Ω (k, p):

    Y = Ω G,      Ĝ = Yᵀ (Ω Yᵀ)⁺ Y = Vᵀ diag(l) V,      0 ⪯ Ĝ ⪯ G

Each eigenvalue is a lower bound of G's, and tr(G − Ĝ) is the nuclear norm of what is missing. Sketches of a sum of
matrices, with the same test vectors, add. Ĝ is made for G + νI, ν of the size of rounding, and ν is taken off its
eigenvalues. Source: Tropp, Yurtsever, Udell and Cevher 2017, Alg. 3; Frangella, Tropp and Udell 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotPositiveDefinite
from lapwing.solvers.estimate import Estimate, mean_of
from lapwing.solvers.product import Product, product

ROUGH = 1e-3  # of the largest eigenvalue, by which products in a coarse dtype may be off
PROBES = 8  # vectors, beside the test vectors, that tell what is missing


@dataclass(frozen=True, eq=False)
class Nystrom:
    """Ĝ = Vᵀ diag(l) V."""

    values: Tensor  # l (k,), falling, not negative
    vectors: Tensor  # V (k, p), orthonormal rows
    shift: float  # ν
    missing: Estimate | None = None  # tr(G − Ĝ), where it was probed

    @property
    def root(self) -> Tensor:
        """R (k, p) with RᵀR = Ĝ."""
        return self.values.sqrt().unsqueeze(-1) * self.vectors


@torch.no_grad()
def nystrom(mv: Product, size: int, rank: int, generator: torch.Generator | None = None) -> Nystrom:
    """Approximate a G (size, size) by `rank` test vectors and a few probes, in one call of mv."""
    if size < 1 or rank < 1:
        raise InvalidValue(f"a rank and a size of at least 1 are needed, got rank {rank} of size {size}")
    generator = generator or torch.Generator().manual_seed(0)
    rank = min(rank, size)
    tests = torch.randn(rank, size, generator=generator, dtype=torch.float64, device=generator.device)
    z = 2.0 * torch.randint(0, 2, (PROBES, size), generator=generator, device=generator.device).double() - 1
    sketch, image = product(mv, torch.cat([tests, z])).split([rank, PROBES])
    found = from_sketch(sketch, tests)
    left = (z * image).sum(-1) - (z @ found.root.mT).square().sum(-1)
    return Nystrom(found.values, found.vectors, found.shift, mean_of(left))


def from_sketch(sketch: Tensor, tests: Tensor) -> Nystrom:
    """Ĝ from Y = Ω G (k, p) and Ω (k, p), k ≤ p."""
    q, upper = torch.linalg.qr(tests.mT)  # Ω = upperᵀ qᵀ
    y = torch.linalg.solve_triangular(upper.mT, sketch.to(torch.float64), upper=False)  # qᵀ G
    core = y @ q
    shift = _rounding(core, y)
    if shift == 0:
        return Nystrom(core.new_zeros(len(core)), q.mT.contiguous(), 0.0)
    y.add_(q.mT, alpha=shift)
    del q  # as large as Y, like all that is left
    half = torch.linalg.solve_triangular(_cholesky(core, shift), y, upper=False)  # halfᵀ half = Ĝ + νI on its range
    del y
    _, s, v = torch.linalg.svd(half, full_matrices=False)
    return Nystrom((s.square() - shift).clamp(min=0), v, shift)


def _rounding(core: Tensor, y: Tensor) -> float:
    """ν for qᵀGq and qᵀG: no less than what rounding has made of the core, which its skew part tells for products in a
    coarse dtype; 0 for G = 0."""
    size = float(torch.linalg.matrix_norm(core, 2))
    skew = float(torch.linalg.matrix_norm(core - core.mT, 2))
    if not skew <= ROUGH * size:
        raise InvalidValue(f"the matrix is not symmetric: uᵀGv and vᵀGu differ by {skew:.3g}, of {size:.3g}; check mv")
    least = float(torch.linalg.eigvalsh(0.5 * (core + core.mT))[0])
    if least < -ROUGH * size:
        raise NotPositiveDefinite(
            f"a Nyström approximation needs a positive semidefinite matrix: got vᵀGv = {least:.3g} for a unit vector; "
            "use the generalized Gauss-Newton matrix, not a Hessian"
        )
    eps = torch.finfo(core.dtype).eps
    return max(eps * float(torch.linalg.matrix_norm(y)) * len(core) ** 0.5, -2 * least, skew) if size else 0.0


def _cholesky(core: Tensor, shift: float) -> Tensor:
    eye = torch.eye(len(core), dtype=core.dtype, device=core.device)
    factor, failed = torch.linalg.cholesky_ex(0.5 * (core + core.mT) + shift * eye)
    if bool(failed):
        raise NotPositiveDefinite(
            f"the core ΩGΩᵀ of a sketch is not positive definite to rounding ({shift:.3g}); use a smaller rank"
        )
    return factor


# -- of a sum with weights ----------------------------------------------------------------------------------------


def span_of(sketches: Tensor, tests: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From Y_h = Ω G_h (h, k, p) with one Ω (k, p): orthonormal rows V (r, p) that span all of them, and with Ω made
    orthonormal ΩG_hVᵀ (h, k, r) and ΩG_hΩᵀ (h, k, k)."""
    q, upper = torch.linalg.qr(tests.mT)
    y = torch.linalg.solve_triangular(upper.mT, sketches.to(torch.float64), upper=False)
    V = torch.linalg.qr(y.flatten(0, 1).mT)[0].mT.contiguous()
    return V, y @ V.mT, y @ q


def mixed_root(inside: Tensor, cores: Tensor, weights: Tensor) -> Tensor:
    """L (r, k) with Ĝ = Vᵀ L Lᵀ V of Σ_h w_h G_h ⪰ 0, differentiable in w, whose signs may differ."""
    y, core = torch.einsum("h,hkr->kr", weights, inside), torch.einsum("h,hij->ij", weights, cores)
    shift = _rounding(core.detach(), y.detach())
    return torch.linalg.solve_triangular(_cholesky(core, shift or 1.0), y, upper=False).mT
