"""The empirical tangent kernel of a network, at its weights:

    K[n, a, m, b] = Σ_p ∂f_a(x_n)/∂θ_p A_p⁻¹ ∂f_b(x'_m)/∂θ_p = J(x) A⁻¹ J(x')ᵀ,     A = 1 unless a prior is given

as a sum over layers, of gradients for blocks of examples (`gradients.py`): no row across the network is. As much of the
first set is held as fits half of the memory budget, and the second goes by in blocks: once, and with one backward pass
for an output of an example, where the first set fits. Where both sets are one, each pair of examples is taken once, but
for those of the same strip. Of a layer whose gradients are a ⊗ g at s positions, an example's product with another's is

    Σ_st ⟨a_s, a'_t⟩⟨g_s, g'_t⟩ by s²(i + o) multiplications,   or ⟨Σ_s a ⊗ g, Σ_t a' ⊗ g'⟩ by i·o

whichever is cheaper. Gradients and their products are in the network's dtype, sums over blocks in float64.
Shapes: n and m inputs, c outputs, k and l outputs at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.arguments import as_budget
from lapwing.curvature.capture import Changed
from lapwing.errors import InvalidValue, Unsupported
from lapwing.gp.gradients import Factored, Layers, Side
from lapwing.gp.multiply import by_rows
from lapwing.posterior.base import check_inputs
from lapwing.tangent import TangentModel

ENTRIES = 2**25  # of products, that are made at once
STRIPS = 8  # that a set is cut into, where it meets itself


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
    return found if per_output else found.reshape(*f.shape, *(f if second is None else second.f).shape)


def _summed(first: Side, second: Side | None, per_output: bool) -> Tensor:
    """(n, k, m, l), or (k, n, m)."""
    other, n, q = second or first, len(first.f), first.outputs
    m, theirs = len(other.f), other.outputs
    shape = (q, n, m) if per_output else (n, q, m, theirs)
    total = torch.zeros(shape, dtype=torch.float64, device=first.f.device)
    pairs = 1 if per_output else q * theirs
    each = first.each(pairs)
    at_once = max(1, min(q, first.budget // (2 * n * each))) if per_output else q
    rows = max(1, min(n, first.budget // (2 * at_once * each)))
    strip = max(1, min(first.budget // (4 * at_once * each), ENTRIES // (max(at_once, pairs) * rows)))
    for start in range(0, q, at_once):
        outputs = range(start, min(q, start + at_once))
        into = total[outputs.start : outputs.stop] if per_output else total
        for i, held in first.blocks(outputs, rows, pairs):
            if second is None:
                _add_own(into, i, held, per_output)
            after = i.stop if second is None else 0
            for j, passing in other.blocks(outputs if per_output else range(theirs), strip, pairs, after):
                _add(into, i, j, _between(held, passing, per_output), second is None)
    return total


def _add_own(total: Tensor, i: slice, held: Layers, per_output: bool) -> None:
    """The products of a block with itself: of each strip of it with the examples up to its own."""
    n = i.stop - i.start
    for start in range(0, n, -(-n // STRIPS)):
        stop = min(n, start + -(-n // STRIPS))
        strip = _rows(held, slice(start, stop))
        j = slice(i.start + start, i.start + stop)
        _add(
            total, slice(i.start, j.start), j, _between(_rows(held, slice(0, start)), strip, per_output), mirrored=True
        )
        _add(total, j, j, _between(strip, strip, per_output), mirrored=False)


def _rows(layers: Layers, index: slice) -> Layers:
    return {name: layer.rows(index) for name, layer in layers.items()}


def _add(total: Tensor, i: slice, j: slice, found: Tensor | None, mirrored: bool) -> None:
    """Add products (k, n, m) or (n, k, m, l), and their mirror image; None are zero."""
    if found is None:
        return
    if total.ndim == 3:
        total[:, i, j] += found
        if mirrored:
            total[:, j, i] += found.mT
    else:
        total[i, :, j] += found
        if mirrored:
            total[j, :, i] += found.permute(2, 3, 0, 1)


def _between(one: Layers, two: Layers, per_output: bool) -> Tensor | None:
    """Products of gradients, summed over layers: (k, n, m), or (n, k, m, l); None, where no layer is in both."""
    found = [_product(one[name], two[name], per_output) for name in one.keys() & two.keys()]
    return sum(found[1:], found[0]) if found else None


def _product(one: Any, two: Any, per_output: bool) -> Tensor:
    """Products of a layer's gradients."""
    if isinstance(one, Factored) and isinstance(two, Factored):
        return _factored(one, two, per_output)
    g, h = one.made, two.made
    if per_output:
        return torch.stack([by_rows(a, b) for a, b in zip(g.unbind(1), h.unbind(1), strict=True)])
    return by_rows(g.flatten(0, 1), h.flatten(0, 1)).reshape(*g.shape[:2], *h.shape[:2])


def _factored(one: Factored, two: Factored, per_output: bool) -> Tensor:
    """Σ_st ⟨a_s, a'_t⟩⟨g_s, g'_t⟩, for as many of the first examples at once as make `ENTRIES` terms."""
    (n, k, s, _), (m, l, t, _) = one.g.shape, two.g.shape
    out = one.g.new_empty((k, n, m) if per_output else (n, k, m, l))
    step = max(1, ENTRIES // (s * m * t * k * (1 if per_output else l)))
    for start in range(0, n, step):
        some = one.rows(slice(start, start + step))
        inner = (some.a.flatten(0, 1) @ two.a.flatten(0, 1).mT).reshape(-1, s, m, t)
        if per_output:
            outer = some.g.transpose(0, 1).flatten(1, 2) @ two.g.transpose(0, 1).flatten(1, 2).mT
            out[:, start : start + step] = outer.reshape(k, -1, s, m, t).mul_(inner).sum((2, 4))
        else:
            outer = (some.g.flatten(0, 2) @ two.g.flatten(0, 2).mT).reshape(-1, k, s, m, l, t)
            out[start : start + step] = outer.mul_(inner[:, None, :, :, None]).sum((2, 5))
    return out


def own_products(side: Side) -> Tensor:
    """J A⁻¹ Jᵀ of each input with itself, (n, q, q) over all q outputs of an example."""
    try:
        return _own(side)
    except Changed:
        return _own(replace(side, whole=True))


def _own(side: Side) -> Tensor:
    q = side.outputs
    total = torch.zeros(len(side.f), q, q, dtype=torch.float64, device=side.f.device)
    rows = max(1, side.budget // (2 * q * side.each(q * q)))
    for i, layers in side.blocks(range(q), rows, q * q):
        for layer in layers.values():
            total[i] += _own_factored(layer) if isinstance(layer, Factored) else layer.made @ layer.made.mT
    return total


def _own_factored(layer: Factored) -> Tensor:
    """(n, k, k)."""
    n, k, s, _ = layer.g.shape
    g = layer.g.flatten(1, 2)
    return (g @ g.mT).reshape(n, k, s, k, s).mul_((layer.a @ layer.a.mT)[:, None, :, None]).sum((2, 4))


def _given(tangent: TangentModel, x: Any) -> Any:
    """Inputs on the network's device, some and finite."""
    if not isinstance(tangent, TangentModel):
        raise InvalidValue(f"lw.gp.kernel takes lw.linearize(model), got {type(tangent).__name__}")
    check_inputs(x)
    return tree.moved(x, tangent.device)
