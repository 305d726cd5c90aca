"""Gradients of a network's outputs by its weights, layer by layer, for blocks of examples: J A^-½, in pieces.

    ∂f_k(x_n)/∂W = Σ_s a[n, s] ⊗ g[k, n, s]      a: a layer's inputs, g: output gradients, over s shared positions

A layer's are kept as `Factored`, a and g, where products of those are cheaper than products of the sums, and `Made` as
rows elsewhere. Each layer's are made by itself: no row across the network is. A block of examples is run in smaller
pieces, which fit the caches; its memory is taken once, and serves the next block too.
Shapes: n examples, k outputs, s positions of a layer, b blocks, i inputs, o outputs, p = b i o parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature.capture import Capture, Changed
from lapwing.curvature.cover import cover
from lapwing.curvature.parts import Part
from lapwing.curvature.rules import DenseInputs
from lapwing.push import LARGEST
from lapwing.tangent import TangentModel

CONVOLVED = 32  # examples that convolutions run at once: their patches stay in the caches
ELEMENTWISE = 16  # multiplications in a matrix product that take as long as one of two matrices, element by element


@dataclass(frozen=True, eq=False)
class Factored:
    """Gradients Σ_s a ⊗ g that are not made."""

    a: Tensor  # (n, s, i)
    g: Tensor  # (n, k, s, o)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps, examples first."""
        return self.a, self.g

    @property
    def made(self) -> Tensor:
        """(n, k, i·o)."""
        return (self.a.mT.unsqueeze(1) @ self.g).flatten(2)

    def rows(self, index: slice) -> Factored:
        """Those of some examples."""
        return Factored(self.a[index], self.g[index])


@dataclass(frozen=True, eq=False)
class Made:
    """Gradients of a layer, or of all parameters that no rule speaks for."""

    made: Tensor  # (n, k, p)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps, examples first."""
        return (self.made,)

    def rows(self, index: slice) -> Made:
        """Those of some examples."""
        return Made(self.made[index])


Layers = dict[str, Any]  # Factored or Made, by the name of a layer


@dataclass(eq=False)
class BlockMemory:
    """Memory for the gradients of a block of examples; zero for layers that an example does not call."""

    examples: int
    by_output: bool = False  # the rows of an output one after the other: for products of each output with itself
    layers: Layers = field(default_factory=dict)

    def at(self, name: str, index: slice, like: Tensor, *shapes: tuple[int, ...]) -> Any:
        """Where those of some examples of a layer belong: `Factored` by the shapes (s, i) and (k, s, o), `Made` by
        (k, p)."""
        if name not in self.layers:
            self.layers[name] = self._taken(like, *shapes)
            self._zero(name, slice(0, index.start))
        found = self.layers[name].rows(index)
        if [tuple(t.shape[1:]) for t in found.tensors] != list(shapes):
            raise Changed(f"layer {name} has {list(shapes)} numbers for an example, and had others before")
        return found

    def _taken(self, like: Tensor, *shapes: tuple[int, ...]) -> Any:
        n = self.examples
        if len(shapes) == 2:
            return Factored(*(like.new_empty(n, *shape) for shape in shapes))
        k, p = shapes[0]
        return Made(like.new_empty(k, n, p).transpose(0, 1) if self.by_output else like.new_empty(n, k, p))

    def clear(self, index: slice, called: set[str]) -> None:
        """Zero, where examples did not call a layer."""
        for name in self.layers.keys() - called:
            self._zero(name, index)

    def _zero(self, name: str, index: slice) -> None:
        for t in self.layers[name].rows(index).tensors:
            t.zero_()


@dataclass(frozen=True, eq=False)
class Side:
    """Inputs at which gradients are taken, within a memory budget; `precision` (p,) is that of a prior, None for 1."""

    tangent: TangentModel
    x: Any
    budget: int
    precision: Tensor | None = None
    whole: bool = False  # whether layers are not told apart: where a batch uses them in another way than the probe

    @cached_property
    def f(self) -> Tensor:
        """The outputs, (n, ..., c)."""
        if not self.cut:
            return self.tangent(self.x)
        return torch.cat([self.tangent(x) for _, x in self.pieces(slice(0, tree.batch_size(self.x)))])

    @property
    def outputs(self) -> int:
        """Of an example, at all positions."""
        return self.f[0].numel()

    @property
    def cut(self) -> bool:
        """Whether inputs can be taken in pieces."""
        return self.tangent.separable(self.x)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The layers with a rule."""
        found = () if self.whole else cover(self.tangent, self.x)
        return tuple(part for part in found if not part.generic)

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Parameters without one."""
        known = {name for part in self.parts for name in part.parameters}
        return tuple(name for name in self.tangent.layout.names if name not in known)

    def each(self, pairs: int) -> int:
        """Bytes of an example's gradients for one output, as one example tells; pairs as in `blocks`."""
        one = replace(self, x=tree.rows_of(self.x, slice(0, 1))) if self.cut else self
        _, layers = next(one.blocks(range(1), 1, pairs))
        taken = sum(t.numel() * t.element_size() for layer in layers.values() for t in layer.tensors)
        return max(1, taken // len(one.f))

    def blocks(self, outputs: range, rows: int, pairs: int, after: int = 0) -> Iterator[tuple[slice, Layers]]:
        """Gradients of some outputs, layer by layer, scaled by A^-½, for blocks of `rows` examples after some of them:
        valid until the next. pairs: of outputs, whose products with another example's will be asked for."""
        n = len(self.f)
        rows = max(1, min(rows, n - after)) if self.cut else n
        room, capture = BlockMemory(rows, pairs == 1), Capture(self.tangent, self.parts)
        for start in range(after, n, rows):
            block = slice(start, min(n, start + rows))
            for place, x in self.pieces(block):
                inside = slice(place.start - start, place.stop - start)
                self._fill(room, inside, x, capture.run(x), outputs, pairs)
            yield block, {name: layer.rows(slice(0, block.stop - start)) for name, layer in room.layers.items()}

    def pieces(self, block: slice) -> Iterator[tuple[slice, Any]]:
        """A block of the inputs in pieces; whole, where they cannot be cut."""
        if not self.cut:
            yield block, self.x
            return
        size = LARGEST if self.tangent.columns_at_once else CONVOLVED
        for start in range(block.start, block.stop, size):
            place = slice(start, min(start + size, block.stop))
            yield place, tree.rows_of(self.x, place)

    def _fill(self, room: BlockMemory, place: slice, x: Any, record: Any, outputs: range, pairs: int) -> None:
        """Gradients of a run, into their place in the room."""
        n, f, views = len(record.f), record.f.detach(), record.views()
        eye = torch.eye(f[0].numel(), dtype=f.dtype, device=f.device)[outputs.start : outputs.stop]
        u = eye.reshape(-1, *f.shape[1:]).expand(n, len(eye), *f.shape[1:])
        layers = {
            part.name: self._layer(room, place, part, views[part.name], len(eye), pairs) for part in record.called
        }
        k = 0
        for gradients in record.columns(u, 1, self.budget // 8):
            for name, g in gradients.items():
                layers[name].put(slice(k, k + len(g)), g)
            k += len(next(iter(gradients.values())))
        if self.others:
            pulled = self.tangent.pulled(x, u, self.others)
            made = room.at("", place, f, tuple(pulled.shape[1:])).made.copy_(pulled)
            if self.precision is not None:
                made *= self._roots(self.others)
        room.clear(place, {*layers, *([""] if self.others else [])})

    def _layer(self, room: BlockMemory, place: slice, part: Part, view: Any, k: int, pairs: int) -> Apart | Summed:
        """Where a layer's gradients go, and what they are made of."""
        (b, o, i), root = part.shape, self._root(part)
        plain = isinstance(view, DenseInputs) and b == 1 and (root is None or bool((root == root[0]).all()))
        if plain and view.positions**2 * (i / pairs + o + ELEMENTWISE) < i * o:
            s = view.positions
            found = room.at(part.name, place, self.f, (s, i), (k, s, o))
            found.a.copy_(view.a[:, :, 0])
            return Apart(found.g, None if root is None else root[0])
        return Summed(view, room.at(part.name, place, self.f, (k, part.size)).made, root, part.shape)

    def _root(self, part: Part) -> Tensor | None:
        """A^-½ of a layer, in the order of its gradients (b, i, o)."""
        if self.precision is None:
            return None
        b, o, i = part.shape
        root = self.precision[part.index(self.tangent.layout)].rsqrt()
        return root.reshape(b, o, i).mT.reshape(-1).to(self.f)

    def _roots(self, names: tuple[str, ...]) -> Tensor:
        assert self.precision is not None
        slices = self.tangent.layout.slices()
        return torch.cat([self.precision[slices[name]] for name in names]).rsqrt().to(self.f)


@dataclass(frozen=True, eq=False)
class Apart:
    """Output gradients g are kept as they are."""

    kept: Tensor  # (n, K, s, o), of all outputs
    root: Tensor | None

    def put(self, outputs: slice, g: Tensor) -> None:
        """Those of some outputs, g (k, n, s, 1, o)."""
        into = self.kept[:, outputs].copy_(g[:, :, :, 0].transpose(0, 1))
        if self.root is not None:
            into *= self.root


@dataclass(frozen=True, eq=False)
class Summed:
    """Gradients Σ_s a ⊗ g are made."""

    view: Any
    kept: Tensor  # (n, K, b·i·o), of all outputs
    root: Tensor | None
    shape: tuple[int, int, int]  # b, o, i

    def put(self, outputs: slice, g: Tensor) -> None:
        """Those of some outputs, g (k, n, s, b, o)."""
        b, o, i = self.shape
        into = self.kept[:, outputs]
        if not isinstance(self.view, DenseInputs):
            into.copy_(self.view.outer(g).mT.flatten(2).transpose(0, 1))
        else:
            for one, made in zip(g, into.unflatten(2, (b, i, o)).unbind(1), strict=True):
                self._sum(one, made)
        if self.root is not None:
            into *= self.root

    def _sum(self, g: Tensor, made: Tensor) -> None:
        """Those of one output, (n, b, i, o), of g (n, s, b, o)."""
        b, o, _ = self.shape
        if b == 1:
            torch.bmm(self._a[:, 0], g[:, :, 0], out=made[:, 0])
        elif o > 1:
            made.copy_(self._a @ g.transpose(1, 2))
        else:  # channels by themselves: sums of products over memory in order
            for a, into in zip(self._a, made.unbind(2), strict=True):
                into[..., 0] = (a * g[..., 0]).sum(1)

    @cached_property
    def _a(self) -> Tensor:
        """(n, b, i, s); of blocks with one output, (i, n, s, b)."""
        b, o, _ = self.shape
        return self.view.a.permute(3, 0, 1, 2).contiguous() if b > 1 and o == 1 else self.view.a.permute(0, 2, 3, 1)
