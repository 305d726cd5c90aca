"""The curvature of a network over data, as sums that add.

    state(A ∪ B) = state(A) + state(B)

`sums` hold what the structure accumulates, `statistics` what the likelihood needs to say how well the network
fits; both add. `basis`, for sums in an eigenbasis only, does not add but must agree. `batches`, for the dual form
only, are inputs with their cotangents; they concatenate, so a dual state holds data. No sum depends on the prior, nor
on the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lapwing.curvature.factor import Factor
from lapwing.curvature.parts import Part
from lapwing.curvature.structure import Structure
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.likelihoods import polarization
from lapwing.operators.memo import Grouping
from lapwing.tangent import TangentModel
from lapwing.tree import Layout

SAME = 1e-4  # how far sums over the same data may be apart, relative
M = TypeVar("M")


@dataclass(eq=False)
class Memo:
    """What follows from a state, made on demand and once; each thing has a name and an owner, who alone writes it. A
    pickle or a copy has none of it, and makes it again."""

    own: Any = None  # the structure's, in a class of its own: State.factorizations
    scatter: tuple[Grouping, Tensor] | None = None  # ‖θ_g − m_g‖² of the last prior's groups, (g,): evidence.py
    jacobian: Any = None  # J over the data, where its rows fit the memory budget: api.py
    said_dropped: bool = False  # whether a warning has named the weights that a g-prior drops: posterior.py

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


@dataclass(frozen=True, eq=False)
class State:
    """What a pass over the data has summed; it depends on neither prior nor noise."""

    structure: Structure
    factor: Factor
    likelihood: str  # its name
    terms: int  # h: how many curvature weights the likelihood has, and sums G_h
    tangent: TangentModel
    fingerprints: dict[str, str]  # of every weight and buffer of the network
    n: int  # examples
    statistics: dict[str, Tensor]
    sums: dict[str, Tensor]
    basis: dict[str, Tensor] = field(default_factory=dict)  # of the sums, where they need one; never written to
    parts: tuple[Part, ...] = ()  # of structures that treat the network part by part
    batches: tuple[tuple[Any, Tensor], ...] = ()  # (inputs, cotangents (n, K, ..., c))
    coverage: dict[str, str] = field(default_factory=dict)  # how each parameter is treated; never written to
    source: Any = None  # of products over the data, for the matrix-free form only; never saved
    targets: int | None = None  # a digest of what was fitted to, in any order; None where it is not known
    inputs: Tensor | None = None  # sums over the inputs (fixed.py), by which another pass is known; None: not known
    paired: bool = False  # whether those weights are of outputs and of pairs of them (likelihoods/polarization.py)
    lost: float = 0.0  # decimal digits that cancelled when data were taken out, at the most
    memo: Memo = field(default_factory=Memo)

    @property
    def layout(self) -> Layout:
        """The layout of the parameters."""
        return self.tangent.layout

    @property
    def unit_weights(self) -> Tensor:
        """The curvature weights of unit noise, (h,)."""
        ones = torch.ones(self.terms, dtype=torch.float64, device=self.tangent.device)
        return polarization.weights_of(torch.eye(polarization.outputs(self.terms)).to(ones)) if self.paired else ones

    @property
    def holds_data(self) -> bool:
        """Whether it keeps the data themselves, as the dual form does."""
        return bool(self.batches)

    @property
    def eps(self) -> float:
        """Of what is summed: of the network's dtype, whatever that of the sums."""
        return torch.finfo(self.tangent.dtype).eps

    @property
    def digits(self) -> float:
        """Decimal digits that its sums are good to, after what removals have cost."""
        return -math.log10(self.eps) - self.lost

    def factorizations(self, kind: type[M]) -> M:
        """What its structure keeps of it, in that structure's own class: all its operators share it."""
        if not isinstance(self.memo.own, kind):
            self.memo.own = kind()
        return self.memo.own

    def belongs(self, other: State, verb: str = "add") -> None:
        """Raise unless the sums of both are of the same kind, at the same weights."""
        for what, mine, theirs in [
            ("structures", self.structure, other.structure),
            ("output factors", self.factor, other.factor),
            ("treatments of parameters", self.parts, other.parts),
            ("likelihoods", (self.likelihood, self.terms), (other.likelihood, other.terms)),
        ]:
            if mine != theirs:
                raise InvalidValue(f"states of different {what} do not {verb}: {mine} and {theirs}")
        if not self.layout.same_as(other.layout):
            raise InvalidValue(f"states over different parameters do not {verb}; use the same network and subset")
        differ = [n for n in self.fingerprints if self.fingerprints[n] != other.fingerprints.get(n)]
        if differ:
            raise InvalidValue(f"states at different weights do not {verb}; {differ[0]} differs")
        if not all(torch.equal(u, other.basis[key]) for key, u in self.basis.items()):
            raise InvalidValue(
                f"states in different eigenbases do not {verb}; accumulate both in one: accumulate({self.structure}, "
                "..., basis=state), with a state of 'ekfac' or of 'kron' over all the data"
            )

    def __add__(self, other: State) -> State:
        self.belongs(other)
        return replace(
            self,
            n=self.n + other.n,
            statistics={k: v + other.statistics[k] for k, v in self.statistics.items()},
            sums={k: v + other.sums[k] for k, v in self.sums.items()},
            batches=self.batches + other.batches,
            source=None if self.source is None or other.source is None else self.source + other.source,
            targets=None if self.targets is None or other.targets is None else (self.targets + other.targets) % 2**64,
            inputs=None if self.inputs is None or other.inputs is None else self.inputs + other.inputs,
            lost=max(self.lost, other.lost),
            memo=Memo(),
        )

    def __repr__(self) -> str:
        size = sum(t.numel() * t.element_size() for t in (*self.sums.values(), *self.basis.values()))
        data = ", holds its data" if self.holds_data else ""
        what = f"{self.structure}, factor={self.factor}, n={self.n}, p={self.layout.size}"
        return f"State({what}, {size / 1e6:.3g} MB{data})"


def merged(state: State, ranks: Ranks) -> State:
    """The state over the data of all ranks, each of which comes with that over its own; the same on every rank."""
    if ranks.alone:
        return state
    what = f"merging states of {state.structure}"
    held = {kind: {k: (v.shape, v.dtype, bool(v.any())) for k, v in tensors.items()} for kind, tensors in _sums(state)}
    shares = ranks.gather((state.n, state.targets, state.inputs, held), f"{what} with {state.parts}")
    full = {kind: _filled(tensors, [one[kind] for *_, one in shares], state) for kind, tensors in _sums(state)}
    targets, inputs = [one for _, one, _, _ in shares], [one for _, _, one, _ in shares]
    return replace(
        state,
        n=sum(n for n, *_ in shares),
        statistics=ranks.totals(full["statistics"], what),
        sums=ranks.totals(full["sums"], what),
        batches=tuple(ranks.joined(state.batches, what)) if any(ranks.gather(state.holds_data)) else (),
        targets=None if None in targets else sum(targets) % 2**64,
        inputs=None if any(one is None for one in inputs) else torch.stack(inputs).sum(0),
    )


def _sums(state: State) -> tuple[tuple[str, dict[str, Tensor]], ...]:
    return ("sums", state.sums), ("statistics", state.statistics)


def _filled(mine: dict[str, Tensor], shapes: list[dict[str, Any]], state: State) -> dict[str, Tensor]:
    """A rank's sums, with zeros in the others' shape where it saw no data for them."""
    out = {}
    for key in dict.fromkeys(key for shape in shapes for key in shape):
        known = [shape[key] for shape in shapes if key in shape]
        size, dtype, _ = max(known, key=lambda one: one[2])  # the first that is not zero
        empty = key not in mine or not bool(mine[key].any())
        out[key] = torch.zeros(size, dtype=dtype, device=state.tangent.device) if empty else mine[key]
    return out


def differing(found: dict[str, Tensor], fitted: dict[str, Tensor]) -> str:
    """The first of the fit's statistics that another pass over its data should have given and did not, or ""."""
    size = sizes(fitted)
    for key, value in fitted.items():
        if not torch.allclose(found[key], value, rtol=SAME, atol=SAME * float(size[key].max())):
            return key
    return ""


def sizes(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """What rounding of statistics is relative to: their size, or √(N Σy²) where terms of both signs cancel, as those of
    standardized targets do."""
    out = {key: value.abs() for key, value in statistics.items()}
    if {"sum", "count", "square"} <= statistics.keys():
        out["sum"] = (statistics["count"] * statistics["square"]).abs().sqrt()
    return out
