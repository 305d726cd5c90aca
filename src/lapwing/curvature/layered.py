"""Structures that treat the network part by part: kron, block and diag, through one accumulator.

    Kronecker   linear maps by Kronecker factors; scales of normalization layers by their exact block
    Block       the exact dense block of every part
    Diagonal    the exact diagonal

They differ only in which kind of sum a part gets (`kind_of`); a parameter that no rule speaks for gets an exact
block if it is small, else its exact diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import registry
from lapwing.curvature.capture import Capture
from lapwing.curvature.cost import Needs, Task, of_parts
from lapwing.curvature.cover import cover, explain
from lapwing.curvature.factor import Factor
from lapwing.curvature.parts import Part, check_parts
from lapwing.curvature.state import State
from lapwing.curvature.structure import BUDGET, Accumulator, Kept, Probe, Structure
from lapwing.curvature.sums import DenseSum, DiagonalSum, KroneckerSum, PartSum, Room, expected
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import Blocks, Dense, KroneckerPlusDiagonal, linalg
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.operators.memo import BlockGroups, KroneckerFactors
from lapwing.packing import Expected
from lapwing.tangent import TangentModel
from lapwing.tree import Layout

SMALL = 1024  # parameters of a generic or element-wise part that still gets a dense block
ROUNDING = 1e3  # units in the last place of a gradient
Tensors = Mapping[str, Tensor]
NO_BASIS: Tensors = {}
MAX_SIDE = 8192  # rows of a Kronecker factor; a layer with more (a head over a vocabulary) gets its exact diagonal


@dataclass(eq=False)
class PartMemo:
    """What is kept of one part: its sums in the dtype of the weights, and the factorizations of its block."""

    cast: dict[str, Tensor] = field(default_factory=dict)  # by the name of the sum
    factorizations: KroneckerFactors = field(default_factory=KroneckerFactors)


@dataclass(eq=False)
class LayeredMemo:
    """What is kept of a state that treats the network part by part."""

    index: tuple[Tensor, ...] | None = None  # of each part's entries
    groups: BlockGroups = field(default_factory=BlockGroups)
    parts: dict[str, PartMemo] = field(default_factory=dict)  # by the part's name, and nothing else
    largest: Tensor | None = None  # entry of all B_h, (h,)

    def part(self, name: str) -> PartMemo:
        """That of one part."""
        return self.parts.setdefault(name, PartMemo())


@dataclass(frozen=True)
class Layered(Structure):
    """What the three structures share."""

    sharing = "expand"  # over shared positions, of Kronecker factors
    memory_budget: int = field(default=BUDGET, compare=False)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        registry.enter("structure", cls)

    def kind_of(self, part: Part) -> str:
        """How a part is treated: "kron", "dense" or "diagonal"."""
        raise NotImplementedError

    def resolved(self, probe: Probe, factor: Factor) -> Layered:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        if factor.kind == "hessian":
            raise InvalidValue(f"factor='hessian' needs structure='full'; use factor='exact' with '{self}'")
        return self

    def parts(self, tangent: TangentModel, x: Any) -> tuple[Part, ...]:
        """The parts of the network, and how each is treated."""

        def treated(part: Part) -> Part:
            return part if part.kind == "unused" else replace(part, kind=self.kind_of(part), reason=self.why(part))

        return tuple(map(treated, cover(tangent, x)))

    def why(self, part: Part) -> str:
        """Why a part is treated as it is, where that is not plain from its rule."""
        return part.reason

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        return LayeredSum(tangent, self.parts(tangent, probe.inputs), probe.terms, self)

    def summed(self, part: Part, terms: int, tangent: TangentModel, room: Room, basis: Tensors) -> PartSum:
        """What sums over the data for a part, by its kind; room: memory that parts share; basis: of a second pass."""
        if part.kind == "kron":
            return KroneckerSum(part, terms, tangent, self.sharing, self.uncoupled(part))
        return DenseSum(part, terms, tangent) if part.kind == "dense" else DiagonalSum(part, terms, tangent, room)

    def uncoupled(self, part: Part) -> bool:
        """Whether the bias of a part is kept apart from its weight."""
        return False

    def operator(self, state: State, weights: Tensor) -> Blocks:
        """Σ_h w_h G_h as an operator, for curvature weights w (h,)."""
        memo = state.factorizations(LayeredMemo)
        if memo.index is None:
            memo.index = tuple(p.index(state.layout).to(weights.device) for p in state.parts)
        return Blocks(tuple(self.block(part, state, weights) for part in state.parts), memo.index, memo.groups)

    def block(self, part: Part, state: State, weights: Tensor) -> linalg.Operator:
        """The operator of one part."""
        return part_operator(part, state, weights)

    def keeps(self, layout: Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        check_parts(parts, layout)
        for part in parts:
            if part.kind not in ("unused", self.kind_of(part)):
                raise InvalidValue(f"its part {part.name} is {part.kind}, and {self} makes it {self.kind_of(part)}")
        return {f"{part.name}/{key}": one for part in parts for key, one in self.sums(part, terms).items()}, {}

    def sums(self, part: Part, terms: int) -> dict[str, Expected]:
        """What is summed for a part, by its name."""
        return expected(part, terms)

    def coverage(self, state_parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return {n: explain(part, tangent.model) for part in state_parts for n in part.parameters}

    def needs(self, task: Task) -> Needs:
        """What it takes, counted (cost.py)."""
        return of_parts(task, self.kind_of)


@dataclass(frozen=True)
class Kronecker(Layered):
    """One Kronecker product A ⊗ B a layer; small parts that no rule speaks for get a dense block, large ones a
    diagonal."""

    samples_past: ClassVar[int | None] = 20_000  # then a sampled entry is off by 1 %, and factors are by far more
    sharing: str = "expand"  # over shared positions: "expand" or "reduce"
    bias: str = "joint"  # one block with its weight, or "apart": without the products of the two

    def __post_init__(self) -> None:
        if self.memory_budget in ("expand", "reduce"):  # the first argument, meant for the second
            name = type(self).__name__
            raise InvalidValue(
                f"memory_budget, the first argument of {name}, is a number of bytes; got {self.memory_budget!r}: say "
                f"{name}(sharing={self.memory_budget!r})"
            )
        super().__post_init__()
        if self.sharing not in ("expand", "reduce"):
            raise InvalidValue(f"sharing must be 'expand' or 'reduce', got {self.sharing!r}")
        if self.bias not in ("joint", "apart"):
            raise InvalidValue(f"bias must be 'joint' or 'apart', got {self.bias!r}")

    def __str__(self) -> str:
        choices = ["reduce"] * (self.sharing == "reduce") + ["bias apart"] * (self.bias == "apart")
        return f"kron ({', '.join(choices)})" if choices else "kron"

    def uncoupled(self, part: Part) -> bool:
        return self.bias == "apart" and part.weight is not None and part.bias is not None

    def kind_of(self, part: Part) -> str:
        elementwise = part.shape[1] == 1 and part.shape[0] > 1 and part.shape[2] <= 2
        if part.generic or elementwise:
            return "dense" if part.size <= SMALL else "diagonal"
        return "diagonal" if self._long(part) else "kron"

    def why(self, part: Part) -> str:
        if part.generic or not self._long(part):
            return part.reason
        return f"a Kronecker factor of {max(part.shape[1:]):,} rows is too long"

    def _long(self, part: Part) -> bool:
        """Whether a Kronecker factor has too long a side; that of one-hot inputs is kept as their counts."""
        _, o, i = part.shape
        return o > MAX_SIDE or (i > MAX_SIDE and not self.one_hot(part))

    def one_hot(self, part: Part) -> bool:
        """Whether inputs can be rows of the identity, of which counts are kept."""
        return part.transposed and not part.site and part.kernel == 1 and self.sharing == "expand"

    def sums(self, part: Part, terms: int) -> dict[str, Expected]:
        found = expected(part, terms)
        if "A" in found and not self.one_hot(part):
            found["A"] = replace(found["A"], shapes=found["A"].shapes[:1])
        return found


@dataclass(frozen=True)
class Block(Layered):
    """One dense block a layer."""

    bound: ClassVar[str] = "lower"

    def __str__(self) -> str:
        return "block"

    def kind_of(self, part: Part) -> str:
        if part.size**2 * 16 > 2**37:
            raise InvalidValue(
                f"structure='block' needs a {part.size} x {part.size} matrix for {part.name}; use 'kron' or 'diag'"
            )
        return "dense"

    def needs(self, task: Task) -> Needs:
        return of_parts(task, lambda part: "dense")  # of what is too large, too


@dataclass(frozen=True)
class Diagonal(Layered):
    """The exact diagonal."""

    bound: ClassVar[str] = "lower"
    diagonal: ClassVar[bool] = True

    def __str__(self) -> str:
        return "diag"

    def kind_of(self, part: Part) -> str:
        return "diagonal"


def part_operator(part: Part, state: State, weights: Tensor) -> linalg.Operator:
    """Σ_h w_h of what was summed for one part, as an operator."""
    memo = state.factorizations(LayeredMemo).part(part.name)

    def stored(key: str) -> Tensor:
        """Cast once: every evaluation of the evidence asks for it."""
        kept = memo.cast.get(key)
        if kept is None or kept.dtype != weights.dtype or kept.device != weights.device:
            kept = memo.cast[key] = state.sums[f"{part.name}/{key}"].to(weights)
        return kept

    if part.kind == "kron":
        b = stored("B")
        mixed = b[0] if len(weights) == 1 else torch.einsum("h,hboq->boq", weights, b)
        s = (weights[0] if len(weights) == 1 else weights.new_ones(())) / stored("count").clamp(min=1)
        eps = torch.finfo(state.tangent.sum_dtype).eps
        kept = memo.factorizations if len(weights) == 1 else KroneckerFactors()
        a = state.sums[f"{part.name}/A"].to(weights.device) if len(weights) == 1 else stored("A")
        rounding = _rounding(state, weights, b, stored("count"), eps) if state.paired else 0.0
        apart = isinstance(state.structure, Layered) and state.structure.uncoupled(part)
        return KroneckerPlusDiagonal(a, mixed, s, name=part.name, eps=eps, rounding=rounding, apart=apart, memo=kept)
    if part.kind == "dense":
        gram = stored("gram")
        if len(weights) == 1:
            return Dense(gram[0], weights[0], memo=memo.factorizations)
        return Dense(torch.einsum("h,hab->ab", weights, gram))
    if part.kind == "diagonal":
        return DiagonalOperator(never_negative(weights @ stored("diagonal"), state), part.size)
    return DiagonalOperator(weights.new_zeros(part.size), part.size)


def never_negative(sums: Tensor, state: State) -> Tensor:
    """Σ_h w_h v_h of sums of squares v_h. Weights of pairs have both signs, but are those of a positive definite
    matrix, so what is below zero is rounding."""
    return sums.clamp(min=0) if state.paired else sums


def _rounding(state: State, weights: Tensor, b: Tensor, count: Tensor, eps: float) -> float:
    """What rounding may make of an eigenvalue of Σ_h w_h B_h, whose terms cancel where weights have both signs.

    A gradient that is zero but for rounding (that of keys in attention, summed over positions) gives a B that is all
    rounding: ε times the gradients it came from, squared. Those are of the size of other layers', or of the cotangents,
    which are 1 at unit noise."""
    memo = state.factorizations(LayeredMemo)
    if memo.largest is None:
        found = [_largest(state.sums[f"{part.name}/B"]) for part in state.parts if part.kind == "kron"]
        memo.largest = torch.stack(found).amax(0)
    w = weights.detach().abs()
    own, others = (float(w @ size.to(w)) for size in (_largest(b), memo.largest))
    return 100 * b.shape[-1] * eps * own + (ROUNDING * eps) ** 2 * (others + float(w.sum() * count))


def _largest(b: Tensor) -> Tensor:
    """The largest entry of each B_h, (h,)."""
    return b.abs().flatten(1).amax(1)


class LayeredSum(Accumulator):
    """One capture a batch; each part's sum takes what it needs of it."""

    mutable = ("sums",)

    def __init__(
        self, tangent: TangentModel, parts: tuple[Part, ...], terms: int, structure: Layered, basis: Tensors = NO_BASIS
    ) -> None:
        self.tangent, self.parts, self.terms, self.basis = tangent, parts, terms, basis
        self.budget = structure.memory_budget
        self.capture = Capture(tangent, parts)
        self.generic = tuple(part for part in parts if part.generic and part.kind != "unused")
        seen, room = (part for part in parts if part.kind != "unused"), Room()
        self.sums: dict[str, Any] = {part.name: structure.summed(part, terms, tangent, room, basis) for part in seen}

    def forward(self, x: Any) -> Tensor:
        """The outputs f (n, ..., c) of a batch."""
        self.record = self.capture.run(x)
        return self.record.f.detach()

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add a batch: inputs x, targets y, outputs f (n, ..., c), cotangents u (n, K, ..., c) and the output of
        each column."""
        called = self.record.called
        kept = {part.name: self.sums[part.name].see(self.record.view(part), len(f)) for part in called}
        for gradients in self.record.columns(u, self.terms, self.budget // 4):
            for name, g in gradients.items():
                self.sums[name].add(kept[name], g, self.budget // 4)
        for name, view in kept.items():
            self.sums[name].close(view)
        self._observe_generic(x, u.to(f))
        del self.record

    def _observe_generic(self, x: Any, u: Tensor) -> None:
        if not self.generic:
            return
        names = tuple(part.name for part in self.generic)
        sizes = [part.size for part in self.generic]
        each = u.shape[1] * sum(sizes) * u.element_size()
        for piece, cotangent in self.tangent.pieces(x, u, self.budget // 4 // max(1, each)):
            rows = self.tangent.pulled(piece, cotangent, names).transpose(0, 1)  # (K, n, p)
            for name, own in zip(names, rows.split(sizes, -1), strict=True):
                self.sums[name].add_rows(own)

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        """The sums by their names, and the batches that are kept."""
        return {f"{name}/{key}": v for name, s in self.sums.items() for key, v in s.result().items()}, ()


def pretend_factorized(state: State) -> None:
    """Give Kronecker factors the eigenvectors of the identity, which cost as much to use and nothing to find."""
    for part in state.parts:
        if f"{part.name}/A" in state.sums:
            a, b = state.sums[f"{part.name}/A"], state.sums[f"{part.name}/B"][0]
            ones = [torch.ones(t.shape[0], t.shape[-1], dtype=torch.float64, device=b.device) for t in (a, b)]
            eyes = [torch.diag_embed(one) for one in ones]
            vectors = ones[0], None if a.ndim == 2 else eyes[0], ones[1], eyes[1]
            kept = state.factorizations(LayeredMemo).part(part.name).factorizations
            kept.spectrum(None).eigenvectors = vectors
