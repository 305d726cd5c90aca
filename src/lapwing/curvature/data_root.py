"""G by passes over the data: R = Λ^½ J at unit noise, known by products.

    G v = Σ_n J_nᵀ Λ_n (J_n v)          one push, one pull and one run of the network a batch, for all vectors at once

Memory is that of the vectors, whatever the numbers of data and outputs. Every pass is held to the data of the fit by
sums that do not depend on the order: the number of examples, a digest of the targets, and the likelihood's statistics
of the network's outputs.
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
from lapwing.curvature import overflow
from lapwing.curvature.accumulate import Running, accumulate, flat_outputs
from lapwing.curvature.layered import Diagonal
from lapwing.curvature.products import carry, pieces
from lapwing.curvature.state import State, differing
from lapwing.curvature.structure import BUDGET
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood, polarization
from lapwing.operators import linalg
from lapwing.solvers.noise import Placed
from lapwing.solvers.product import Product
from lapwing.tangent import TangentModel


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
    terms: int  # h
    memory_budget: int = BUDGET
    counter: Counter[str] = field(default_factory=Counter)  # of passes and batches: they are its record, and no result

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
        sums, watch = self._sums(len(v)), Watch(self)
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
        return torch.zeros(k, self.size + self.terms, dtype=torch.float64, device=self.tangent.device)

    def _add(self, x: Any, y: Tensor, v: Tensor, weights: Tensor, sums: Tensor, watch: Watch | None) -> None:
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
            why = f"a product with numbers up to {float(v.abs().max()):.2g} overflows; raise the prior precision, or "
            why += overflow.remedy(self.tangent)
            if names := overflow.not_finite(self.tangent, x):
                why = overflow.not_finite_by(names, self.tangent)
            where = f"batch {self.counter['batch']} of pass {self.passes} over the data"
            raise InvalidValue(f"NaN or infinite values in {where}: {why}")

    def _weighted(self, f: Tensor, y: Tensor, jv: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Λ J v under the weights, (k, m, c), and (J v)ᵀΛ_h(J v), (k, h)."""
        if self.terms == 1:
            u = self.likelihood.curvature_product(f, y, jv)
            return u * weights[0].to(u), (u * jv).sum((1, 2), dtype=torch.float64).unsqueeze(-1)
        root = self.likelihood.curvature_root(f, y)
        inner = torch.einsum("mcq,kmc->kmq", root, jv)
        return torch.einsum("mcq,kmq->kmc", root, inner * weights.to(inner)), inner.square().sum(1, dtype=torch.float64)

    def minibatches(self, weights: Tensor) -> Iterator[Product]:
        """(N/n) Σ_h w_h G_h v of one batch after the other, pass after pass; of ranks, a batch of each together."""
        while True:
            watch, batches, n = Watch(self), self._each(), self.n
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
        ranks, watch, seen = self.ranks, Watch(self), 0
        every, counts = ranks.joint(columns, "the noise of the data")
        k = len(every)  # one at the least
        total = torch.zeros(k, self.terms, self.size, dtype=torch.float64, device=self.tangent.device)
        with ranks.sharing_errors("the noise of the data"):
            for x, y in self._each():
                f = self.tangent(x)
                flat = flat_outputs(f)
                rows = self.likelihood.rows(y, len(flat))
                watch.see(flat, y)
                placed = Placed(seed, every, torch.arange(seen, seen + len(y)) * ranks.size + ranks.rank)
                seen += len(y)
                if self.terms == 1:
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
            return list(range(self.terms)), list(range(self.terms))
        a, b = torch.tril_indices(*[polarization.outputs(self.terms)] * 2).tolist()
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
        rows = torch.eye(self.terms, dtype=torch.float64, device=self.tangent.device)
        return torch.stack([linalg.diagonal(structure.operator(state, row)) for row in rows])

    # -- the same data each pass ------------------------------------------------------------------------------------

    def _each(self) -> Iterator[tuple[Any, Tensor]]:
        self.counter["passes"] += 1
        count = 0
        for x, y in loading.passes(self.data, self.tangent.device, label="products"):
            count += 1
            self.counter["batch"] = count
            yield x, y
        self.counter["batches"] = count


def source(state: State, likelihood: Likelihood, terms: int, batches: Iterable[Any], budget: int) -> DataRoot:
    """Products over the data of a state."""
    fitted = state.n, state.targets, dict(state.statistics)
    return DataRoot(state.tangent, likelihood.unit, batches, *fitted, terms, budget)


@dataclass
class Watch:
    """One pass, held to the data of the fit: their number, targets and the network's outputs, in any order."""

    root: DataRoot  # what the pass is of: the fit's number, digest and statistics
    seen: Running = field(default_factory=lambda: Running(None))

    def see(self, f: Tensor, y: Tensor) -> None:
        """Outputs (m, c), one row a position, and targets."""
        if not bool(torch.isfinite(f).all()):
            raise InvalidValue(
                f"the network's outputs hold NaN or infinite values in batch {self.root.counter['batch']} of pass "
                f"{self.root.passes} over the data, though not in the fit: matrix-free needs the same data each "
                "pass"
            )
        self.seen.count(y, self.root.likelihood.statistics(f, self.root.likelihood.rows(y, len(f))))

    def check(self) -> None:
        """Raise unless the pass was over the data of the fit, on all ranks together."""
        seen = self.seen
        mine = [seen.statistics.get(key, torch.zeros_like(value)) for key, value in self.root.statistics.items()]
        counts = torch.tensor([seen.n, (seen.targets + 2**63) % 2**64 - 2**63])  # sums wrap modulo 2⁶⁴
        *found_sums, counts = self.root.ranks.total([*mine, counts], "a pass over the data")
        statistics = dict(zip(self.root.statistics, found_sums, strict=True))
        n, targets = int(counts[0]), int(counts[1]) % 2**64
        found = ""
        if n != self.root.n:
            found = f"{n} examples, not {self.root.n}"
        elif self.root.targets is not None and targets != self.root.targets:
            found = "other targets"
        else:
            apart = differing(statistics, self.root.statistics)
            found = f"another {apart} of the network's outputs" if apart else ""
        if found:
            raise InvalidValue(
                f"matrix-free needs the same data each pass: pass {self.root.passes} had {found}; give a loader "
                "without augmentation, dropped batches or sampling with replacement (shuffling does no harm)"
            )
