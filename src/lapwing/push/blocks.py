"""The covariance of outputs under a posterior that is cut into parts, without a Jacobian (Eq. 15).

Each layer adds J_l Σ_l J_lᵀ. With W[b, o, i]'s posterior variance V[b, o, i] in the layer's (eigen)basis, rotated
inputs ã and output gradients g̃ (c, n, s, b, o) of the c outputs:

    no sharing:   Σ_o g̃_co g̃_do (Σ_i ã_i² V_oi)                  O(i·o + c²·o) an example after the rotations
    sharing:      Σ_oi M_coi M_doi V_oi,  M_coi = Σ_s g̃_cso ã_si     one layer's (n, c, o, i) within the budget
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.capture import Capture, Record
from lapwing.curvature.parts import Part
from lapwing.operators import Blocks, linalg
from lapwing.outputs import Normal
from lapwing.push.basis import in_basis
from lapwing.push.runs import At
from lapwing.push.verb import push
from lapwing.tangent import TangentModel
from lapwing.tangent.rows import units


@push.register
def _(precision: Blocks, at: At) -> Normal:
    term = _together if at.joint else _marginals
    fs, covs = [], []
    for piece, record in at.runs(Capture(at.tangent, at.parts).run):
        fs.append(record.f.detach())
        covs.append(term(at.tangent, precision, at.parts, piece, record, at.budget))
    return Normal(torch.cat(fs), torch.cat(covs), at.joint)


def _marginals(
    tangent: TangentModel, precision: Blocks, parts: tuple[Part, ...], x: Any, record: Record, budget: int
) -> Tensor:
    """The covariance of each position's outputs, (n, ..., c, c): for each position its c cotangents.

    The head's term is that of n·q examples of one position each, whatever the number q of positions."""
    f, views = record.f.detach(), record.views()
    n, c, positions = f.shape[0], f.shape[-1], f[0, ..., 0].numel()
    operators = {part.name: op for part, op in zip(parts, precision.parts, strict=True)}
    heads = [part for part in record.called if positions > 1 and record.is_output(part)]
    generic = tuple(part.name for part in parts if part.generic and part.kind != "unused")
    rest = replace(record, parts=tuple(part for part in record.parts if part not in heads))
    out = f.new_zeros(n, positions, c, c, dtype=torch.float64)
    for part in heads:
        b, o, _ = part.shape
        g = torch.eye(c, dtype=f.dtype, device=f.device).reshape(c, 1, 1, b, o).expand(c, n * positions, 1, b, o)
        out += _layer(operators[part.name], part, views[part.name].apart(), g, budget // 4).reshape(out.shape)
    for q in range(positions) if rest.called or generic else ():
        u = f.new_zeros(c, positions, c)
        u[:, q] = torch.eye(c, dtype=f.dtype, device=f.device)
        u = u.reshape(c, *f.shape[1:]).expand(n, c, *f.shape[1:])
        gradients = rest.pull(u)
        for name, g in gradients.items():
            part = next(part for part in rest.called if part.name == name)
            out[:, q] += _layer(operators[name], part, views[name], g, budget // 4)
        if generic:
            out[:, q] += _generic(tangent, precision, parts, generic, x, u, budget // 4)
    return out.reshape(*f.shape, c)


def _together(
    tangent: TangentModel, precision: Blocks, parts: tuple[Part, ...], x: Any, record: Record, budget: int
) -> Tensor:
    """The covariance of all outputs of all inputs, at all their positions, (n, ..., c, n, ..., c)."""
    f = record.f
    out = f.new_zeros(f.numel(), f.numel(), dtype=torch.float64)
    for term in _joint_terms(tangent, precision, parts, record, x, budget):
        out += term
    return out.reshape(*f.shape, *f.shape)


def _generic(
    tangent: TangentModel,
    precision: Blocks,
    parts: tuple[Part, ...],
    names: tuple[str, ...],
    x: Any,
    u: Tensor,
    budget: int,
) -> Tensor:
    own = [(part, op) for part, op in zip(parts, precision.parts, strict=True) if part.name in names]
    sizes, out = [part.size for part, _ in own], []
    for piece, cotangent in tangent.pieces(x, u, 16 * u.shape[1] * sum(sizes), budget):
        rows = tangent.pulled(piece, cotangent, names).to(torch.float64).split(sizes, -1)
        out.append(torch.stack([linalg.covariance(op, r) for (_, op), r in zip(own, rows, strict=True)]).sum(0))
    return torch.cat(out)


def _layer(op: Any, part: Part, view: Any, g: Tensor, budget: int) -> Tensor:
    """One layer's term, (n, c, c), in pieces of examples."""
    view, g = _wide(view, g)
    found = in_basis(op, part, view, g)
    if found is not None:
        view, g, inverse = found
        shared = view.positions > 1
        return torch.cat([v.covariance(p, inverse) for v, p in _pieces(view, g, part.size if shared else 1, budget)])
    rows = (v.outer(p).flatten(2).transpose(0, 1).to(torch.float64) for v, p in _pieces(view, g, part.size, budget))
    return torch.cat([linalg.covariance(op, r) for r in rows])


def _wide(view: Any, g: Tensor) -> tuple[Any, Tensor]:
    """In float32 or better: sums over a half-precision layer are not made in its precision."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    return view.to(dtype), g.to(dtype)


def _pieces(view: Any, g: Tensor, size: int, budget: int) -> Iterator[tuple[Any, Tensor]]:
    step = max(1, budget // (g.shape[0] * size * 8))
    for start in range(0, g.shape[1], step):
        index = slice(start, start + step)
        yield view.chunk(index), g[:, index]


def _joint_terms(
    tangent: TangentModel, precision: Blocks, parts: tuple[Part, ...], record: Record, x: Any, budget: int
) -> Iterator[Tensor]:
    """Each part's (n·c, n·c) term, c outputs at all positions; a layer's rows are made for a range of its outputs at a
    time."""
    f = record.f.detach()
    n, c = len(f), f[0].numel()
    u = units(f)
    gradients, views = record.pull(u), record.views()
    generic = tuple(part.name for part in parts if part.generic and part.kind != "unused")
    for part, op in zip(parts, precision.parts, strict=True):
        if part.name not in gradients:
            continue
        view, g = _wide(views[part.name], gradients[part.name])
        found = in_basis(op, part, view, g)
        if found is None:
            yield linalg.covariance(
                op, view.outer(g).flatten(2).transpose(0, 1).reshape(1, n * c, -1).to(torch.float64)
            )[0]
            continue
        view, g, inverse = found
        b, o, i = inverse.shape
        step = max(1, budget // (4 * n * c * b * i * 8))
        for start in range(0, o, step):
            rows = view.outer(g[..., start : start + step]) * inverse[:, start : start + step].sqrt()
            rows = rows.flatten(2).transpose(0, 1).reshape(n * c, -1).to(torch.float64)
            yield rows @ rows.mT
    if generic:
        rows = tangent.pulled(x, u, generic).to(torch.float64).reshape(1, n * c, -1)
        own = [(part, op) for part, op in zip(parts, precision.parts, strict=True) if part.name in generic]
        for (_, op), piece in zip(own, rows.split([part.size for part, _ in own], -1), strict=True):
            yield linalg.covariance(op, piece)[0]
