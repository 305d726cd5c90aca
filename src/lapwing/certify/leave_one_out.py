"""The structure and the true posterior at a training input, each without that example: what they say of new inputs.

    true   K₋ₙ = K − J_nᵀ Λ_n J_n          j = J_nᵀu, u random signs: E jᵀK₋ₙ⁻¹j = tr C₋ₙ, C₋ₙ = C_n (I − Λ_n C_n)⁻¹
    ours   P₋ₙ                             the structure fitted to all data but the n-th

C₋ₙ is the covariance of a fit without example n (Eq. 22). jᵀK₋ₙ⁻¹j is one solve an input whatever the number of
outputs, with a matrix that is never nearly singular, however near one the leverage of n is. A structure knows its
training inputs too: more so the nearer it is to exact, so P would compare an input that was fitted with one that was
not. Its sums give P₋ₙ by subtraction, and a factorization for each example.

A few inputs of a leverage near one may have most of Σ_n tr C₋ₙ, and a uniform draw misses them. So half of the draws
are by about that variance (`sizes_of`), and each counts by the inverse of its probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature import Factor, State, accumulate, without
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.factor import cotangents
from lapwing.curvature.products import gauss_newton
from lapwing.distributed import Ranks
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.posterior import Gaussian, condition
from lapwing.priors import Prior
from lapwing.push import At, push
from lapwing.solvers import cg

WORK = 10**12  # operations of the factorizations without an example, past which the structure stays as fitted
EXACT = 1e-10  # residual of solves that take a handful of steps
FLOOR = 0.01  # of 1 − leverage, in sizes that examples are drawn by


@dataclass(frozen=True, eq=False)
class LeftOutExamples:
    """k training examples, of which this rank holds those that are among its data."""

    state: State
    likelihood: Likelihood
    ranks: Ranks
    held: Mapping[int, tuple[Any, Tensor]]  # by place among the k: x (1, ...), y (1, ...)
    k: int
    budget: int  # bytes

    @cached_property
    def rows(self) -> dict[int, Tensor] | None:
        """S_nᵀJ_n of each that this rank holds, (columns of S_n, p); None where they do not fit the memory budget."""
        tangent, out, left = self.state.tangent, {}, self.budget // 8  # numbers
        for place, (x, y) in self.held.items():
            f = tangent(x)
            S = self.likelihood.scaled_root(flat_outputs(f), flat_targets(self.likelihood, f, y))
            left -= len(S) * S.shape[-1] * tangent.layout.size
            if left < 0:
                return None
            u = cotangents(Factor("exact"), S, 1)[0].reshape(1, -1, *f.shape[1:]).transpose(0, 1)
            out[place] = tangent.vjps(x, u.to(f)).to(torch.float64)
        return out

    def pulled(self, signs: torch.Generator) -> Tensor:
        """j = J_nᵀu of each, (k, p)."""
        tangent = self.state.tangent
        out = torch.zeros(self.k, tangent.layout.size, dtype=torch.float64, device=tangent.device)
        with self.ranks.sharing_errors("gradients of examples"):
            for place, (x, _) in self.held.items():
                f = tangent(x)
                out[place] = tangent.vjps(x, random_signs((1, *f.shape), signs, f))[0].to(out)
        return self.ranks.total([out], "gradients of examples")[0]

    def gone(self, v: Tensor, places: Tensor) -> Tensor:
        """−J_nᵀΛ_nJ_n v, each row of v (m, p) with the example of its place (m,); places of no example add nothing."""
        out = torch.zeros_like(v)
        with self.ranks.sharing_errors("products without an example"):
            for row, place in enumerate(places.tolist()):
                if place in self.held:
                    out[row] = -self._own(place, v[row]).to(out)
        return self.ranks.total([out], "products without an example")[0]

    def _own(self, place: int, v: Tensor) -> Tensor:
        """J_nᵀΛ_nJ_n v, (p,)."""
        if self.rows is None:
            return gauss_newton(self.state.tangent, self.likelihood, [self.held[place]], v.unsqueeze(0))[0]
        return self.rows[place].mT @ (self.rows[place] @ v)

    def ours(self, prior: Prior, j: Tensor) -> tuple[Tensor, bool]:
        """jᵀP₋ₙ⁻¹j (k,), and whether the examples could be taken out; else it is jᵀP⁻¹j."""
        state, likelihood = self.state, self.likelihood
        precision = condition(state, prior, likelihood).precision
        if state.structure.bound == "exact" and state.factor.kind == "exact":
            return (j * self._downdated(precision, j)).sum(-1), True
        if state.factor.kind == "monte_carlo" or self.k * _work(state) > WORK:
            return (j * linalg.solve(precision, j)).sum(-1), False
        out = torch.zeros(self.k, dtype=torch.float64, device=j.device)
        with self.ranks.sharing_errors("the structure without an example"):
            for place, example in self.held.items():
                left = condition(self._left(example), prior, likelihood).precision
                out[place] = j[place] @ linalg.solve(left, j[place : place + 1])[0]
        return self.ranks.total([out], "the structure without an example")[0], True

    def _downdated(self, precision: linalg.Operator, j: Tensor) -> Tensor:
        """P₋ₙ⁻¹j where P has the example whole, as the true curvature has: a step for each of its outputs."""

        def mv(v: Tensor) -> Tensor:
            return linalg.mv(precision, v)

        def near(v: Tensor) -> Tensor:
            return linalg.solve(precision, v)

        return cg(mv, j, near, tolerance=EXACT, extra=self.gone).x

    def _left(self, example: tuple[Any, Tensor]) -> State:
        """The state without an example."""
        state = self.state
        basis = state if state.basis else None
        one = accumulate(state.structure, state.tangent, self.likelihood, [example], state.factor, basis=basis)
        return without(replace(state, lost=0.0), one, self.likelihood)


@dataclass
class Reservoir:
    """k examples of one pass, each drawn by sizes: when a batch of total size s comes, an example of it takes a draw's
    place with the probability s / (sizes so far). So each draw is the n-th with the probability size_n / Σ size."""

    k: int
    generator: torch.Generator
    total: float = 0.0
    count: int = 0  # examples so far
    held: dict[int, tuple[Any, Tensor, int, float]] = field(default_factory=dict)  # by draw: x, y, number, other size

    def see(self, x: Any, y: Tensor, by: Tensor, other: Tensor) -> None:
        """A batch, to draw from by sizes (n,), and another size of each to keep."""
        mine, g = by.to(self.generator.device), self.generator
        self.total += float(mine.sum())
        taken = torch.rand(self.k, generator=g, device=g.device, dtype=torch.float64) * self.total < mine.sum()
        draws = taken.nonzero().squeeze(-1).tolist()
        numbers = torch.multinomial(mine, len(draws), replacement=True, generator=g).tolist() if draws else []
        for draw, n in zip(draws, numbers, strict=True):
            index = slice(n, n + 1)
            one = tree.map_tensors(torch.clone, tree.rows_of(x, index)), y[index].clone()
            self.held[draw] = (*one, self.count + n, float(other[n]))
        self.count += len(y)

    def kept(self, ranks: Ranks, generator: torch.Generator) -> dict[int, tuple[Any, Tensor, int, float]]:
        """Those that are this rank's: each draw is a rank's by the sizes that ranks have."""
        totals = torch.tensor(ranks.gather(self.total, "sizes of examples"), device=generator.device)
        owners = torch.multinomial(totals, self.k, replacement=True, generator=generator).tolist() if self.k else []
        return {draw: one for draw, one in self.held.items() if owners[draw] == ranks.rank}


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Examples to leave out."""

    held: dict[int, tuple[Any, Tensor]]  # this rank's, by place
    weights: Tensor  # (k,): of each in a mean over all examples
    numbers: Tensor  # (k,): the same for the same example


def every(batches: Iterable[tuple[Any, Tensor]], n: int, start: int) -> LeftOut:
    """All n examples once, those of this rank from number start."""
    held: dict[int, tuple[Any, Tensor]] = {}
    for x, y in batches:
        for i in range(len(y)):
            one = tree.rows_of(x, slice(i, i + 1)), y[i : i + 1]
            held[start + len(held)] = tree.map_tensors(torch.clone, one[0]), one[1].clone()
    return LeftOut(held, torch.ones(n, dtype=torch.float64), torch.arange(n))


def sample(
    batches: Iterable[tuple[Any, Tensor]],
    sizes: Callable[[Any, Tensor], Tensor] | None,
    k: int,
    ranks: Ranks,
    generator: torch.Generator,
) -> LeftOut:
    """k draws of one pass: half of them all alike, and half by sizes, where there are any."""
    own, half = ranks.own(generator), 0 if sizes is None else k // 2
    alike, large = Reservoir(k - half, own), Reservoir(half, own)
    for x, y in batches:
        ones = torch.ones(len(y), dtype=torch.float64)
        by = ones if sizes is None else sizes(x, y).cpu()
        alike.see(x, y, ones, by)
        large.see(x, y, by, by)
    kept = alike.kept(ranks, generator)
    kept |= {alike.k + draw: one for draw, one in large.kept(ranks, generator).items()}
    found = torch.zeros(2, k, dtype=torch.float64)  # size and number
    for place, (_, _, number, size) in kept.items():
        found[:, place] = torch.tensor([size, number * ranks.size + ranks.rank], dtype=torch.float64)
    totals = torch.tensor([alike.total, large.total], dtype=torch.float64)
    found, (n, total) = ranks.total([found, totals], "examples that were drawn")
    weights = 1 / ((k - half) / k + half / k * n * found[0] / total)
    return LeftOut({place: one[:2] for place, one in kept.items()}, weights, found[1].long())


def sizes_of(near: Gaussian, likelihood: Likelihood, x: Any, y: Tensor, budget: int) -> Tensor:
    """tr C / (1 − h) of each example, (n,): about its variance left out, by a posterior near the true; h = ‖SᵀC S‖₂."""
    made = push(near.precision, At(near.tangent, x, budget=budget, parts=near.parts))
    f, cov = made.mean, made.covariance
    cov = cov.reshape(-1, *cov.shape[-2:]).to(torch.float64)  # (n q, c, c)
    S = likelihood.scaled_root(flat_outputs(f), flat_targets(likelihood, f, y)).to(cov)
    leverage = torch.linalg.eigvalsh(S.mT @ cov @ S)[..., -1]
    size = cov.diagonal(dim1=-2, dim2=-1).sum(-1) / (1 - leverage).clamp(min=FLOOR)
    return size.reshape(len(f), -1).sum(-1)


def random_signs(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """±1."""
    draws = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    return (2 * draws - 1).to(like)


def _work(state: State) -> int:
    """Multiplications, about, of the factorizations of a state: cubes of the sides of its matrices."""
    if state.holds_data:
        return sum(u.shape[0] * u.shape[1] for _, u in state.batches) ** 3
    matrices = [s for key, s in state.sums.items() if key.rpartition("/")[2] in ("A", "B", "gram")]
    return sum(s.numel() * s.shape[-1] for s in matrices)
