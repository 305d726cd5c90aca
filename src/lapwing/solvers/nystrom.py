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

ROUNDING = 1e3  # units in the last place of ‖Ω‖‖Y‖ by which ΩYᵀ may be off; sums over networks and data take 0.1 to 5
ROUGH = 1e-3  # of the largest eigenvalue, which rounding may at most become where test vectors are nearly dependent
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class Nystrom:
    """Ĝ = Vᵀ diag(l) V."""

    values: Tensor  # l (k,), falling, not negative
    vectors: Tensor  # V (k, p), orthonormal rows
    shift: float  # ν

    @property
    def root(self) -> Tensor:
        """R (k, p) with RᵀR = Ĝ."""
        return self.values.sqrt().unsqueeze(-1) * self.vectors


def from_sketch(sketch: Tensor, tests: Tensor, eps: float = EPS) -> Nystrom:
    """Ĝ from Y = Ω G (k, p) and Ω (k, p), k ≤ p; `eps` is that of the numbers that Y was summed from."""
    sketch = sketch.to(torch.float64)
    length = float(_length(tests) * _length(sketch))
    _check(sketch @ tests.mT, length, eps)
    q, upper = torch.linalg.qr(tests.mT)  # Ω = upperᵀ qᵀ
    y = torch.linalg.solve_triangular(upper.mT, sketch, upper=False)  # qᵀ G
    core = y @ q
    shift = _shift(core, float(torch.linalg.matrix_norm(y)))
    if shift == 0:
        return Nystrom(core.new_zeros(len(core)), q.mT.contiguous(), 0.0)
    y.add_(q.mT, alpha=shift)
    del q  # as large as Y, like all that is left
    half = torch.linalg.solve_triangular(_cholesky(core, shift), y, upper=False)  # halfᵀ half = Ĝ + νI on its range
    del y
    _, s, v = torch.linalg.svd(half, full_matrices=False)
    return Nystrom((s.square() - shift).clamp(min=0), v, shift)


def _check(core: Tensor, length: float, eps: float) -> None:
    """Raise unless Ω G Ωᵀ (k, k) is symmetric and positive semidefinite, up to the rounding of its terms. They are of
    size ‖Ω‖‖Y‖. In Ω's own coordinates no condition number enters, so that rounding is far below what is wrong."""
    allowed = min(ROUGH, ROUNDING * eps) * length
    skew = float(_length(core - core.mT))
    if not skew <= allowed:
        raise InvalidValue(
            f"the matrix is not symmetric: uᵀGv and vᵀGu differ by {skew:.3g}, of {length:.3g}, and rounding explains "
            f"{allowed:.3g}; check mv"
        )
    least = float(torch.linalg.eigvalsh(_symmetric(core))[0])
    if least < -allowed:
        raise NotPositiveDefinite(
            f"a Nyström approximation needs a positive semidefinite matrix: got vᵀGv = {least:.3g}, of {length:.3g}; "
            "use the generalized Gauss-Newton matrix, not a Hessian"
        )


def _shift(core: Tensor, length: float) -> float:
    """ν for qᵀGq (k, k), made from rows qᵀG of this length: no less than what rounding has made of the core, which its
    skew part and its least eigenvalue tell; 0 for G = 0, up to rounding."""
    rounding = EPS * length * len(core) ** 0.5
    size = float(_length(core))
    if size <= rounding:
        return 0.0
    shift = max(rounding, -2 * float(torch.linalg.eigvalsh(_symmetric(core))[0]), float(_length(core - core.mT)))
    if not shift <= 2 * ROUGH * size:
        raise InvalidValue(
            f"rounding has become {shift / size:.2g} of the matrix, since the test vectors are nearly dependent or "
            "terms of both signs cancel; use a smaller rank, or a network in float64"
        )
    return shift


def _length(matrix: Tensor) -> Tensor:
    """The largest singular value of (..., k, p), k ≤ p, without a copy of it."""
    return torch.linalg.eigvalsh(matrix @ matrix.mT)[..., -1].clamp(min=0).sqrt()


def _symmetric(core: Tensor) -> Tensor:
    return 0.5 * (core + core.mT)


def _cholesky(core: Tensor, shift: float) -> Tensor:
    eye = torch.eye(len(core), dtype=core.dtype, device=core.device)
    factor, failed = torch.linalg.cholesky_ex(_symmetric(core) + shift * eye)
    if bool(failed):
        why = f"the core ΩGΩᵀ of a sketch is not positive definite to rounding ({shift:.3g})"
        raise NotPositiveDefinite(f"{why}; use a smaller rank")
    return factor


# -- of a sum with weights ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subspace:
    """What sketches Y_h = Ω G_h (h, k, p) with one Ω (k, p) tell of every Σ_h w_h G_h."""

    V: Tensor  # (r, p), orthonormal rows that span all of them
    inside: Tensor  # with Ω made orthonormal, Ω G_h Vᵀ (h, k, r)
    cores: Tensor  # and Ω G_h Ωᵀ (h, k, k)
    upper: Tensor  # (k, k), which makes them those of Ω itself: upperᵀ core upper
    lengths: Tensor  # ‖Ω‖‖Y_h‖ (h,)
    eps: float  # of the numbers that Y was summed from


def span_of(sketches: Tensor, tests: Tensor, eps: float = EPS) -> Subspace:
    """The span of all sketches (h, k, p) that were made with the same test vectors (k, p)."""
    sketches = sketches.to(torch.float64)
    q, upper = torch.linalg.qr(tests.mT)
    y = torch.linalg.solve_triangular(upper.mT, sketches, upper=False)
    V = torch.linalg.qr(y.flatten(0, 1).mT)[0].mT.contiguous()
    return Subspace(V, y @ V.mT, y @ q, upper, _length(tests) * _length(sketches), eps)


def mixed_root(span: Subspace, weights: Tensor) -> Tensor:
    """L (r, k) with Ĝ = Vᵀ L Lᵀ V of Σ_h w_h G_h ⪰ 0, differentiable in w, whose signs may differ."""
    y, core = torch.einsum("h,hkr->kr", weights, span.inside), torch.einsum("h,hij->ij", weights, span.cores)
    w, fixed = weights.detach().abs(), core.detach()
    _check(span.upper.mT @ fixed @ span.upper, float(w @ span.lengths), span.eps)
    shift = _shift(fixed, float(w @ torch.linalg.matrix_norm(span.inside)))
    if shift == 0:
        return 0 * y.mT
    return torch.linalg.solve_triangular(_cholesky(core, shift), y, upper=False).mT
