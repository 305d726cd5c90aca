"""The exact curvature, never formed: G = Σ_n J_nᵀ Λ_n J_n by products that are passes over the data.

    G v = Σ_n J_nᵀ Λ_n (J_n v)          one push, one pull and one run of the network a batch, for all vectors at once

The state keeps a reference to the data, and the sums of a coarser structure, fitted in the same pass, that serves as
preconditioner; posterior, evidence and predictions are samples of one linear system (operators/streamed.py). Memory is
that of the samples, whatever the numbers of data and outputs. Every pass is held to the data of the fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import given, tree
from lapwing.curvature import overflow
from lapwing.curvature.accumulate import BUDGET, Accumulator, Probe, accumulate, covered, flat_outputs
from lapwing.curvature.checkpoint import Checkpoint
from lapwing.curvature.cost import Needs, Task
from lapwing.curvature.factor import Factor
from lapwing.curvature.layered import Diagonal, Kronecker
from lapwing.curvature.lowrank import COPIES, LowRank
from lapwing.curvature.memory import count_bytes
from lapwing.curvature.parts import Part
from lapwing.curvature.products import carry, pieces
from lapwing.curvature.state import Kept, State, differing, register
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood, polarization
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.operators import Plan, Streamed
from lapwing.operators.streamed import Product
from lapwing.solvers.noise import Placed
from lapwing.tangent import TangentModel

FINE, COARSE, STOCHASTIC = 1e-6, 1e-3, 2e-2  # tolerances: of a float64 network, of a coarser one, and of SGD


# -- R by passes over the data -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DataRoot:
    """R = Λ^½ J over the data at unit noise, by products. A pass over other data than the fit's is an error.

    Of data and columns that are spread over ranks, each rank brings its own columns, multiplies those of all by its own
    data, and is given the sums over all data for its own."""

    tangent: TangentModel
    likelihood: Likelihood
    data: Iterable[Any]
    n: int
    targets: int | None  # their digest
    statistics: dict[str, Tensor]
    weights: int  # h
    memory_budget: int = BUDGET
    counter: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """The number of parameters p."""
        return self.tangent.layout.size

    @property
    def ranks(self) -> Ranks:
        """The processes that share the data."""
        return loading.ranks_of(self.data)

    @property
    def passes(self) -> int:
        """Passes over the data so far."""
        return self.counter["passes"]

    @property
    def batches(self) -> int:
        """In a pass, on the rank that has most; counted by one without the network, if none was made."""
        if not self.counter["batches"]:
            for _ in self._each():
                pass
        return self.ranks.most(self.counter["batches"], "batches of a pass")

    def __add__(self, other: DataRoot) -> DataRoot:
        return replace(
            self,
            data=loading.Joined((self.data, other.data)),
            n=self.n + other.n,
            targets=None if self.targets is None or other.targets is None else (self.targets + other.targets) % 2**64,
            statistics={k: v + other.statistics[k] for k, v in self.statistics.items()},
            counter=Counter(),
        )

    # -- products ---------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def product(self, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_h w_h G_h v (k, p), and vᵀG_h v (k, h), for this rank's columns v."""
        v, counts = self.ranks.joint(v, "vectors of a product")
        sums, watch = self._sums(len(v)), _Watch(self)
        if not len(v):
            return sums[:, : self.size], sums[:, self.size :]
        with self.ranks.sharing_errors("a product"):
            for x, y in self._each():
                for piece, targets in pieces(self.tangent, x, y, len(v)):
                    self._add(piece, targets, v, weights, sums, watch)
        watch.check()
        out = self.ranks.returned(sums, counts, "a product")
        return out[:, : self.size], out[:, self.size :]

    def _sums(self, k: int) -> Tensor:
        """Of products, and beside them of squares: (k, p + h)."""
        return torch.zeros(k, self.size + self.weights, dtype=torch.float64, device=self.tangent.device)

    def _add(self, x: Any, y: Tensor, v: Tensor, weights: Tensor, sums: Tensor, watch: _Watch | None) -> None:
        found: list[Tensor] = []
        outputs: list[Tensor] = []
        total, squares = sums[:, : self.size], sums[:, self.size :]

        def middle(f: Tensor, jv: Tensor) -> Tensor:
            if len(v) == 1:  # one vector may be pushed by a second route, where the first was not right
                found.clear()
            u, square = self._weighted(f, self.likelihood.rows(y, len(f)), jv, weights)
            found.append(square)
            outputs.append(f)
            return u

        carry(self.tangent, x, v, middle, total)
        if watch is not None:
            watch.see(outputs[0], y)
        squares += torch.cat(found)
        if not bool(torch.isfinite(total.sum())):
            names, largest = overflow.not_finite(self.tangent, x), float(v.abs().max())
            why = (
                overflow.not_finite_by(names, self.tangent)
                if names
                else f"a product with numbers up to {largest:.2g} overflows; raise the prior precision, or "
                + overflow.remedy(self.tangent)
            )
            raise InvalidValue(
                f"NaN or infinite values in batch {self.counter['batch']} of pass {self.passes} over the data: {why}"
            )

    def _weighted(self, f: Tensor, y: Tensor, jv: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Λ J v under the weights, (k, m, c), and (J v)ᵀΛ_h(J v), (k, h)."""
        if self.weights == 1:
            u = self.likelihood.curvature_product(f, y, jv)
            return u * weights[0].to(u), (u * jv).sum((1, 2), dtype=torch.float64).unsqueeze(-1)
        root = self.likelihood.curvature_root(f, y)
        inner = torch.einsum("mcq,kmc->kmq", root, jv)
        return torch.einsum("mcq,kmq->kmc", root, inner * weights.to(inner)), inner.square().sum(1, dtype=torch.float64)

    def minibatches(self, weights: Tensor) -> Iterator[Product]:
        """(N/n) Σ_h w_h G_h v of one batch after the other, pass after pass; of ranks, a batch of each together."""
        while True:
            watch, batches, n = _Watch(self), self._each(), self.n
            while n:
                with self.ranks.sharing_errors("a minibatch"):
                    batch = next(batches, None)
                    if batch is not None:
                        watch.see(flat_outputs(self.tangent(batch[0])), batch[1])
                n = self.ranks.count(0 if batch is None else len(batch[1]), "a minibatch")
                if n:
                    yield partial(self._estimate, batch, n, weights)
            watch.check()

    def _estimate(self, batch: tuple[Any, Tensor] | None, n: int, weights: Tensor, v: Tensor) -> Tensor:
        """(N/n) Σ_h w_h G_h v of n examples, of which this rank has a batch, or none."""
        v, counts = self.ranks.joint(v, "vectors of a minibatch")
        if not len(v):
            return v
        sums = self._sums(len(v))
        with self.ranks.sharing_errors("a minibatch"):
            for piece, targets in () if batch is None else pieces(self.tangent, *batch, len(v)):
                self._add(piece, targets, v, weights, sums, None)
        out = self.ranks.returned(sums, counts, "a minibatch")
        return out[:, : self.size] * (self.n / n)

    @torch.inference_mode(False)
    @torch.no_grad()
    def noise(self, columns: Tensor, seed: int) -> Tensor:
        """Σ_n J_nᵀ s_n e_n for the columns s of S_n, each with the standard normal numbers e_n that `amplitudes` tell,
        for this rank's columns of the noise: (h, k, p). Examples are numbered as if ranks took turns, so that one
        process draws the same where rank r of R has every R-th of its examples, from the r-th on."""
        ranks, watch, seen = self.ranks, _Watch(self), 0
        every, counts = ranks.joint(columns, "the noise of the data")
        k = len(every)  # one at the least
        total = torch.zeros(k, self.weights, self.size, dtype=torch.float64, device=self.tangent.device)
        with ranks.sharing_errors("the noise of the data"):
            for x, y in self._each():
                f = self.tangent(x)
                flat = flat_outputs(f)
                rows = self.likelihood.rows(y, len(flat))
                watch.see(flat, y)
                placed = Placed(seed, every, torch.arange(seen, seen + len(y)) * ranks.size + ranks.rank)
                seen += len(y)
                if self.weights == 1:
                    u = [self.likelihood.curvature_noise(flat, rows, k, placed)]
                else:
                    root = self.likelihood.curvature_root(flat, rows)
                    e = placed.normal(root[:, 0].expand(k, -1, -1))
                    u = [root[..., a] * e[..., b, None].to(root) for a, b in zip(*self._families, strict=True)]
                for h, one in enumerate(u):
                    total[:, h] += self.tangent.vjps(x, one.reshape(k, *f.shape))
        watch.check()
        return ranks.returned(total, counts, "the noise of the data").transpose(0, 1)

    @property
    def _families(self) -> tuple[list[int], list[int]]:
        """Columns of S, and of the noise, that families of it are made of."""
        if not self.likelihood.paired:
            return list(range(self.weights)), list(range(self.weights))
        a, b = torch.tril_indices(*[polarization.outputs(self.weights)] * 2).tolist()
        return a, b

    def amplitudes(self, weights: Tensor) -> Tensor:
        """t (h,) such that Σ_h t_h noise_h has the covariance Σ_h w_h G_h: √w; for a matrix Π = L Lᵀ of pairs L itself,
        as Σ_ab L_ab J_aᵀ e_b = Jᵀ L e."""
        if not self.likelihood.paired:
            return weights.sqrt()
        return torch.linalg.cholesky(polarization.matrix_of(weights))[self._families]

    def diagonal(self) -> Tensor:
        """diag G_h exactly, by a pass with as many cotangents as there are outputs, (h, p)."""
        structure = Diagonal(memory_budget=self.memory_budget)
        state = accumulate(structure, self.tangent, self.likelihood, self.data, "exact")
        self.counter["passes"] += 1
        rows = torch.eye(self.weights, dtype=torch.float64, device=self.tangent.device)
        found = [structure.operator(state, row) for row in rows]
        return torch.stack([op.join([part.dense() for part in op.parts]) for op in found])

    # -- the same data each pass ------------------------------------------------------------------------------------

    def _each(self) -> Iterator[tuple[Any, Tensor]]:
        self.counter["passes"] += 1
        count = 0
        for x, y in loading.passes(self.data, self.tangent.device, label="products"):
            count += 1
            self.counter["batch"] = count
            yield x, y
        self.counter["batches"] = count


@dataclass
class _Watch:
    """One pass, held to the data of the fit: their number, targets and the network's outputs, in any order."""

    root: DataRoot
    n: int = 0
    targets: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)

    def see(self, f: Tensor, y: Tensor) -> None:
        """Outputs (m, c), one row a position, and targets."""
        root = self.root
        if not bool(torch.isfinite(f).all()):
            raise InvalidValue(
                f"the network's outputs hold NaN or infinite values in batch {root.counter['batch']} of pass "
                f"{root.passes} over the data, though not in the fit: matrix-free needs the same data each pass"
            )
        self.n += len(y)
        self.targets = (self.targets + tree.digest(y)) % 2**64
        for key, value in root.likelihood.statistics(f, root.likelihood.rows(y, len(f))).items():
            self.statistics[key] = self.statistics[key] + value if key in self.statistics else value

    def check(self) -> None:
        """Raise unless the pass was over the data of the fit, on all ranks together."""
        root, keys = self.root, list(self.root.statistics)
        mine = [self.statistics.get(key, torch.zeros_like(value)) for key, value in root.statistics.items()]
        counts = torch.tensor([self.n, (self.targets + 2**63) % 2**64 - 2**63])  # sums wrap modulo 2⁶⁴
        *found_sums, counts = root.ranks.total([*mine, counts], "a pass over the data")
        statistics = dict(zip(keys, found_sums, strict=True))
        n, targets = int(counts[0]), int(counts[1]) % 2**64
        found = ""
        if n != root.n:
            found = f"{n} examples, not {root.n}"
        elif root.targets is not None and targets != root.targets:
            found = "other targets"
        else:
            apart = differing(statistics, root.statistics)
            found = f"another {apart} of the network's outputs" if apart else ""
        if found:
            raise InvalidValue(
                f"matrix-free needs the same data each pass: pass {root.passes} had {found}; give a loader without "
                "augmentation, dropped batches or sampling with replacement (shuffling does no harm)"
            )


# -- the structure -----------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True)
class Nothing:
    """G ≈ 0: what the prior alone knows."""

    def __str__(self) -> str:
        return "none"

    def resolved(self, probe: Probe, factor: Factor) -> Nothing:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        return self

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        return _Outputs(tangent)

    def operator(self, state: State, weights: Tensor) -> DiagonalOperator:
        """Zero, as an operator."""
        return DiagonalOperator(weights.new_zeros(1), state.layout.size)

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, "nothing")

    def keeps(self, layout: tree.Layout, parts: tuple[Part, ...], weights: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        return {}, {}


class _Outputs:
    mutable = ()

    def __init__(self, tangent: TangentModel) -> None:
        self.forward = tangent

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        pass

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        return {}, ()


PRECONDITIONERS: dict[str, Any] = {"kron": Kronecker, "diag": Diagonal, "nystrom": LowRank, "none": Nothing}
RANK, LEAST = 100, 8  # of a Nyström preconditioner: the most, and the least that "auto" takes
FEW_COLUMNS = 16  # of the exact output factor, up to which a Nyström preconditioner takes it


@register
@dataclass(frozen=True)
class MatrixFree:
    """samples: draws of the posterior that are kept. solver: "cg", or "sgd" for data too many to stream at each step.
    preconditioner: "nystrom", "kron", "diag", "none", or "auto": nystrom, and none where the memory budget has no room
    for a rank of 8. tolerance: of a solve's residual; 0 goes by the dtype. seed: of the samples' noise; −1 takes it
    from the fit's generator. rank: of nystrom; 0 is what the memory budget has room for, at most a quarter of the
    parameters and 100."""

    samples: int = 32
    solver: str = "cg"
    preconditioner: str = "auto"
    tolerance: float = 0.0
    max_steps: int = 500
    seed: int = -1
    rank: int = 0
    memory_budget: int = field(default=BUDGET, compare=False)

    def __post_init__(self) -> None:
        count_bytes(self)
        if self.solver not in ("cg", "sgd"):
            raise InvalidValue(f"solver must be 'cg' or 'sgd', got {self.solver!r}")
        if self.preconditioner not in ("auto", *PRECONDITIONERS):
            raise InvalidValue(
                f"preconditioner must be 'auto' or one of {list(PRECONDITIONERS)}, got {self.preconditioner!r}"
            )
        for name, least in (("samples", 4), ("max_steps", 1), ("rank", 0)):  # 4 samples, for error bars
            given.whole(getattr(self, name), f"{name} of matrix_free", least)
        if not isinstance(self.tolerance, (int, float)) or not self.tolerance >= 0:
            raise InvalidValue(f"the tolerance of matrix_free must not be negative, got {self.tolerance!r}")

    def __str__(self) -> str:
        return "matrix_free"

    @property
    def near(self) -> Any:
        """The structure of the preconditioner."""
        if self.preconditioner == "none":
            return Nothing()
        if self.preconditioner == "nystrom":
            return LowRank(self.rank, memory_budget=self.memory_budget)
        return PRECONDITIONERS[self.preconditioner](memory_budget=self.memory_budget)

    def resolved(self, probe: Probe, factor: Factor) -> MatrixFree:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        if factor.kind != "exact":
            raise InvalidValue(
                f"matrix_free multiplies by the exact output curvature, at no extra cost; got factor='{factor.kind}': "
                "use factor='exact' (or 'auto')"
            )
        if self.preconditioner not in ("auto", "nystrom"):
            return self
        room = self.memory_budget // (8 * COPIES * probe.parameters * probe.weights)
        rank = self.rank or max(1, min(RANK, probe.parameters // 4, room))
        fits = self.preconditioner == "nystrom" or bool(self.rank) or room >= LEAST
        return replace(self, preconditioner="nystrom", rank=rank) if fits else replace(self, preconditioner="none")

    def streamed(
        self,
        tangent: TangentModel,
        likelihood: Likelihood,
        batches: Iterable[Any],
        *,
        generator: torch.Generator,
        progress: bool,
        seen: Probe,
        checkpoint: Checkpoint | None,
    ) -> State:
        """The state: that of the preconditioner, by one pass, and where the data are."""
        seed = self.seed if self.seed >= 0 else int(torch.randint(2**31, (), generator=generator))
        weights = len(likelihood.curvature_weights("exact"))
        near = self.near_factor(weights, seen.outputs * seen.positions)
        state = accumulate(
            self.near,
            tangent,
            likelihood,
            batches,
            near if near.kind in likelihood.factors else Factor("exact"),
            generator=generator,
            progress=progress,
            seen=seen,
            checkpoint=checkpoint,
        )
        return replace(
            state,
            structure=replace(self, seed=seed),
            factor=Factor("exact"),
            weights=weights,
            source=source(state, likelihood, weights, batches, self.memory_budget),
            coverage=covered(self, state.parts, tangent),
        )

    def near_factor(self, weights: int, columns: int) -> Factor:
        """Of the preconditioner. The range of G is all that Nyström is about, so it takes the exact factor where that
        has few columns; the others take one sampled score an example. Noise per output needs the exact one."""
        if weights > 1:
            return Factor("exact")
        if self.preconditioner == "nystrom":
            return Factor("exact") if columns <= FEW_COLUMNS else Factor("monte_carlo")
        return Factor("monte_carlo", 1)

    def companion(self, state: State) -> State:
        """The state of the preconditioner alone."""
        return replace(
            state,
            structure=self.near,
            source=None,
            cache=state.cache.setdefault("companion", {}),
        )

    def operator(self, state: State, weights: Tensor) -> Streamed:
        """Σ_h w_h G_h as an operator, for curvature weights w (h,)."""
        near = self.companion(state)
        tolerance = self.tolerance or (FINE if state.tangent.dtype == torch.float64 else COARSE)
        if not self.tolerance and self.solver == "sgd":
            tolerance = STOCHASTIC
        return Streamed(
            state.source,
            weights,
            near.structure.operator(near, weights.detach()),
            Plan(
                self.samples, self.solver, self.preconditioner, tolerance, self.max_steps, self.seed, self.memory_budget
            ),
            cache=state.cache.setdefault("streamed", {}),
        )

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, "exact, by products")

    def keeps(self, layout: tree.Layout, parts: tuple[Part, ...], weights: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        if self.preconditioner == "auto" or self.seed < 0:
            raise InvalidValue("matrix_free has chosen its preconditioner and its seed by the end of a fit")
        return self.near.keeps(layout, parts, weights, factor)

    def needs(self, task: Task) -> Needs:
        """What it takes, counted (cost.py)."""
        near, note = getattr(self.near, "needs", lambda task: Needs())(task), "exact, by passes that cannot be counted"
        return Needs(near.memory, kept=near.kept, exact=True, note=note, grows=True)


def source(
    state: State, likelihood: Likelihood, weights: int, batches: Iterable[Any], memory_budget: int = BUDGET
) -> DataRoot:
    """Products over the data of a state."""
    return DataRoot(
        state.tangent, likelihood.unit, batches, state.n, state.targets, dict(state.statistics), weights, memory_budget
    )
