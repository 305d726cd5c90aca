"""The empirical tangent kernel of a network, at its weights:

    K[n, a, m, b] = Σ_p ∂f_a(x_n)/∂θ_p A_p⁻¹ ∂f_b(x'_m)/∂θ_p = J(x) A⁻¹ J(x')ᵀ,     A = 1 unless a prior is given

as a sum over layers. A layer without shared positions has gradients a ⊗ g, which are never made: its part of K is
⟨a, a'⟩⟨g, g'⟩. Those of other layers are made, each layer's by itself, for pieces of examples: no row across the
network is. As many pieces of the first set are held as fit half of the memory budget, and the second set goes by: once,
and with one backward pass for an output of an example, where the first set fits. Where both sets are one, each pair of
pieces is taken once. Gradients and their products are in the network's dtype, sums in float64.
Shapes: n and m inputs, c outputs, k and l outputs at once, p parameters of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.arguments import as_budget
from lapwing.curvature.capture import Capture, Changed
from lapwing.curvature.cover import cover
from lapwing.curvature.parts import Part
from lapwing.curvature.rules import DenseInputs
from lapwing.errors import InvalidValue, Unsupported
from lapwing.posterior.base import check_inputs
from lapwing.push import LARGEST
from lapwing.tangent import TangentModel


@torch.inference_mode(False)
@torch.no_grad()
def kernel(
    tangent: TangentModel,
    x1: Any,
    x2: Any = None,
    *,
    per_output: bool = False,
    memory_budget: float | None = None,
) -> Tensor:
    """J(x1) J(x2)ᵀ of a linearized network (`lw.linearize`) over its selected weights, (n₁, c, n₂, c) in float64; of
    outputs with positions, (n₁, ..., c, n₂, ..., c). x2=None is x1.

    per_output: of each output with itself alone, (c, n₁, n₂). memory_budget: bytes for gradients (1 GiB); with less,
    inputs of x2 are gone through more than once."""
    first = Side(tangent, _given(tangent, x1), as_budget(memory_budget))
    second = None if x2 is None else replace(first, x=_given(tangent, x2))
    return products(first, second, per_output)


@dataclass(frozen=True, eq=False)
class Outer:
    """Gradients a ⊗ g of a layer without shared positions."""

    a: Tensor  # (n, i)
    g: Tensor  # (k, n, o)

    @property
    def made(self) -> Tensor:
        """(k, n, i·o)."""
        return (self.a.unsqueeze(-1) * self.g.unsqueeze(-2)).flatten(2)

    @property
    def bytes(self) -> int:
        """Of memory."""
        return (self.a.numel() + self.g.numel()) * self.a.element_size()


@dataclass(frozen=True, eq=False)
class Made:
    """Gradients of a layer, or of all parameters that no rule speaks for."""

    made: Tensor  # (k, n, p)

    @property
    def bytes(self) -> int:
        """Of memory."""
        return self.made.numel() * self.made.element_size()


Layers = dict[str, Any]  # Outer or Made, by the name of a layer


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
        return torch.cat([self.tangent(piece) for piece in self.pieces(LARGEST)])

    @property
    def outputs(self) -> int:
        """Of an example, at all positions."""
        return self.f[0].numel()

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

    @cached_property
    def each(self) -> int:
        """Bytes of an example's gradients for one output, as one example tells."""
        _, one = next(replace(self, x=next(self.pieces(1))).layers(range(1), 1))
        return max(1, sum(layer.bytes for layer in one.values()) // (1 if self._cut else len(self.f)))

    @property
    def _cut(self) -> bool:
        return self.tangent.separable(self.x)

    def pieces(self, size: int) -> Iterator[Any]:
        """The inputs in pieces of so many examples; whole, where they cannot be cut."""
        if not self._cut:
            yield self.x
            return
        for start in range(0, tree.batch_size(self.x), size):
            yield tree.rows_of(self.x, slice(start, start + size))

    def layers(self, outputs: range, size: int, after: int = 0) -> Iterator[tuple[slice, Layers]]:
        """Gradients of some outputs, layer by layer, scaled by A^-½, for pieces of the inputs after some of them."""
        capture, start = Capture(self.tangent, self.parts), after
        rest = replace(self, x=tree.rows_of(self.x, slice(after, None))) if after else self
        for x in rest.pieces(size):
            record = capture.run(x)
            n, f = len(record.f), record.f.detach()
            eye = torch.eye(f[0].numel(), dtype=f.dtype, device=f.device)[outputs.start : outputs.stop]
            u = eye.reshape(-1, *f.shape[1:]).expand(n, len(eye), *f.shape[1:])
            found = self._of_rules(record, u)
            if self.others:
                pulled = self.tangent.pulled(x, u, self.others).transpose(0, 1)
                found[""] = Made(pulled if self.precision is None else pulled * self._roots(self.others))
            yield slice(start, start + n), found
            start += n

    def _of_rules(self, record: Any, u: Tensor) -> Layers:
        """Those of layers with a rule, for cotangents u (n, k, ..., c)."""
        views, parts, k = record.views(), {part.name: part for part in record.called}, 0
        found: dict[str, Any] = {}
        for gradients in record.columns(u, 1, self.budget // 4):
            count = 0
            for name, g in gradients.items():
                count, view = len(g), views[name]
                if isinstance(view, DenseInputs) and view.positions == 1 and g.shape[3] == 1:
                    found.setdefault(name, []).append(g[:, :, 0, 0])
                    continue
                if name not in found:
                    found[name] = g.new_empty(u.shape[1], g.shape[1], parts[name].size)
                _contract(view, g, found[name][k : k + count])
            k += count
        return {name: self._scaled(parts[name], views[name], made) for name, made in found.items()}

    def _scaled(self, part: Part, view: Any, made: Any) -> Outer | Made:
        layer = Outer(view.a[:, 0, 0], torch.cat(made)) if isinstance(made, list) else Made(made)
        if self.precision is None:
            return layer
        b, o, i = part.shape
        root = self.precision[part.index(self.tangent.layout)].rsqrt().reshape(b, o, i).mT.reshape(-1).to(self.f)
        if isinstance(layer, Outer) and bool((root == root[0]).all()):
            return replace(layer, g=layer.g * root[0])
        return Made(layer.made * root)

    def _roots(self, names: tuple[str, ...]) -> Tensor:
        assert self.precision is not None
        slices = self.tangent.layout.slices()
        return torch.cat([self.precision[slices[name]] for name in names]).rsqrt().to(self.f)


def _contract(view: Any, g: Tensor, out: Tensor) -> None:
    """Σ_s a ⊗ g over positions, (k, n, b·i·o), into out; g (k, n, s, b, o)."""
    if not isinstance(view, DenseInputs):
        out.copy_(view.outer(g).mT.flatten(2))
        return
    a = view.a.permute(0, 2, 3, 1)  # (n, b, i, s)
    for one, into in zip(g, out, strict=True):
        torch.matmul(a, one.transpose(1, 2), out=into.view(*a.shape[:3], g.shape[-1]))


def products(first: Side, second: Side | None, per_output: bool = False) -> Tensor:
    """J A⁻¹ Jᵀ between two sides, (*f, *f'), or (c, n, m); second=None is the first."""
    f = first.f
    if per_output and f.ndim != 2:
        raise Unsupported(
            f"per_output=True is for outputs (n, c), and these are {tuple(f.shape)}; without it, K is of all of them"
        )
    try:
        found = _summed(first, second, per_output)
    except Changed:
        other = None if second is None else replace(second, whole=True)
        found = _summed(replace(first, whole=True), other, per_output)
    if per_output:
        return found
    return found.transpose(0, 1).transpose(2, 3).reshape(*f.shape, *(f if second is None else second.f).shape)


def _summed(first: Side, second: Side | None, per_output: bool) -> Tensor:
    """(k, n, l, m), or (k, n, m)."""
    other, n, q = second or first, len(first.f), first.outputs
    shape = (q, n, len(other.f)) if per_output else (q, n, other.outputs, len(other.f))
    total = torch.zeros(shape, dtype=torch.float64, device=first.f.device)
    at_once = max(1, min(q, first.budget // (2 * n * first.each))) if per_output else q
    size = max(1, min(LARGEST, first.budget // (8 * at_once * first.each)))
    for start in range(0, q, at_once):
        outputs = range(start, min(q, start + at_once))
        theirs = outputs if per_output else range(other.outputs)
        for block in _blocks(first, outputs, size):
            if second is None:
                for place, (j, layers) in enumerate(block):
                    _add(total, block[: place + 1], j, layers, outputs, per_output, mirrored=True)
            after = block[-1][0].stop if second is None else 0
            if second is not None or after < n:
                for j, layers in other.layers(theirs, size, after):
                    _add(total, block, j, layers, outputs, per_output, mirrored=second is None)
    return total


def _blocks(side: Side, outputs: range, size: int) -> Iterator[list[tuple[slice, Layers]]]:
    """Pieces that are held together: as many as fit half of the budget."""
    start, n = 0, len(side.f)
    while start < n:
        block: list[tuple[slice, Layers]] = []
        room = side.budget // 2
        for index, layers in side.layers(outputs, size, start):
            block.append((index, layers))
            taken = sum(layer.bytes for layer in layers.values())
            room -= taken
            if room < taken:
                break
        start = block[-1][0].stop
        yield block


def _add(
    total: Tensor, block: list[Any], j: slice, layers: Layers, outputs: range, per_output: bool, mirrored: bool
) -> None:
    """Add the products of pieces that are held with one that goes by; and their mirror image."""
    k = slice(outputs.start, outputs.stop)
    for i, held in block:
        found = sum(_between(held[name], layers[name], per_output) for name in held.keys() & layers.keys())
        if isinstance(found, int):  # no weight has a gradient here
            continue
        if per_output:
            total[k, i, j] += found
        else:
            total[k, i, :, j] += found
        if mirrored and i != j:
            if per_output:
                total[k, j, i] += found.mT
            else:
                total[:, j, k, i] += found.permute(2, 3, 0, 1)


def _between(one: Any, two: Any, per_output: bool) -> Tensor:
    """Products of a layer's gradients: (k, n, m), or (k, n, l, m)."""
    if isinstance(one, Outer) and isinstance(two, Outer):
        inner, g, h = one.a @ two.a.mT, one.g, two.g
        if per_output:
            return inner * (g @ h.mT)
        return (g.flatten(0, 1) @ h.flatten(0, 1).mT).reshape(*g.shape[:2], *h.shape[:2]) * inner.unsqueeze(1)
    g, h = one.made, two.made
    if per_output:
        return g @ h.mT
    return (g.flatten(0, 1) @ h.flatten(0, 1).mT).reshape(*g.shape[:2], *h.shape[:2])


def own_products(side: Side) -> Tensor:
    """J A⁻¹ Jᵀ of each input with itself, (n, q, q) over all q outputs of an example."""
    try:
        return _own(side)
    except Changed:
        return _own(replace(side, whole=True))


def _own(side: Side) -> Tensor:
    q = side.outputs
    total = torch.zeros(len(side.f), q, q, dtype=torch.float64, device=side.f.device)
    size = max(1, min(LARGEST, side.budget // (4 * q * side.each)))
    for i, layers in side.layers(range(q), size):
        for layer in layers.values():
            if isinstance(layer, Outer):
                g = layer.g.transpose(0, 1)  # (n, q, o)
                total[i] += (g @ g.mT) * layer.a.square().sum(1)[:, None, None]
            else:
                made = layer.made.transpose(0, 1)
                total[i] += made @ made.mT
    return total


def _given(tangent: TangentModel, x: Any) -> Any:
    """Inputs on the network's device, some and finite."""
    if not isinstance(tangent, TangentModel):
        raise InvalidValue(f"lw.gp.kernel takes lw.linearize(model), got {type(tangent).__name__}")
    check_inputs(x)
    return tree.moved(x, tangent.device)
