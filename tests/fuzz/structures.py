"""What each structure says of the curvature: Ĝ, dense, against the oracle's G."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from agreement import Difference, agree
from cases import Case
from generator import outputs
from oracle import cast
from torch import Tensor

import lapwing as lw
from lapwing.operators import linalg


def precision_of(la: Any) -> Tensor:
    """P̂ = Ĝ + A, dense, by products with unit vectors."""
    p = la.state.layout.size
    return linalg.mv(la.posterior.precision, torch.eye(p, dtype=torch.float64))


def exact(case: Case, la: Any, G: Tensor, found: Tensor, tolerance: float) -> None:
    agree("G is the dense curvature", found, G, tolerance)


def diagonal(case: Case, la: Any, G: Tensor, found: Tensor, tolerance: float) -> None:
    agree("diag is the diagonal", found, torch.diag(G.diagonal()), tolerance)


def blocks(case: Case, la: Any, G: Tensor, found: Tensor, tolerance: float) -> None:
    """Each entry is the dense one or zero, the diagonal is exact, and a linear head has its whole block."""
    agree("block has the exact diagonal", found.diagonal(), G.diagonal(), tolerance)
    agree("block has entries of the dense curvature, or none", found, torch.where(found == 0, 0.0, G), tolerance)
    mine = head_places(case)
    if mine is not None:
        agree("block has the head's whole block", found[mine][:, mine], G[mine][:, mine], tolerance)


def kronecker(case: Case, la: Any, G: Tensor, found: Tensor, tolerance: float) -> None:
    """A linear head, called once a row, is B ⊗ A / N; that of one example without positions is exact."""
    agree("kron is symmetric", found, found.mT, tolerance)
    if float(torch.linalg.eigvalsh(found).min()) < -tolerance * float(G.diagonal().max().clamp(min=1e-12)):
        raise Difference("kron is positive semidefinite: it is not")
    mine = head_places(case)
    if mine is None or case.factor != "exact" or case.drawn.positions:
        return
    expected = head_kronecker(case)
    if expected is not None:
        agree("kron of a linear head is B ⊗ A / N", found[mine][:, mine], expected, tolerance)


def eigen(case: Case, la: Any, G: Tensor, found: Tensor, tolerance: float) -> None:
    agree("ekfac has the exact trace", found.trace(), G.trace(), tolerance)


def low_rank(case: Case, la: Any, G: Tensor, found: Tensor, tolerance: float) -> None:
    """0 ≤ Ĝ ≤ G; all of it where the rank is enough."""
    size = float(G.diagonal().max().clamp(min=1e-12))
    for what, matrix in (("Ĝ", found), ("G − Ĝ", G - found)):
        least = float(torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT)).min())
        if least < -10 * tolerance * size:
            raise Difference(f"lowrank is between zero and the curvature: {what} has {least / size:.2g} of the largest")
    if la.state.structure.rank >= len(G):
        agree("lowrank of full rank is the dense curvature", found, G, max(1e-5, tolerance))


CURVATURES: dict[type, Callable[[Case, Any, Tensor, Tensor, float], None]] = {
    lw.curvature.Full: exact,
    lw.curvature.MatrixFree: exact,
    lw.curvature.Diagonal: diagonal,
    lw.curvature.Block: blocks,
    lw.curvature.Kronecker: kronecker,
    lw.curvature.EigenKronecker: eigen,
    lw.curvature.LowRank: low_rank,
}


def head_places(case: Case) -> Tensor | None:
    """Places of the head's weight and bias among the selected, where all of them are and nothing is behind the head."""
    start, places = 0, []
    for name, p in case.model.named_parameters():
        places += range(start, start + p.numel()) if name in ("head.weight", "head.bias") else ()
        start += p.numel()
    spot = {int(place): i for i, place in enumerate(case.chosen)}
    if any(place not in spot for place in places):
        return None
    return torch.tensor([spot[place] for place in places])


def head_kronecker(case: Case) -> Tensor | None:
    """B ⊗ A / N of the head, from its inputs (by a hook) and Λ pulled through what is behind it (by its bias)."""
    head = case.plain.head
    if head.bias is None:
        return None
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, out: seen.append(args[0].detach()))
    try:
        outputs(case.plain, cast(case.inputs))
    finally:
        handle.remove()
    f, J, y = case.dense.rows
    mine = head_places(case)
    assert mine is not None
    g = J[..., mine[-len(head.bias) :]]  # (n, c, o)
    curvature = torch.stack([case.observation.curvature(a, b) for a, b in zip(f, y, strict=True)])
    there = curvature.flatten(1).abs().sum(1) > 0
    if not bool(there.any()):
        return torch.zeros(len(mine), len(mine), dtype=torch.float64)
    a = torch.cat([seen[0], torch.ones(len(f), 1, dtype=torch.float64)], -1)[there]
    B = torch.einsum("nao,nab,nbq->oq", g, curvature, g)
    whole = torch.kron(B, a.mT @ a) / len(a)  # weight and bias of a unit side by side
    o, i = head.weight.shape
    order = torch.cat(
        [torch.arange(o * (i + 1)).reshape(o, i + 1)[:, :i].reshape(-1), (torch.arange(o) + 1) * (i + 1) - 1]
    )
    return whole[order][:, order]
