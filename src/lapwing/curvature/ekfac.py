"""EKFAC: exact second moments in the Kronecker eigenbasis, by two passes over the data.

The first pass sums Kronecker factors, whose eigenvectors are U = U_B ⊗ U_A; the second sums, in that basis,

    v[b, o, i] = Σ_n Σ_k ( Σ_s g̃[k, n, s, b, o] ã[n, s, b, i] )²,       g̃ = U_Bᵀ g,  ã = U_Aᵀ a                 Eq. 14b

so that v = diag(Uᵀ H U) and H ≈ U diag(v) Uᵀ: of all matrices with these eigenvectors the nearest to H in Frobenius
norm, hence never further than KFAC. Sums add only in a shared basis, which the state keeps: accumulate(..., basis=...).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.cost import Needs, Task
from lapwing.curvature.factor import Factor
from lapwing.curvature.layered import Kronecker, LayeredSum, Tensors, never_negative
from lapwing.curvature.parts import Part
from lapwing.curvature.rules import DenseInputs
from lapwing.curvature.state import State
from lapwing.curvature.structure import Accumulator, Kept, Probe, same_terms
from lapwing.curvature.sums import PartSum, Room, by_weight
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import EigenPlusDiagonal, KroneckerPlusDiagonal, linalg
from lapwing.packing import Expected
from lapwing.tangent import TangentModel
from lapwing.tree import Layout


@dataclass(frozen=True)
class EigenKronecker(Kronecker):
    """Parts that Kronecker factors would treat get exact second moments in their eigenbasis; the others stay.

    The basis is that of the factors at the likelihood's noise in the first pass; the sums depend on no noise."""

    def __str__(self) -> str:
        return super().__str__().replace("kron", "ekfac")

    @property
    def first(self) -> Kronecker:
        """The structure of the first pass."""
        return Kronecker(self.memory_budget, self.sharing, self.bias)

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        raise InvalidValue("the second pass of ekfac needs a basis; accumulate makes one, or takes basis=")

    def start_in(
        self, basis: State, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe
    ) -> Accumulator:
        parts = self.parts(tangent, probe.inputs)
        weights = likelihood.curvature_weights(factor.kind).to(tangent.device)
        return LayeredSum(tangent, parts, len(weights), self, eigenbasis(basis, parts, self, weights))

    def summed(self, part: Part, terms: int, tangent: TangentModel, room: Room, basis: Tensors) -> PartSum:
        if part.kind != "kron":
            return super().summed(part, terms, tangent, room, basis)
        ua, ub = basis.get(f"{part.name}/UA"), basis[f"{part.name}/UB"]
        return SecondMoments(part, terms, ua, ub, tangent.sum_dtype)

    def block(self, part: Part, state: State, weights: Tensor) -> linalg.Operator:
        if part.kind != "kron":
            return super().block(part, state, weights)
        values = never_negative(torch.einsum("h,hboi->boi", weights, state.sums[f"{part.name}/values"]), state)
        ua, ub = state.basis.get(f"{part.name}/UA"), state.basis[f"{part.name}/UB"]
        return EigenPlusDiagonal(values, ua, ub, name=part.name)

    def keeps(self, layout: Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept:
        sums, _ = super().keeps(layout, parts, terms, factor)
        basis = {}
        for part in (part for part in parts if part.kind == "kron"):
            b, o, i = part.shape
            basis[f"{part.name}/UB"] = Expected(((b, o, o),), orthonormal=True)
            basis[f"{part.name}/UA"] = Expected(((b, i, i),), orthonormal=True, optional=self.one_hot(part))
        return sums, basis

    def sums(self, part: Part, terms: int) -> dict[str, Expected]:
        if part.kind == "kron":
            return {"values": Expected(((terms, *part.shape),), squares=True)}
        return super().sums(part, terms)

    def coverage(self, state_parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        said = super().coverage(state_parts, tangent)
        turned = [n for part in state_parts if part.kind == "kron" for n in part.parameters]
        return said | {n: said[n].replace("Kronecker", "diagonal in the Kronecker eigenbasis", 1) for n in turned}

    def needs(self, task: Task) -> Needs:
        one = super().needs(task)
        return replace(one, fit=one.fit * 2, passes=2, note="diagonal in the Kronecker eigenbasis")


def eigenbasis(state: State, parts: tuple[Part, ...], like: Kronecker, weights: Tensor) -> dict[str, Tensor]:
    """{part/UA: (b, i, i), part/UB: (b, o, o)} of a state of Kronecker factors, or that of an ekfac state; no UA where
    it is the identity (embeddings)."""
    if not isinstance(state, State) or not isinstance(state.structure, Kronecker):
        raise InvalidValue(f"basis must be a state of structure 'ekfac' or 'kron', got {state!r}")
    own = state.structure
    if (own.sharing, own.bias, state.parts) != (like.sharing, like.bias, parts):
        raise InvalidValue(
            f"the basis ({own}) treats parameters in another way; give one of the same network, subset and "
            f"sharing={like.sharing!r}, bias={like.bias!r}"
        )
    if state.basis:
        return {key: u.to(weights.device) for key, u in state.basis.items()}
    same_terms(state.terms, len(weights))
    basis = {}
    for part, op in zip(parts, state.structure.operator(state, weights).parts, strict=True):
        if isinstance(op, KroneckerPlusDiagonal):
            _, ua, _, ub = op.decomposition
            basis[f"{part.name}/UB"] = ub.contiguous()  # as from a file, so that what is loaded rounds alike
            if ua is not None:
                basis[f"{part.name}/UA"] = ua.contiguous()
    return basis


class SecondMoments(PartSum):
    """v (h, b, o, i) of one part, one sum a curvature weight, at unit scale."""

    mutable = ("total",)

    def __init__(self, part: Part, terms: int, ua: Tensor | None, ub: Tensor, dtype: torch.dtype) -> None:
        self.ua, self.ub = None if ua is None else ua.to(dtype), ub.to(dtype)
        self.total = torch.zeros(terms, *part.shape, dtype=torch.float64, device=ub.device)

    def see(self, view: Any, n: int) -> Any:
        """Inputs in the basis U_A."""
        if isinstance(view, DenseInputs):
            view = DenseInputs(view.a.to(self.ub))
        return view.rotated(self.ua)

    def add(self, view: Any, g: Tensor, budget: int) -> None:
        """Inputs were turned in `see`; output gradients are turned here."""
        g = torch.einsum("knsbo,boq->knsbq", g.to(self.ub), self.ub)
        for piece, part_g, outputs in self._pieces(view, g, budget):
            for total, mine in zip(self.total, by_weight(part_g, len(self.total)), strict=True):
                total[:, outputs] += piece.squares(mine)

    def _pieces(self, view: Any, g: Tensor, budget: int) -> Iterator[tuple[Any, Tensor, slice]]:
        """Pieces of examples, and of outputs where one example is too large, whose gradients stay within the budget;
        all at once where none is formed, without shared positions."""
        _, b, o, i = self.total.shape
        each = g.shape[0] * b * i * g.element_size() if view.positions > 1 else 0  # of an example and an output
        outputs = min(o, max(1, budget // max(1, each)))
        step = max(1, budget // max(1, each * outputs))
        for start in range(0, g.shape[1], step):
            index = slice(start, start + step)
            for first in range(0, o, outputs):
                some = slice(first, first + outputs)
                yield view.chunk(index), g[:, index][..., some], some

    def result(self) -> dict[str, Tensor]:
        """What was summed: values (h, b, o, i)."""
        return {"values": self.total.clamp_(min=0)}  # sums of squares: what is below 0 is rounding (repeated tokens)
