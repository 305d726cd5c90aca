"""How much an input moves the network in directions that the data left free: a score of novelty, in memory O(P).

    score(x) = tr or log det of  J(x) (I − VᵀV) J(x)ᵀ                V (k, p) orthonormal, top directions of G

V is never kept. Lanczos vectors q_i of G are made in turn, in the memory of three, and only sketches S G q_i (s,) are
kept, U an orthonormal basis of those; then, since a sketch keeps the least distance of J to their span,

    J (I − VᵀV) Jᵀ ≈ (S J)(I − UᵀU)(S J)ᵀ · s(p − k) / (p(s − k))

where the last factor takes out the bias of a projection of k < s dimensions, and s = p is exact. No prior enters.
S (s, p) keeps lengths and angles, by the fast Hartley transform H:

    S v = √(p/s) · (H D v) at s random places,     D random signs,  H v = Re Fv − Im Fv,  F unitary Fourier transform

H is orthogonal, so S is too where s = p; E‖S v‖² = ‖v‖². O(p log p) a vector, and p bytes to keep. Source: Ailon and
Chazelle 2009; Tropp 2011; Miani, Beretta and Hauberg 2024 (sketched Lanczos uncertainty); Madras, Atwood and D'Amour
2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing.arguments import as_budget, as_likelihood, as_tangent
from lapwing.curvature.cover import cover
from lapwing.curvature.products import gauss_newton
from lapwing.curvature.rows import RowMaker
from lapwing.errors import InvalidValue
from lapwing.push import in_pieces
from lapwing.solvers.lanczos import krylov
from lapwing.solvers.product import steady
from lapwing.tangent import TangentModel

KINDS = ("trace", "logdet")


@dataclass(frozen=True, eq=False)
class Hartley:
    """A random sketch of vectors of p numbers onto s of them."""

    signs: Tensor  # D (p,), int8
    places: Tensor  # (s,)

    @classmethod
    def drawn(cls, size: int, onto: int, generator: torch.Generator, device: torch.device) -> Hartley:
        """A sketch from `size` numbers onto `onto`, with signs and places drawn."""
        if not 1 <= onto <= size:
            raise InvalidValue(f"a sketch of {size} numbers has from 1 to {size} of them, got {onto}")
        signs = torch.randint(0, 2, (size,), generator=generator, device=generator.device, dtype=torch.int8) * 2 - 1
        places = torch.randperm(size, generator=generator, device=generator.device)[:onto]
        return cls(signs.to(device), places.to(device))

    def __call__(self, v: Tensor) -> Tensor:
        """S v, (..., p) -> (..., s)."""
        p, s = len(self.signs), len(self.places)
        z = torch.fft.rfft(v * self.signs, norm="ortho")
        mirrored = self.places > p // 2  # F at p − i is the conjugate of F at i
        at = z[..., torch.where(mirrored, p - self.places, self.places)]
        return (at.real - torch.where(mirrored, -1, 1) * at.imag) * (p / s) ** 0.5


@dataclass(frozen=True, eq=False, repr=False)
class Score:
    """score(x), higher the less the data say of x."""

    tangent: TangentModel
    sketch: Hartley  # S
    basis: Tensor  # U (k, s), orthonormal
    passes: int  # over the data
    memory_budget: int

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Any, of: str = "trace") -> Tensor:
        """The score of each input, (n,), float64. of: "trace", or "logdet", −∞ where nothing is left."""
        if of not in KINDS:
            raise InvalidValue(f"of must be one of {KINDS}, got {of!r}")
        left = self.covariance(x)
        return left.diagonal(dim1=1, dim2=2).sum(-1) if of == "trace" else torch.linalg.slogdet(left).logabsdet

    @torch.inference_mode(False)
    @torch.no_grad()
    def covariance(self, x: Any) -> Tensor:
        """J (I − VᵀV) Jᵀ of all outputs of each input, (n, c, c), float64."""
        inputs = loading.network_inputs(x, self.tangent.device)
        loading.check_finite(inputs, "the inputs")
        maker, dtype = RowMaker(self.tangent, cover(self.tangent, inputs)), self.tangent.sum_dtype
        out = []
        for piece, record in in_pieces(self.tangent, maker.run, inputs, False, self.memory_budget):
            outputs = record.f[0].numel()
            eye = torch.eye(outputs, dtype=record.f.dtype, device=record.f.device)
            u = eye.reshape(outputs, *record.f.shape[1:]).expand(len(record.f), outputs, *record.f.shape[1:])
            for rows in maker.rows(record, piece, u, self.memory_budget // 8):  # (n, c, p)
                out.append(self._left(self.sketch(rows.to(dtype)).to(torch.float64)))
        return torch.cat(out)

    def _left(self, sketched: Tensor) -> Tensor:
        """From S J (n, c, s)."""
        away = sketched - (sketched @ self.basis.mT) @ self.basis
        (k, s), p = self.basis.shape, len(self.sketch.signs)
        return away @ away.mT * (s * (p - k) / (p * (s - k)) if s < p else 1.0)

    def __repr__(self) -> str:
        k, s = self.basis.shape
        p = self.tangent.layout.size
        return f"Score({k} directions of {p:,} parameters in sketches of {s:,}; {self.passes} passes over the data)"


@torch.inference_mode(False)
def sketched_lanczos(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    rank: int = 50,
    sketch: int = 10_000,
    subset: Any = "all",
    forward: Any = None,
    memory_budget: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Score:
    """Fit a score by as many passes over the data as its rank, one product with G each.

    rank: Lanczos vectors, whose span is projected out; rounding repeats some of them, so directions are fewer, as repr
    tells. sketch: numbers that each is kept by, more than the rank; the score's relative error is about √(2/sketch).
    The other arguments are those of `lw.laplace`."""
    if rank < 1:
        raise InvalidValue(f"rank must be at least 1, got {rank}")
    budget, likelihood, batches = as_budget(memory_budget), as_likelihood(likelihood), loading.as_batches(data)
    tangent = as_tangent(model, batches, subset, forward)
    likelihood, p = likelihood.to(tangent.device), tangent.layout.size
    if not sketch > rank:
        raise InvalidValue(f"a sketch of {sketch} numbers cannot hold {rank} directions; give more than the rank")
    generator = generator or torch.Generator().manual_seed(0)
    project = Hartley.drawn(p, min(sketch, p), generator, tangent.device)
    passes = [0]

    def product(v: Tensor) -> Tensor:
        passes[0] += 1
        return gauss_newton(tangent, likelihood, batches, v, progress)

    start = torch.randn(p, generator=generator, dtype=torch.float64, device=generator.device).to(tangent.device)
    kept = torch.stack([project(image) for _, image in krylov(steady(product), start, min(rank, p))])
    _, sizes, basis = torch.linalg.svd(kept, full_matrices=False)
    if not bool(sizes[0] > 0):
        raise InvalidValue("the curvature over the data is zero: no output depends on the selected weights")
    least = torch.finfo(tangent.sum_dtype).eps ** 0.5  # below it, a size is rounding
    return Score(tangent, project, basis[sizes > least * sizes[0]], passes[0], budget)
