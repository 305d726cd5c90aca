"""Lanczos for many start vectors at once, and the trace of a function of a matrix by it.

In the inner product ⟨u, v⟩ = uᵀM v, with L self-adjoint in it (L = M⁻¹K; M = I unless given), a start q₁ of length 1
spans  q, Lq, L²q, ...;  in the basis Q of that space, orthonormal in ⟨·,·⟩, L is a tridiagonal T, and

    ⟨q₁, f(L) q₁⟩ ≈ e₁ᵀ f(T) e₁                      Gauss quadrature: exact for polynomials of degree 2m − 1
    tr f(L) = p · E⟨q, f(L) q⟩                       q uniform on the unit sphere of ⟨·,·⟩, or the mean over a basis

Each new vector is made orthogonal to the last `window` ones, twice: to all of them unless told, or in the memory of a
few, two at the least (the recursion of three terms). Rounding then makes Q lose its orthogonality once an eigenvalue is
found, and T has copies of it, ghosts; but the weights of an eigenvalue's copies sum to its own, for T is that of exact
Lanczos on a larger matrix whose eigenvalues lie in tiny intervals about those of L (Greenbaum 1989). So the quadrature
is as good, only later. A column whose space is exhausted (breakdown) is exact, and frozen. Source: Golub and Meurant
2010; Ubaru, Chen and Saad 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotConverged, NotPositiveDefinite
from lapwing.solvers.estimate import Estimate, mean_of
from lapwing.solvers.product import Product, product, steady

BREAKDOWN = 1e-12  # length of a new direction, of the largest entry of T, that counts as none
SETTLED = 0.02  # standard errors by which a quadrature may have moved in its last quarter of steps
SHORT = 2  # vectors of the recursion of three terms, beside the new one


@dataclass
class Lanczos:
    """The recursion, step by step: grows the basis q (m of (k, p), the last `window` kept) and T (entries (k, m))."""

    mv: Product  # L
    inner: Product  # M
    window: int | None  # vectors that a new one is made orthogonal to; None is all
    basis: list[Tensor]
    alpha: list[Tensor]  # (k,) each: the diagonal of T
    beta: list[Tensor]  # (k,) each: beside it; the last one leads to the next vector
    alive: Tensor  # (k,): not broken down

    @classmethod
    def start(cls, mv: Product, starts: Tensor, inner: Product | None = None, window: int | None = None) -> Lanczos:
        """From vectors (k, p), made to unit length in the inner product; window: how many are kept."""
        inner = inner or (lambda v: v)
        if window is not None and window < SHORT:
            raise InvalidValue(f"Lanczos needs a window of at least {SHORT} vectors, got {window}")
        if starts.ndim != 2 or not torch.isfinite(starts).all():
            raise InvalidValue(f"start vectors must be finite, of shape (k, p); got shape {tuple(starts.shape)}")
        starts = starts.to(torch.float64)
        length = (starts * inner(starts)).sum(-1, keepdim=True).sqrt()
        if not bool((length > 0).all()):
            raise InvalidValue("start vectors must be longer than zero in an inner product that is positive definite")
        alive = torch.ones(len(starts), dtype=torch.bool, device=starts.device)
        return cls(mv, inner, window, [starts / length], [], [], alive)

    def step(self) -> None:
        """One product more, and one vector more for each column."""
        q = self.basis[-1]
        w = torch.zeros_like(q)
        w[self.alive] = product(self.mv, q[self.alive])
        image = self.inner(w)
        alpha = (q * image).sum(-1)
        if not torch.isfinite(alpha).all():
            raise InvalidValue("Lanczos met NaN or infinite values in a product; check the matrix and its data")
        # A column that has broken down repeats its first entry, at no weight: T stays as positive as it was.
        self.alpha.append(torch.where(self.alive, alpha, self.alpha[0] if self.alpha else alpha))
        for again in range(2):
            image = self.inner(w) if again else image
            for c, v in [((v * image).sum(-1, keepdim=True), v) for v in self.basis]:
                w -= c * v
        beta = (w * self.inner(w)).sum(-1).clamp(min=0).sqrt()
        size = torch.stack([*self.alpha, *self.beta]).abs().amax(0)
        self.alive = self.alive & (beta > BREAKDOWN * size)
        self.beta.append(torch.where(self.alive, beta, 0))
        self.basis.append(torch.where(self.alive.unsqueeze(-1), w / beta.clamp(min=1e-300).unsqueeze(-1), 0))
        if self.window is not None:
            del self.basis[: -self.window]

    def tridiagonal(self) -> Tensor:
        """T, (k, m, m)."""
        t = torch.diag_embed(torch.stack(self.alpha, -1))
        if len(self.alpha) > 1:
            beside = torch.stack(self.beta[:-1], -1)
            t = t + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
        return t

    def quadrature(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """e₁ᵀ f(T) e₁, (k,)."""
        values, vectors = torch.linalg.eigh(self.tridiagonal())
        return (vectors[:, 0].square() * function(values)).sum(-1)


@torch.no_grad()
def krylov(mv: Product, start: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """q and K q (p,) for q₁, q₂, ..., unit vectors that span start, K start, K² start, ..., in the memory of three.

    By the recursion of three terms alone: rounding makes the q lose their orthogonality, repeats directions, and may
    add some in the null space of K, which K q does not have. It ends after `steps`, or where the space is exhausted."""
    q, before = start.to(torch.float64), torch.zeros_like(start, dtype=torch.float64)
    if not float(q.norm()) > 0:
        raise InvalidValue("a start vector must be longer than zero")
    q, beta, size = q / q.norm(), 0.0, 0.0
    for _ in range(steps):
        image = product(mv, q.unsqueeze(0))[0]
        yield q, image
        alpha = float(q @ image)
        w = image - alpha * q - beta * before
        beta = float(w.norm())
        size = max(size, abs(alpha), beta)
        if beta <= BREAKDOWN * size:
            return
        q, before = w / beta, q


@dataclass(frozen=True, eq=False)
class Quadrature:
    """tr f(L) by Lanczos quadrature, and whether it has settled."""

    estimate: Estimate  # tr f(L)
    steps: int  # products with L
    moved: float  # of the mean, in the last quarter of the steps; 0 where the bases are whole
    settled: bool  # whether that is at most a fiftieth of the standard error


@torch.no_grad()
def quadrature(
    mv: Product,
    starts: Tensor,
    function: Callable[[Tensor], Tensor],
    inner: Product | None = None,
    max_steps: int = 300,
    window: int | None = None,
    gather: Product | None = None,
) -> Quadrature:
    """tr f(L) from starts (k, p).

    It stops when no column has anything left (exact), or when its last quarter of steps, two at the least, moved the
    mean by at most a fiftieth of its standard error: what is left is then small beside the error of the probes, even if
    it falls no faster than the inverse of the steps (which leaves three times what the last quarter moved). A matrix
    that changes between products is an error. Where starts are spread over processes, `gather` gives numbers (k,) of
    all from those of one's own.
    """
    gather = gather or (lambda numbers: numbers)
    if max_steps < 1:
        raise InvalidValue(f"max_steps must be at least 1, got {max_steps}")
    p = starts.shape[-1]
    run = Lanczos.start(steady(mv), starts, inner, window)
    means: list[float] = []
    for step in range(1, max_steps + 1):
        run.step()
        estimate = mean_of(gather(p * _finite(run, function)))
        means.append(estimate.value)
        late = means[-max(2, step // 4) - 1 :]
        moved = max(late) - min(late)
        whole = step == p and len(run.basis) > p  # a basis of all there is
        if whole or not bool(gather(run.alive.double()).any()):
            return Quadrature(estimate, step, 0.0, True)
        if step > 2 and moved <= SETTLED * estimate.standard_error:
            return Quadrature(estimate, step, moved, True)
    return Quadrature(estimate, max_steps, moved, False)


def slq(*arguments: Any, **options: Any) -> tuple[Estimate, int]:
    """tr f(L) by `quadrature`, whose arguments these are, and the number of steps that it took; raises where it has
    not settled."""
    found = quadrature(*arguments, **options)
    if not found.settled:
        raise NotConverged(
            f"Lanczos quadrature still moves by {found.moved:.3g} in its last quarter of {found.steps} steps (standard "
            f"error {found.estimate.standard_error:.3g}); allow more steps, or use a closer inner product "
            "(preconditioner)"
        )
    return found.estimate, found.steps


def _finite(run: Lanczos, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The quadrature, where f is defined at the eigenvalues of T."""
    found = run.quadrature(function)
    if not bool(torch.isfinite(found).all()):
        least = float(torch.linalg.eigvalsh(run.tridiagonal()).min())
        raise NotPositiveDefinite(
            f"the function is not finite at an eigenvalue that Lanczos found; the least is {least:.3g}. Where it "
            "should be positive definite, products are too coarse: use a larger prior precision, a closer "
            "preconditioner, or a network in float64"
        )
    return found
