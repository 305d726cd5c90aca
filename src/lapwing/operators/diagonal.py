"""Diagonal operator: M = diag(values[index] · unit), with G values shared by p entries.

One class for the scalar (G = 1), the grouped (1 < G < p) and the element-wise (G = p) precision:
index (p,) says which value an entry takes; index=None means one value for all (G = 1), or one each (G = p).
`unit` (p,) is a fixed scale of each entry (the g-prior's second moments), 1 where None; it carries no gradient.
`grouping` holds what follows from the index alone; diagonals of other values that share the index share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.operators import linalg
from lapwing.operators.memo import Grouping


@dataclass(frozen=True, eq=False)
class Diagonal:
    """diag(values[index]·unit), (p, p): one value for all entries, one for each, or one for each group."""

    values: Tensor  # (g,)
    size: int
    index: Tensor | None = None  # (p,) of int64
    unit: Tensor | None = None  # (p,), positive
    grouping: Grouping = field(default_factory=Grouping)

    @property
    def single(self) -> bool:
        """One value, in the unit of each entry."""
        return self.values.numel() == 1

    @property
    def uniform(self) -> bool:
        """All entries the same."""
        return self.single and self.unit is None

    @property
    def unit_key(self) -> int | None:
        """A name for the unit, under which factorizations in it are kept."""
        return None if self.unit is None else hash(self.unit.cpu().numpy().tobytes())

    def dense(self) -> Tensor:
        """The diagonal, (p,)."""
        out = self.values.expand(self.size) if self.index is None else self.values[self.index]
        return out if self.unit is None else out * self.unit

    def counts(self) -> Tensor:
        """How many entries each value has, (g,)."""
        if self.index is not None:
            if self.grouping.counts is None:
                self.grouping.counts = torch.bincount(self.index, minlength=self.values.numel())
            return self.grouping.counts.to(self.values)
        return torch.full_like(self.values, self.size // self.values.numel())

    def sums(self, entries: Tensor) -> Tensor:
        """The sum over the entries of each value, (..., p) -> (..., g)."""
        if self.index is not None:
            return entries.new_zeros(*entries.shape[:-1], self.values.numel()).index_add(-1, self.index, entries)
        return entries.sum(-1, keepdim=True) if self.single else entries

    def logdet(self) -> Tensor:
        """log|M|, differentiable."""
        out = (self.counts() * self.values.log()).sum()
        return out if self.unit is None else out + self.unit.log().sum()

    def groups_at(self, index: Tensor) -> Tensor | int:
        """Which value each of some entries takes, or the one that they share."""
        if self.single:
            return 0
        groups = index if self.index is None else self.index[index]
        return int(groups[0]) if bool((groups == groups[0]).all()) else groups

    def at(self, index: Tensor, groups: Tensor | int) -> Diagonal:
        """The diagonal at some entries, whose groups are known: one value where they share one."""
        unit = None if self.unit is None else self.unit[index]
        if isinstance(groups, int):
            return Diagonal(self.values[groups].reshape(1), len(index), unit=unit)
        return Diagonal(self.values, len(index), groups, unit)


@linalg.mv.register
def _(op: Diagonal, v: Tensor) -> Tensor:
    return op.dense() * v


@linalg.scale.register
def _(op: Diagonal, s: Tensor) -> Diagonal:
    return Diagonal(op.values * s, op.size, op.index, op.unit)


@linalg.shift.register
def _(op: Diagonal, d: Diagonal) -> Diagonal:
    if op.unit is None and d.unit is None and (op.single or d.single):  # the groups of the other stay
        return Diagonal(op.values + d.values, op.size, d.index if op.uniform else op.index)
    return Diagonal(op.dense() + d.dense(), op.size)


def shifted(op: Any, d: Diagonal) -> Any:
    """op + diag(d) for an operator whose own shift is its field `diag`: the rule of `shift` for all of them."""
    return replace(op, diag=d if op.diag is None else linalg.shift(op.diag, d))


@linalg.solve.register
def _(op: Diagonal, b: Tensor) -> Tensor:
    return b / op.dense().detach()


@linalg.draw.register
def _(op: Diagonal, n: int, generator: torch.Generator) -> Tensor:
    return linalg.standard_normal((n, op.size), generator, op.values) / op.dense().detach().sqrt()


@linalg.covariance.register
def _(op: Diagonal, rows: Tensor) -> Tensor:
    return torch.einsum("nap,p,nbp->nab", rows, 1 / op.dense().detach(), rows)


@linalg.to_dense.register
def _(op: Diagonal) -> Tensor:
    return op.dense().diag()


linalg.logdet.register(Diagonal, Diagonal.logdet)
linalg.diagonal.register(Diagonal, Diagonal.dense)
linalg.is_diagonal.register(Diagonal, lambda op: True)
