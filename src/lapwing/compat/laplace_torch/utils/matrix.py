"""Kronecker factors as lists, the form in which laplace-torch shows them.

    Kron            one entry a parameter tensor: [B, A] of a weight (o, i), whose block is B ⊗ A, or [B] of a bias
    KronDecomposed  the same by eigenvalues and eigenvectors, times a scale, plus a delta for each entry

The posterior itself is computed by `lapwing.operators`; these are views of it, with gradients in scale and deltas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue


@dataclass(eq=False)
class Kron:
    """Factors, one list an entry: [B (o, o), A (i, i)] or [B (o, o)]."""

    kfacs: list[list[Tensor]]

    def __len__(self) -> int:
        return len(self.kfacs)

    def __add__(self, other: Kron) -> Kron:
        pairs = zip(self.kfacs, other.kfacs, strict=True)
        return Kron([[a + b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in pairs])

    def __mul__(self, scalar: float | Tensor) -> Kron:
        return Kron([[scalar ** (1 / len(entry)) * one for one in entry] for entry in self.kfacs])

    __rmul__ = __mul__

    def decompose(self, damping: bool = False) -> KronDecomposed:
        """Eigenvalues and eigenvectors of every factor; what rounding took below zero is zero."""
        found = [[torch.linalg.eigh(one) for one in entry] for entry in self.kfacs]
        values = [[l.clamp(min=0) for l, _ in entry] for entry in found]
        return KronDecomposed([[u for _, u in entry] for entry in found], values, damping=damping)

    def diag(self) -> Tensor:
        """The diagonal, (p,)."""
        return torch.cat([_outer([one.diagonal() for one in entry]).reshape(-1) for entry in self.kfacs])

    def to_matrix(self) -> Tensor:
        """The whole matrix (p, p)."""
        return torch.block_diag(*[torch.kron(*entry) if len(entry) == 2 else entry[0] for entry in self.kfacs])


@dataclass(eq=False)
class KronDecomposed:
    """U diag(l ⊗ m + delta) Uᵀ for each entry."""

    eigenvectors: list[list[Tensor]]
    eigenvalues: list[list[Tensor]]
    deltas: Any = None  # (entries,)
    damping: bool = False  # has no effect, as in laplace-torch 0.3

    def __post_init__(self) -> None:
        if self.deltas is None:
            self.deltas = torch.zeros(
                len(self), dtype=self.eigenvalues[0][0].dtype, device=self.eigenvalues[0][0].device
            )

    def __len__(self) -> int:
        return len(self.eigenvalues)

    def __add__(self, deltas: Tensor) -> KronDecomposed:
        if deltas.numel() not in (1, len(self)) or deltas.ndim > 1:
            raise InvalidValue(f"{len(self)} entries take one delta or one each, got {tuple(deltas.shape)}")
        return replace(self, deltas=self.deltas + deltas)

    def __mul__(self, scalar: float | Tensor) -> KronDecomposed:
        return replace(self, eigenvalues=[[scalar ** (1 / len(ls)) * l for l in ls] for ls in self.eigenvalues])

    __radd__ = __add__
    __rmul__ = __mul__

    def detach(self) -> KronDecomposed:
        """The same without gradient in the deltas."""
        return replace(self, deltas=self.deltas.detach())

    def _entries(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Eigenvectors of each entry, and its eigenvalues plus delta, (o, i) or (o,)."""
        for vectors, values, delta in zip(self.eigenvectors, self.eigenvalues, self.deltas, strict=True):
            yield vectors, _outer(values) + delta

    def logdet(self) -> Tensor:
        """log|M|, 0-dim."""
        return torch.stack([values.log().sum() for _, values in self._entries()]).sum()

    def bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        """M^exponent W for vectors W (..., p)."""
        out = [_turned(w, vectors, values**exponent).flatten(W.ndim - 1) for w, vectors, values in self._cut(W)]
        return torch.cat(out, -1)

    def whitened(self, W: Tensor) -> Tensor:
        """M^(−½) W in the basis of M's eigenvectors, for vectors W (..., p): products of two are those by M⁻¹."""
        out = [(_into(w, vectors) * values.rsqrt()).flatten(W.ndim - 1) for w, vectors, values in self._cut(W)]
        return torch.cat(out, -1)

    def _cut(self, W: Tensor) -> Iterator[tuple[Tensor, list[Tensor], Tensor]]:
        """Each entry's part of vectors W (..., p), with its eigenvectors and eigenvalues."""
        start = 0
        for vectors, values in self._entries():
            yield W[..., start : start + values.numel()].reshape(*W.shape[:-1], *values.shape), vectors, values
            start += values.numel()

    def inv_square_form(self, W: Tensor) -> Tensor:
        """W M⁻¹ Wᵀ for W (n, c, p), (n, c, c)."""
        return W @ self.bmm(W).mT

    def diag(self, exponent: float = 1) -> Tensor:
        """The diagonal of M^exponent, (p,)."""
        return torch.cat(
            [_turned(v**exponent, [u.square() for u in us], None).reshape(-1) for us, v in self._entries()]
        )

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """M^exponent, (p, p)."""
        size = sum(math.prod(len(l) for l in ls) for ls in self.eigenvalues)
        eye = torch.eye(size, dtype=self.deltas.dtype, device=self.deltas.device)
        return self.bmm(eye, exponent)


def _outer(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.outer(*values)


def _into(w: Tensor, vectors: list[Tensor]) -> Tensor:
    """Uᵀ w for w (..., o, i) or (..., o)."""
    return w @ vectors[0] if len(vectors) == 1 else vectors[0].mT @ w @ vectors[1]


def _turned(w: Tensor, vectors: list[Tensor], values: Tensor | None) -> Tensor:
    """U (values ∘ Uᵀ w) for w (..., o, i) or (..., o); U w itself without values."""
    if len(vectors) == 1:
        w = w if values is None else _into(w, vectors) * values
        return w @ vectors[0].mT
    left, right = vectors
    w = w if values is None else _into(w, vectors) * values
    return left @ w @ right.mT
