"""Lanczos for many start vectors at once, and the trace of a function of a matrix by it.

In the inner product ⟨u, v⟩ = uᵀM v, with L self-adjoint in it (L = M⁻¹K; M = I unless given), a start q₁ of length 1
spans  q, Lq, L²q, ...;  in the basis Q of that space, orthonormal in ⟨·,·⟩, L is a tridiagonal T, and

    ⟨q₁, f(L) q₁⟩ ≈ e₁ᵀ f(T) e₁                      Gauss quadrature: exact for polynomials of degree 2m − 1
    tr f(L) = p · E⟨q, f(L) q⟩                       q uniform on the unit sphere of ⟨·,·⟩, or the mean over a basis

Each new vector is made orthogonal to all earlier ones, twice. A column whose space is exhausted (breakdown) is exact,
and frozen. Source: Golub and Meurant 2010; Ubaru, Chen and Saad 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotConverged
from lapwing.solvers.estimate import Estimate, mean_of
from lapwing.solvers.product import Product, product, steady

BREAKDOWN = 1e-12  # length of a new direction, of the largest entry of T, that counts as none
SETTLED = 0.01  # standard errors by which a quadrature may still move, twice in a row


@dataclass
class Lanczos:
    """The recursion, a step at a time: grows the basis q (m of (k, p)) and the entries of T (k, m)."""

    mv: Product  # L
    inner: Product  # M
    basis: list[Tensor]
    alpha: list[Tensor]  # (k,) each: the diagonal of T
    beta: list[Tensor]  # (k,) each: beside it; the last one leads to the next vector
    alive: Tensor  # (k,): not broken down

    @classmethod
    def start(cls, mv: Product, starts: Tensor, inner: Product | None = None) -> Lanczos:
        inner = inner or (lambda v: v)
        if starts.ndim != 2 or not torch.isfinite(starts).all():
            raise InvalidValue(f"start vectors must be finite, of shape (k, p); got shape {tuple(starts.shape)}")
        starts = starts.to(torch.float64)
        length = (starts * inner(starts)).sum(-1, keepdim=True).sqrt()
        if not bool((length > 0).all()):
            raise InvalidValue("start vectors must be longer than zero in an inner product that is positive definite")
        return cls(
            mv, inner, [starts / length], [], [], torch.ones(len(starts), dtype=torch.bool, device=starts.device)
        )

    def step(self) -> None:
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


@torch.no_grad()
def slq(
    mv: Product,
    starts: Tensor,
    function: Callable[[Tensor], Tensor],
    inner: Product | None = None,
    max_steps: int = 300,
) -> tuple[Estimate, int]:
    """tr f(L) from starts (k, p), and the number of steps (products with L) that it took.

    It stops when no column has anything left (exact), or when two steps in a row moved the mean by at most a hundredth
    of its standard error, the error of the quadrature being then small beside that of the probes. A matrix that changes
    between products is an error.
    """
    if max_steps < 1:
        raise InvalidValue(f"max_steps must be at least 1, got {max_steps}")
    p = starts.shape[-1]
    run = Lanczos.start(steady(mv), starts, inner)
    means: list[float] = []
    for step in range(1, max_steps + 1):
        run.step()
        estimate = mean_of(p * run.quadrature(function))
        means.append(estimate.value)
        near = SETTLED * estimate.standard_error
        settled = len(means) > 2 and max(abs(means[-1] - means[-2]), abs(means[-2] - means[-3])) <= near
        if settled or not bool(run.alive.any()) or step == p:
            return estimate, step
    raise NotConverged(
        f"Lanczos quadrature still moves by {abs(means[-1] - means[-2]):.3g} a step after {max_steps} steps (standard "
        f"error {estimate.standard_error:.3g}); allow more steps, or use a closer inner product (preconditioner)"
    )
