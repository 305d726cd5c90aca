"""How a layer looks to curvature: a set of shared linear maps.

    z[n, s, b, o] = Σ_i W[b, o, i] a[n, s, b, i]          n data, s shared positions, b blocks, o/i outputs/inputs

so that the gradient of an example, for cotangent k with output gradients g (k, n, s, b, o), is

    dW[k, n, b, o, i] = Σ_s g[k, n, s, b, o] a[n, s, b, i]

A bias is one more input that is always 1. Blocks are groups of a convolution, or the channels of a normalization
layer's scale. Everything else (KFAC, the exact diagonal, rows, predictive variances) follows from a and g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.gram import add_gram


@dataclass(frozen=True, eq=False)
class DenseInputs:
    """Inputs that are numbers, a (n, s, b, i)."""

    a: Tensor

    @property
    def positions(self) -> int:
        """The number of shared positions s."""
        return self.a.shape[1]

    def chunk(self, index: slice) -> DenseInputs:
        """Those of some examples."""
        return DenseInputs(self.a[index])

    def to(self, dtype: torch.dtype) -> DenseInputs:
        """In another dtype."""
        return DenseInputs(self.a.to(dtype))

    def absolute(self) -> DenseInputs:
        """|a|."""
        return DenseInputs(self.a.abs())

    def apart(self) -> DenseInputs:
        """Each position as an example of its own."""
        return DenseInputs(self.a.flatten(0, 1).unsqueeze(1))

    def empty_gram(self, sharing: str) -> Tensor:
        """Zeros (b, i, i) for Σ a aᵀ."""
        b, i = self.a.shape[2:]
        return torch.zeros(b, i, i, dtype=torch.promote_types(self.a.dtype, torch.float32), device=self.a.device)

    def add_gram(self, total: Tensor, sharing: str) -> None:
        """total (b, i, i) += Σ a aᵀ over data and positions (or of their mean), on and below the diagonal."""
        a = self.a.mean(1, keepdim=True) if sharing == "reduce" else self.a
        a = a.flatten(0, 1).transpose(0, 1).to(total)  # (b, n s, i)
        for one, rows in zip(total, a, strict=True):
            add_gram(one, rows)

    def outer(self, g: Tensor) -> Tensor:
        """Gradients of each example, (k, n, b, o, i)."""
        if self.positions == 1:
            return g[:, :, 0].unsqueeze(-1) * self.a[:, 0].unsqueeze(-2)
        return torch.einsum("knsbo,nsbi->knboi", g, self.a)

    def squares(self, g: Tensor, room: Tensor | None = None) -> Tensor:
        """Σ_{k,n} dW², (b, o, i): positions are summed before the square. room (n, b, i, o): memory for one dWᵀ."""
        if self.positions == 1:
            return torch.einsum("nbo,nbi->boi", g[:, :, 0].square().sum(0), self.a[:, 0].square())
        if len(g) == 1:
            dw = torch.matmul(self.a.permute(0, 2, 3, 1), g[0].transpose(1, 2), out=room)  # aᵀ g: faster than gᵀ a
            return dw.mul_(dw).sum(0).mT  # in place: what was just made is still in the caches
        flat = self.outer(g).flatten(0, 1)
        return flat.mul_(flat).sum(0)

    def rotated(self, basis: Tensor | None) -> DenseInputs:
        """Inputs in another basis, basis (b, i, j)."""
        return self if basis is None else DenseInputs(torch.einsum("nsbi,bij->nsbj", self.a, basis))

    def covariance(self, g: Tensor, inverse: Tensor) -> Tensor:
        """Σ_{boi} dW[k] V[b, o, i] dW[l] for each example, V = inverse (b, o, i): (n, k, l)."""
        if self.positions == 1:
            w = torch.einsum("nbi,boi->nbo", self.a[:, 0].square(), inverse)
            g = g[:, :, 0]  # (k, n, b, o)
            return torch.einsum("knbo,lnbo->nkl", g * w, g)
        rows = (self.outer(g) * inverse.sqrt()).flatten(2).transpose(0, 1)  # (n, k, b o i)
        return rows @ rows.mT

    def variance(self, g: Tensor, inverse: Tensor) -> Tensor:
        """The diagonal of `covariance`, (n, k)."""
        if self.positions == 1:
            w = torch.einsum("nbi,boi->nbo", self.a[:, 0].square(), inverse)
            return torch.einsum("knbo,nbo->nk", g[:, :, 0].square(), w)
        return torch.einsum("knboi,boi->nk", self.outer(g).square(), inverse)


@dataclass(frozen=True, eq=False)
class OneHotInputs:
    """Inputs that are rows of the identity, given by their numbers ids (n, s) out of `size`; one block."""

    ids: Tensor
    size: int
    padding: int | None = None  # a number whose row is never trained

    @property
    def positions(self) -> int:
        """The number of shared positions s."""
        return self.ids.shape[1]

    def chunk(self, index: slice) -> OneHotInputs:
        """Those of some examples."""
        return OneHotInputs(self.ids[index], self.size, self.padding)

    def to(self, dtype: torch.dtype) -> OneHotInputs:
        """Themselves: they have no dtype."""
        return self

    def absolute(self) -> OneHotInputs:
        """Themselves: they are not negative."""
        return self

    def apart(self) -> OneHotInputs:
        """Each position as an example of its own."""
        return OneHotInputs(self.ids.reshape(-1, 1), self.size, self.padding)

    def _live(self, g: Tensor) -> Tensor:
        """Output gradients with those of padding removed, (k, n, s, o)."""
        g = g[:, :, :, 0]
        return g if self.padding is None else g * (self.ids != self.padding)[None, :, :, None]

    def empty_gram(self, sharing: str) -> Tensor:
        """Σ a aᵀ is diagonal if positions are expanded: counts, (1, i); else a full matrix, (1, i, i)."""
        shape = (1, self.size) if sharing == "expand" else (1, self.size, self.size)
        return torch.zeros(shape, dtype=torch.float64, device=self.ids.device)

    def add_gram(self, total: Tensor, sharing: str) -> None:
        """total += Σ a aᵀ over data and positions: counts (b, i), or (b, i, i) of their means."""
        if sharing == "reduce":
            DenseInputs(self._dense().unsqueeze(2)).add_gram(total, sharing)
        else:
            live = self.ids if self.padding is None else self.ids[self.ids != self.padding]
            total += torch.bincount(live.reshape(-1), minlength=self.size)

    def _dense(self) -> Tensor:
        a = torch.nn.functional.one_hot(self.ids, self.size).to(torch.float64)
        if self.padding is not None:
            a[..., self.padding] = 0
        return a

    def outer(self, g: Tensor) -> Tensor:
        """Gradients of each example, (k, n, 1, o, i)."""
        g = self._live(g)  # (k, n, s, o)
        k, n, s, o = g.shape
        out = g.new_zeros(k, n, self.size, o)
        out.scatter_add_(2, self.ids[None, :, :, None].expand(k, n, s, o), g)
        return out.mT.unsqueeze(2)  # (k, n, 1, o, i)

    def _summed(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """g, and at each position the sum of g over all positions with the same number."""
        g = self._live(g)
        same = (self.ids.unsqueeze(1) == self.ids.unsqueeze(2)).to(g)  # (n, s, s)
        return g, torch.einsum("nst,knto->knso", same, g)

    def squares(self, g: Tensor, room: Tensor | None = None) -> Tensor:
        """Σ of squared gradients over columns and examples, (1, o, i)."""
        g, total = self._summed(g)
        each = (g * total).sum(0).flatten(0, 1)  # (n s, o)
        out = each.new_zeros(self.size, each.shape[-1]).index_add(0, self.ids.reshape(-1), each)
        return out.mT.unsqueeze(0)

    def rotated(self, basis: Tensor | None) -> Any:
        """In another basis of the inputs; None is their own."""
        if basis is None:
            return self
        return DenseInputs(self._dense().to(basis).unsqueeze(2)).rotated(basis)

    def covariance(self, g: Tensor, inverse: Tensor) -> Tensor:
        """Σ_oi of products of gradients, weighed by a variance `inverse` (1, o, i): (n, k, k)."""
        g, total = self._summed(g)
        v = inverse[0].mT[self.ids]  # (n, s, o)
        return torch.einsum("knso,nso,lnso->nkl", total, v, g)

    def variance(self, g: Tensor, inverse: Tensor) -> Tensor:
        """The diagonal of the covariance, (n, k)."""
        g, total = self._summed(g)
        return torch.einsum("knso,nso,knso->nk", total, inverse[0].mT[self.ids], g)
