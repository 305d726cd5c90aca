"""The verbs of linear algebra, by single dispatch on the operator's type.

An operator is a symmetric matrix M = s·H + diag(d) that knows its structure. Its file registers what it can do:

    mv(M, v)          M v                                  v (..., p)
    scale(M, s)       s·M, sharing factorizations of H     s 0-dim
    shift(M, d)       M + diag(d)                          d a Diagonal
    solve(M, b)       M⁻¹ b                                b (..., p)
    logdet(M)         log|M|, differentiable in s and d
    draw(M, n, g)     n samples of N(0, M⁻¹)               (n, p)
    covariance(M, X)  X M⁻¹ Xᵀ per example                 X (n, c, p) -> (n, c, c)
    diagonal(M)       diag(M)                              (p,)
    to_dense(M)       M                                    (p, p)

Facts that most operators leave at what is said here, for what is factorized and whole on every rank:

    logdet_slope(M)   log|M| but for a constant            logdet(M)
    log_determinant(M)  log|M| with its standard error     None: it is exact
    kept_draws(M, n)  n of the draws that predictions use  None: none are kept
    gathered(M)       M with all its draws on this rank    M
    jitter(M)         what Cholesky factors had to add     0

solve, draw and covariance use factorizations that are made once, and carry no gradient in s and d. Operators live in
float64: that is where factorizations need to be. A missing pair raises and names alternatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from lapwing.errors import NotPositiveDefinite, Unsupported, warn
from lapwing.solvers import Estimate

if TYPE_CHECKING:
    from lapwing.operators.diagonal import Diagonal

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Operator(Protocol):
    """A symmetric matrix M (p, p) that knows its structure; what it can do is registered for its type."""

    @property
    def size(self) -> int:
        """p."""


class Verb(Protocol[P, R]):
    """A function that is dispatched on the type of its first argument."""

    registry: Mapping[type, Callable[..., Any]]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the rule for the first argument's type gives."""

    def register(self, rule: Any, function: Callable[..., Any] | None = None) -> Any:
        """Add a rule, for the type that its first argument is annotated with, or for one that is given."""


def verb(function: Callable[P, R]) -> Verb[P, R]:
    """A function dispatched on its first argument, whose default says which operators have a rule."""
    name = function.__name__

    def missing(op: Any, *args: Any, **kwargs: Any) -> Any:
        known = sorted({t.__name__ for t in generic.registry} - {"object"})
        raise Unsupported(
            f"{name} has no rule for {type(op).__name__}; operators that have one: {', '.join(known)}. "
            f"Use one of those, or register one with linalg.{name}.register"
        )

    generic: Any = functools.singledispatch(functools.wraps(function)(missing))
    return generic


@verb
def mv(op: Operator, v: Tensor) -> Tensor:  # type: ignore[empty-body]
    """M v for v (..., p)."""


@verb
def scale(op: Operator, s: Tensor) -> Any:
    """s·M, which shares the factorizations of M; s is 0-dim."""


@verb
def shift(op: Operator, d: Diagonal) -> Any:
    """M + diag(d), d a Diagonal."""


@verb
def solve(op: Operator, b: Tensor) -> Tensor:  # type: ignore[empty-body]
    """M⁻¹ b for b (..., p)."""


@verb
def logdet(op: Operator) -> Tensor:  # type: ignore[empty-body]
    """log|M|, 0-dim, differentiable in s and d."""


@verb
def draw(op: Operator, n: int, generator: torch.Generator) -> Tensor:  # type: ignore[empty-body]
    """n samples of N(0, M⁻¹), (n, p)."""


@verb
def covariance(op: Operator, rows: Any) -> Tensor:  # type: ignore[empty-body]
    """X M⁻¹ Xᵀ for each example: X (n, c, p) gives (n, c, c)."""


@verb
def diagonal(op: Operator) -> Tensor:  # type: ignore[empty-body]
    """diag(M), (p,)."""


@verb
def to_dense(op: Operator) -> Tensor:  # type: ignore[empty-body]
    """M, (p, p)."""


@functools.singledispatch
def logdet_slope(op: Operator) -> Tensor:
    """log|M| but for a constant: as differentiable, and cheaper where the value of log|M| costs more than its slope."""
    return logdet(op)


@functools.singledispatch
def is_diagonal(op: Operator) -> bool:
    """Whether M is known to be diagonal, so that diag(M) is all of it."""
    return False


@functools.singledispatch
def log_determinant(op: Operator) -> Estimate | None:
    """log|M| with its standard error, where it is an estimate; None where it is exact."""
    return None


@functools.singledispatch
def by_samples(op: Operator) -> bool:
    """Whether M⁻¹ is known by samples of N(0, M⁻¹) alone."""
    return False


@functools.singledispatch
def kept_draws(op: Operator, n: int) -> Tensor | None:
    """The first n samples of N(0, M⁻¹) that predictions are made from, (n, p); None where so many are not kept."""
    return None


@functools.singledispatch
def gathered(op: Operator) -> Any:
    """M with all that is spread over ranks on each of them."""
    return op


@functools.singledispatch
def jitter(op: Operator) -> float:
    """What the Cholesky factors so far had to add to the diagonal (0 unless a warning said so)."""
    return 0.0


@functools.singledispatch
def traces(op: Operator, groups: Diagonal) -> Tensor:
    """Σ_{i in g} M_ii / unit_i for the groups of a Diagonal, (g,)."""
    return groups.sums(diagonal(op) if groups.unit is None else diagonal(op) / groups.unit)


# -- the one jitter policy ---------------------------------------------------------------------------------------


def cholesky(matrix: Tensor) -> tuple[Tensor, float]:
    """The lower Cholesky factor of a positive definite matrix, differentiable, and the jitter that it took.

    Policy: none; and if that fails, once, 10·p·ε·max(diag), which is the size of the rounding errors of a Gram
    matrix, with a warning that names the amount. If that fails too, the matrix is not positive definite: an error
    with its least eigenvalue.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info.any():
        return factor, 0.0
    if not torch.isfinite(matrix).all():
        raise NotPositiveDefinite("a precision matrix holds NaN or infinite values; check weights, data and prior")
    jitter = float(10 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps * matrix.detach().diagonal().abs().max())
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor, info = torch.linalg.cholesky_ex(matrix + jitter * eye)
    if info.any():
        raise not_positive_definite(float(torch.linalg.eigvalsh(matrix.detach())[0]))
    message = f"a Cholesky factorization took a jitter of {jitter:.3g} on the diagonal"
    warn(message)
    return factor, jitter


def not_positive_definite(least: float) -> NotPositiveDefinite:
    """The error of an indefinite precision, which names its least eigenvalue."""
    return NotPositiveDefinite(
        f"the posterior precision is indefinite: its least eigenvalue is {least:.6g}. Use factor='exact' (the "
        "generalized Gauss-Newton is never indefinite), raise the prior precision above the negative curvature, "
        "or train the network closer to a minimum"
    )


def clip(values: Tensor, eps: float | None = None, rounding: float = 0.0) -> Tensor:
    """Eigenvalues of a matrix that must be positive semidefinite: rounding below zero is clipped to zero, and anything
    beyond rounding is an error. `eps` is that of the numbers the matrix was summed from, if coarser, and `rounding` its
    size where the matrix is small against what it was made from."""
    eps = eps or torch.finfo(values.dtype).eps
    rounding = max(rounding, 100 * values.shape[-1] * eps * float(values.detach().abs().max()))
    least = float(values.detach().min())
    if least < -rounding:
        raise not_positive_definite(least)
    return values.clamp(min=0)


def standard_normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Draws in float64 from the given generator, moved to the tensor's device."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).to(like.device)
