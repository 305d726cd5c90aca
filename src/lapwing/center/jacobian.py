"""J over all the data of a fit, as products: J v is (m, c) and Jᵀu is (p,), for m rows of outputs, one a position.

The data are read once (`read`): outputs and targets stay in memory, J itself as rows where they fit; of a last layer
that nothing follows as that layer's inputs (`Head`), whatever is before it; else it is known by passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import fixed
from lapwing.curvature import BUDGET, State
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.capture import Record
from lapwing.curvature.cover import cover
from lapwing.curvature.rows import RowMaker
from lapwing.curvature.state import differing
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.operators import OuterRows
from lapwing.tangent import TangentModel
from lapwing.tangent.rows import units

HELD_ROWS_BYTES = 2**28  # of rows, for one output, up to which they are kept


@dataclass(frozen=True, eq=False)
class Head:
    """J of a last layer, f = W a: at the columns `index` it is I ⊗ a."""

    index: Tensor  # where W (c, i), row-major, stands among the parameters, (c·i,)
    a: Tensor  # (m, i), float64

    def push(self, v: Tensor) -> Tensor:
        """J v = V a, (p,) -> (m, c)."""
        return self.a @ v[self.index].reshape(-1, self.a.shape[1]).mT

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu = Σ u ⊗ a, (m, c) -> (p,)."""
        return self._placed(u.mT @ self.a)

    def column_squares(self) -> Tensor:
        """diag JᵀJ, (p,)."""
        outputs = len(self.index) // self.a.shape[1]
        return self._placed(self.a.square().sum(0).expand(outputs, -1))

    def gram(self, root: Tensor) -> Tensor:
        """Σ (S Sᵀ) ⊗ a aᵀ for roots S (m, c, q), (p, p), made of HELD_ROWS_BYTES of rows at a time."""
        p = len(self.index)
        found, step = self.a.new_zeros(p, p), max(1, HELD_ROWS_BYTES // (8 * p * root.shape[2]))
        for S, a in zip(root.split(step), self.a.split(step), strict=True):
            rows = torch.einsum("mcq,mi->mqci", S, a).reshape(-1, p)
            found += rows.mT @ rows
        out = torch.empty_like(found)
        out[self.index[:, None], self.index] = found
        return out

    def _placed(self, matrix: Tensor) -> Tensor:
        out = matrix.new_zeros(len(self.index))
        out[self.index] = matrix.reshape(-1)
        return out


@dataclass(frozen=True, eq=False)
class Jacobian:
    """J of all the data. Where they are spread over ranks, each rank has its own rows of f and of J v; sums over rows
    are sums over ranks."""

    tangent: TangentModel
    batches: Iterable[Any]
    f: Tensor  # (m, c), float64: one row a position
    y: Tensor
    shapes: tuple[torch.Size, ...]  # of the outputs of each batch
    rows: Tensor | None  # (m·c, p), float64
    head: Head | None = None  # where rows are not held
    constant: Tensor | None = None  # c (c,), where f is that of a process with a constant prior mean (`process.py`)
    counter: Counter[str] = field(default_factory=Counter)  # of passes so far; it counts as the data are read

    @property
    def passes(self) -> int:
        """Passes over the data so far."""
        return self.counter["passes"]

    @property
    def ranks(self) -> Ranks:
        """The processes that share the data."""
        return loading.ranks_of(self.batches)

    @cached_property
    def counts(self) -> list[int]:
        """m·c of each rank."""
        return self.ranks.gather(self.f.numel(), "the number of outputs")

    def total(self, *sums: Tensor) -> list[Tensor]:
        """Sums over this rank's rows as sums over all."""
        return self.ranks.total(sums, "the tangent map")

    @property
    def held(self) -> bool:
        """Whether products with J are in float64 and take no pass over the data."""
        return self.rows is not None or self.head is not None

    @property
    def eps(self) -> float:
        """Of the numbers that products with J are made in."""
        return torch.finfo(torch.float64 if self.held else self.tangent.dtype).eps

    def push(self, v: Tensor) -> Tensor:
        """J v, (p,) -> (m, c)."""
        if self.rows is not None:
            return (self.rows @ v).reshape(self.f.shape)
        if self.head is not None:
            return self.head.push(v)
        v = self.ranks.same(v, "directions of the tangent map")
        with self.ranks.sharing_errors("a pass of the tangent map"):
            return torch.cat([self.f[:0], *(self._push(x, v) for x, _, _ in self._each())])

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu, (m, c) -> (p,)."""
        if self.rows is not None:
            return self.total(u.reshape(-1) @ self.rows)[0]
        if self.head is not None:
            return self.total(self.head.pull(u))[0]
        pulled = torch.zeros(self.tangent.layout.size, dtype=torch.float64, device=self.f.device)
        with self.ranks.sharing_errors("a pass of the tangent map"):
            for x, index, shape in self._each():
                pulled += self._pull(x, u[index], shape)
        return self.total(pulled)[0]

    def statistics(self, likelihood: Likelihood, z: Tensor, state: State) -> dict[str, Tensor]:
        """The likelihood's sums at outputs z, (m, c)."""
        none = {key: torch.zeros_like(value) for key, value in state.statistics.items()}
        return self.ranks.totals(likelihood.statistics(z, self.y) if len(z) else none, "statistics")

    def column_squares(self, probes: int = 4) -> Tensor:
        """diag JᵀJ, (p,): exact where J is held, else an estimate with random signs, E(Jᵀε)² = diag JᵀJ."""
        if self.rows is not None:
            return self.total(torch.einsum("rp,rp->p", self.rows, self.rows))[0]
        if self.head is not None:
            return self.total(self.head.column_squares())[0]
        generator = self.ranks.own(torch.Generator().manual_seed(0))
        squares = torch.zeros(self.tangent.layout.size, dtype=torch.float64, device=self.f.device)
        with self.ranks.sharing_errors("a pass of the tangent map"):
            for x, _, shape in self._each():
                signs = torch.randint(0, 2, (probes, *shape), generator=generator).to(self.f) * 2 - 1
                squares += self.tangent.vjps(x, signs).to(squares).square().mean(0)
        return self.total(squares)[0]

    def _push(self, x: Any, v: Tensor) -> Tensor:
        out = self.tangent.jvps(x, v.unsqueeze(0))[1][0].detach()
        return out.reshape(-1, out.shape[-1]).to(torch.float64)

    def _pull(self, x: Any, u: Tensor, shape: torch.Size) -> Tensor:
        return self.tangent.vjps(x, u.reshape(1, *shape))[0].to(torch.float64)

    def _each(self) -> Iterator[tuple[Any, slice, torch.Size]]:
        """The batches again, with the rows of f that are theirs; another order, or other data, is an error."""
        self.counter["passes"] += 1
        start, shapes = 0, iter(self.shapes)
        for x, y in loading.passes(self.batches, self.tangent.device, label="tangent map"):
            shape = next(shapes, torch.Size((0, 1)))
            index = slice(start, start + shape[:-1].numel())
            held = self.y[index]
            if y.numel() != held.numel() or not torch.equal(y.reshape(held.shape), held):
                raise InvalidValue(
                    "the data gave other targets, or another order of them, in another pass; the tangent center reads "
                    "them several times: give a loader that does the same in every pass (shuffle=False)"
                )
            yield x, index, shape
            start = index.stop
        if start != len(self.f):
            raise InvalidValue(f"the data gave {len(self.f)} rows of targets in one pass and {start} in another")


@torch.inference_mode(False)
def read(
    state: State,
    likelihood: Likelihood,
    batches: Iterable[Any],
    memory_budget: int = BUDGET,
    progress: bool = False,
) -> Jacobian:
    """The Jacobian of the data of the fit, by one pass; other data than those are an error."""
    if not likelihood.concave:
        raise Unsupported(
            f"{likelihood.name} is not concave in the network's outputs, so the tangent model may have several modes; "
            "use center='map', the trained weights"
        )
    tangent = state.tangent
    fs: list[Tensor] = []
    ys: list[Tensor] = []
    rows: list[Tensor] = []
    heads: list[OuterRows | None] = []
    shapes: list[torch.Size] = []
    held, maker, ranks = False, None, loading.ranks_of(batches)
    inputs = fixed.no_sums()
    with ranks.sharing_errors("reading the data for the tangent map"):
        for x, y in loading.passes(batches, tangent.device, progress, "tangent map"):
            if maker is None:
                maker = RowMaker(tangent, cover(tangent, x))
            inputs += fixed.input_sums(x, len(y))
            record = maker.run(x)
            f = record.f.detach()
            if not fs:
                every = state.n * f[0].numel()
                size = 8 * every * tangent.layout.size
                # a product with rows reads them all; past a size, a run of the network, which has c of them, is quicker
                held = size <= memory_budget // 2 and size * f.shape[-1] <= HELD_ROWS_BYTES
                if 48 * every > memory_budget * ranks.size:
                    raise InvalidValue(
                        f"the tangent center keeps outputs of all data in memory, {state.n} x {f[0].numel()} several "
                        "times, which is past memory_budget; raise it, or use center='map'"
                    )
            if held:
                pieces = maker.rows(record, x, units(f), memory_budget // 8)
                rows += [piece.reshape(-1, tangent.layout.size).to(torch.float64) for piece in pieces]
            elif not heads or heads[-1] is not None:
                heads.append(_head(maker, record, state.n, memory_budget))
            fs.append(flat_outputs(f).to(torch.float64))
            ys.append(flat_targets(likelihood, f, y))
            shapes.append(f.shape)
    mine = (fs[0][:0], ys[0][:0], held) if fs else None
    no_f, no_y, held = ranks.first(mine, "the shapes of outputs and targets")  # a rank without data has none
    outputs, targets = torch.cat([no_f.to(tangent.device), *fs]), torch.cat([no_y.to(tangent.device), *ys])
    found = torch.cat([outputs.new_zeros(0, tangent.layout.size), *rows]) if held else None
    head = None if held else _joined(heads, ranks)
    jacobian = Jacobian(tangent, batches, outputs, targets, tuple(shapes), found, head)
    jacobian.counter["passes"] += 1
    _check_same_data(state, likelihood, jacobian)
    fixed.check_inputs(ranks.total([inputs], "sums of the inputs")[0], state.inputs)
    return jacobian


def _head(maker: RowMaker, record: Record, n: int, memory_budget: int) -> OuterRows | None:
    """Of one batch, where those of all n examples fit."""
    found = maker.head(record)
    if found is None or 8 * n * found.a[0].numel() * record.f[0, ..., 0].numel() > memory_budget // 2:
        return None
    return found


def _joined(heads: list[OuterRows | None], ranks: Ranks) -> Head | None:
    """Those of all batches; a rank without data has none of its own."""
    known = [one for one in heads if one is not None]
    if ranks.anywhere(len(known) < len(heads), "batches without a last layer"):
        return None
    index, none = ranks.first((known[0].index, known[0].a[:0]) if known else None, "the last layer")
    return Head(index, torch.cat([none, *(one.a for one in known)]))


def _check_same_data(state: State, likelihood: Likelihood, jacobian: Jacobian) -> None:
    ranks = jacobian.ranks
    n = ranks.count(sum(shape[0] for shape in jacobian.shapes), "the number of examples")
    apart = differing(jacobian.statistics(likelihood, jacobian.f, state), state.statistics)
    if n != state.n or apart:
        what = f"{n} examples, not {state.n}" if n != state.n else f"another {apart} of the network's outputs"
        raise InvalidValue(
            f"these are not the data of the fit: they have {what}. Give the same data, without augmentation, or use "
            "center='map', which reads none"
        )
