"""What is summed over data for each part, by its kind. g (K, n, s, b, o) at unit scale; h curvature weights.

kron      A = Σ a aᵀ (b, i, i),  B = Σ g gᵀ (h, b, o, o),  count = N·S (expand) or N (reduce):
          H ≈ (1/count) B ⊗ A                                                            Eq. 14
          (a bias apart from its weight: A without the products of its input, 1, with the others)
dense     Σ_n Σ_k dW dWᵀ  (h, boi, boi)
diagonal  Σ_n Σ_k dW²     (h, boi), positions summed before the square                    Eq. 16

A batch is see(view, n), add(view, g, budget) for its cotangents a few at a time, and close(view).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.gram import mirrored
from lapwing.curvature.parts import Part
from lapwing.errors import InvalidValue
from lapwing.packing import Expected
from lapwing.tangent import TangentModel

ROWS = 512  # summed by one product of matrices, which in float32 adds them one by one


def by_weight(g: Tensor, terms: int) -> list[Tensor]:
    """Cotangents cut by the curvature weight they belong to (the columns of the exact factor in turn)."""
    return [g] if terms == 1 else [g[h::terms] for h in range(terms)]


def expected(part: Part, terms: int) -> dict[str, Expected]:
    """What is summed for a part, by its name."""
    b, o, i = part.shape
    if part.kind == "kron":
        outer = Expected(((terms, b, o, o),), squares=True, gram=True)
        inner = Expected(((b, i, i), (b, i)), squares=True, gram=True)  # (b, i) of one-hot inputs
        return {"A": inner, "B": outer, "count": Expected(((),), squares=True)}
    if part.kind == "dense":
        return {"gram": Expected(((terms, part.size, part.size),), squares=True, gram=True)}
    return {"diagonal": Expected(((terms, part.size),), squares=True)} if part.kind == "diagonal" else {}


class Room:
    """Memory for what is made and done with in turn: a product is slower into fresh memory."""

    def __init__(self) -> None:
        self.flat = torch.empty(0)

    def shaped(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of a shape, in the dtype and on the device of a tensor; what it holds is left from before."""
        size = math.prod(shape)
        if self.flat.numel() < size or self.flat.dtype != like.dtype or self.flat.device != like.device:
            self.flat = like.new_empty(size)
        return self.flat[:size].view(shape)


class PartSum:
    """What is summed for one part, at unit scale."""

    def see(self, view: Any, n: int) -> Any:
        """Add the inputs of n examples. What comes back is kept for `add` and `close`: a convolution's are large."""
        return view

    def close(self, view: Any) -> None:
        """The end of a batch, at which nothing is left over unless a sum says otherwise."""


class KroneckerSum(PartSum):
    """A = Σ a aᵀ (b, i, i) over data and positions, B_h = Σ g gᵀ (h, b, o, o), and how many were summed."""

    mutable = "a", "b", "count"

    def __init__(self, part: Part, terms: int, tangent: TangentModel, sharing: str, apart: bool = False) -> None:
        b, o, _ = part.shape
        self.terms, self.sharing, self.shape = terms, sharing, part.shape
        self.apart = apart  # whether products of the bias's input with the others are left out of A
        self.a: Tensor | None = None  # (b, i, i), or its diagonal (b, i)
        self.b = torch.zeros(terms, b, o, o, dtype=tangent.sum_dtype, device=tangent.device)
        self.count = torch.zeros((), dtype=torch.float64, device=tangent.device)

    def check(self) -> None:
        """Raise unless what was read from a checkpoint can be A."""
        b, _, i = self.shape
        if self.a is not None and (not isinstance(self.a, Tensor) or self.a.shape not in ((b, i, i), (b, i))):
            raise InvalidValue(f"A must be {(b, i, i)} or {(b, i)}, got {self.a!r:.99}")

    def see(self, view: Any, n: int) -> None:
        """Add the inputs of n examples, which B needs no more."""
        if self.a is None:
            self.a = view.empty_gram(self.sharing)
        view.add_gram(self.a, self.sharing)
        self.count += n * (view.positions if self.sharing == "expand" else 1)

    def add(self, view: Any, g: Tensor, budget: int) -> None:
        """Add columns of output gradients g (k, n, s, b, o)."""
        for h, mine in enumerate(by_weight(g, self.terms)):
            _add_outputs(self.b[h], mine.sum(2, keepdim=True) if self.sharing == "reduce" else mine)

    def result(self) -> dict[str, Tensor]:
        """A, B and their count."""
        b, _, i = self.shape
        a = self.b.new_zeros(b, i, i) if self.a is None else self.a  # None: called on the probe, on no batch
        a = a if a.ndim == 2 else mirrored(a)
        if self.apart:
            a[:, -1, :-1] = a[:, :-1, -1] = 0
        return {"A": a, "B": self.b, "count": self.count}


def _add_outputs(total: Tensor, g: Tensor) -> None:
    """total (b, o, o) += Σ g gᵀ over (k, n, s), for g (k, n, s, b, o) in the memory order that its layer gives."""
    g = g.to(total)
    if g.shape[2] > 1 and g.stride(2) == 1:  # positions run fastest (convolutions): sum products of (o, s) matrices
        for one, mine in zip(total, g.unbind(3), strict=True):  # (k, n, s, o)
            matrices = mine.transpose(2, 3).flatten(0, 1)
            one += torch.bmm(matrices, matrices.mT).sum(0)
    else:
        for some in g.flatten(0, 2).transpose(0, 1).split(ROWS, 1):  # (b, k n s, o)
            total += some.mT @ some  # not added to by the product itself, which would add row by row


class DenseSum(PartSum):
    """Σ of outer products of a part's gradients, (h, p, p)."""

    mutable = ("gram",)

    def __init__(self, part: Part, terms: int, tangent: TangentModel) -> None:
        self.terms, self.size = terms, part.size
        self.gram = torch.zeros(terms, part.size, part.size, dtype=torch.float64, device=tangent.device)

    def add(self, view: Any, g: Tensor, budget: int) -> None:
        """Add columns of output gradients g (k, n, s, b, o)."""
        for piece, part_g in _pieces(view, g, self.size, budget):
            self.add_rows(piece.outer(part_g).flatten(2))

    def add_rows(self, rows: Tensor) -> None:
        """rows (K, n, p)."""
        for h, mine in enumerate(by_weight(rows, self.terms)):
            flat = mine.reshape(-1, self.size).to(torch.float64)
            self.gram[h].addmm_(flat.mT, flat)

    def result(self) -> dict[str, Tensor]:
        """The Gram matrices (h, p, p)."""
        return {"gram": self.gram}


class DiagonalSum(PartSum):
    """Σ of squares of a part's gradients, (h, p)."""

    mutable = ("total",)

    def __init__(self, part: Part, terms: int, tangent: TangentModel, room: Room) -> None:
        self.terms, self.size, self.shape, self.room = terms, part.size, part.shape, room
        self.total = torch.zeros(terms, part.size, dtype=torch.float64, device=tangent.device)
        self.squares: list[Tensor] = []  # Σ_k g² of a batch without shared positions, (n, 1, b, o) for each weight

    def add(self, view: Any, g: Tensor, budget: int) -> None:
        """Add columns of output gradients g (k, n, s, b, o)."""
        if view.positions == 1:  # Σ_k (g_k a)² = (Σ_k g_k²) a²: one product for all columns, in close
            g = g.to(torch.promote_types(g.dtype, torch.float32))
            squares = [mine.square().sum(0) for mine in by_weight(g, self.terms)]
            if self.squares:
                squares = [a.add_(b) for a, b in zip(self.squares, squares, strict=True)]
            self.squares = squares
            return
        for piece, part_g in _pieces(view, g, self.size, budget):
            for total, mine in zip(self.total, by_weight(part_g, self.terms), strict=True):
                b, o, i = self.shape
                room = self.room.shaped((mine.shape[1], b, i, o), mine) if len(mine) == 1 else None
                total += piece.squares(mine, room).reshape(-1)

    def close(self, view: Any) -> None:
        """Multiply what was held back of a batch, and add it."""
        for total, square in zip(self.total, self.squares, strict=False):
            total += view.to(square.dtype).squares(square.sqrt().unsqueeze(0)).reshape(-1)
        self.squares = []

    def add_rows(self, rows: Tensor) -> None:
        """Add gradients (k, n, p) themselves."""
        for h, mine in enumerate(by_weight(rows, self.terms)):
            self.total[h] += mine.square().sum((0, 1), dtype=torch.float64)

    def result(self) -> dict[str, Tensor]:
        """The sums (h, p)."""
        return {"diagonal": self.total}


def _pieces(view: Any, g: Tensor, size: int, budget: int) -> Iterator[tuple[Any, Tensor]]:
    """Pieces of examples whose gradients (K, n, size) stay within the budget."""
    each = g.shape[0] * size * g.element_size()
    step = max(1, budget // max(1, each))
    if g.shape[1] <= step:
        yield view, g
        return
    for start in range(0, g.shape[1], step):
        index = slice(start, start + step)
        yield view.chunk(index), g[:, index]
