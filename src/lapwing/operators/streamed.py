"""Streamed root plus diagonal: M = t·(Rᵀ W R + D), R known by products alone, each a pass over data.

Solves are by conjugate gradients in the unit of D, u = D^½ z, where the matrix is I + D^-½ RᵀWR D^-½, preconditioned by
P = Ĝ + D, Ĝ an operator near RᵀWR. Samples are solves of one system, of base noise that is drawn once (Eq. 13):

    z = (RᵀWR + D)⁻¹ (RᵀW^½ e + D^½ e₀)          Cov z = M⁻¹ at t = 1

Directions that the data do not see have u = e₀ whatever D is, so u is where the next solve starts when W or D change.
From the samples, with Gz = RᵀWR z:

    γ_g = tr_g[RᵀWR M⁻¹] = E z_gᵀ(Gz)_g,    tr[R_hᵀR_h M⁻¹] = E ‖R_h z‖²,    so  ∂ log|M| / ∂ log D_g = p_g − γ_g

and log|M| = log|P| + tr log(P⁻¹M) by Lanczos in the inner product of P. Estimates carry their standard errors.

Where the data are spread over ranks, so are columns: of samples, right-hand sides and probes each rank holds its share
and all that a solve keeps of it, and only products see the columns of all. Noise belongs to its column
(solvers/noise.py), so that the samples are those of one process. Numbers (γ, residuals, quadratures) are whole on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.distributed import ALONE, Ranks
from lapwing.errors import InvalidValue, NotConverged, Unsupported
from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal
from lapwing.solvers import Estimate, Solution, cg, slq
from lapwing.solvers.estimate import FEWEST, mean_of
from lapwing.solvers.lanczos import SHORT
from lapwing.solvers.noise import generator_of
from lapwing.solvers.product import Product
from lapwing.solvers.sgd import sgd

OWN_VECTORS = 20  # that a solve holds for each column of this rank's own
OTHERS_VECTORS = 4  # and for each column of other ranks
LANCZOS_VECTORS = 64  # vectors that Lanczos keeps for each probe, where the memory budget has room for them
WORK = 10  # others that it holds for each
ROUND = 64  # minibatches of a round of SGD, at the least: whole passes


class Root(Protocol):
    """R (m, p), cut by weight into R_h, by products."""

    @property
    def size(self) -> int:
        """The number of parameters p."""
        ...

    @property
    def ranks(self) -> Ranks:
        """That the data, and the columns v, are spread over."""
        ...

    @property
    def passes(self) -> int:
        """Over the data, so far."""
        ...

    def product(self, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """RᵀWR v (k, p) and ‖R_h v‖² (k, h), for this rank's columns."""
        ...

    @property
    def batches(self) -> int:
        """In a pass."""
        ...

    def minibatches(self, weights: Tensor) -> Iterator[Product]:
        """Products whose mean is RᵀWR, without end."""
        ...

    def noise(self, columns: Tensor, seed: int) -> Tensor:
        """R_hᵀ e for standard normal e, (h, k, p), for this rank's columns, given by their numbers."""
        ...

    def amplitudes(self, weights: Tensor) -> Tensor:
        """What to multiply the noise by, so that its sum over h has the covariance RᵀWR: √w, where all are positive."""
        ...

    def diagonal(self) -> Tensor:
        """diag R_hᵀR_h, (h, p)."""
        ...


@dataclass(frozen=True)
class Plan:
    """How solves are made."""

    samples: int
    solver: str  # "cg" or "sgd"
    preconditioner: str  # its name
    tolerance: float  # of ‖b − M x‖ / ‖b‖, in the unit of D; for samples of the data's part of b
    max_steps: int  # of CG or Lanczos, or passes' worth of minibatches
    seed: int
    memory_budget: int


@dataclass(frozen=True, eq=False)
class Samples:
    """Draws of N(0, M⁻¹) at t = 1, what they say of γ, and how well they were solved for."""

    z: Tensor = field(repr=False)  # (k, p): of k samples that are spread over ranks, this rank's
    gamma: Tensor = field(repr=False)  # z_gᵀ(Gz)_g, (k, g)
    squares: Tensor = field(repr=False)  # ‖R_h z‖², (k, h)
    residual: float  # the largest ‖b − M z‖ / ‖RᵀW^½ e‖, in the unit of D
    steps: int
    passes: int
    solver: str
    preconditioner: str
    ranks: Ranks = ALONE  # that the samples are spread over

    @property
    def dimension(self) -> Estimate:
        """γ in all, with its standard error."""
        return mean_of(self.gamma.sum(-1))

    def share(self, ranks: Ranks) -> Tensor:
        """Those of this rank, of samples that are to be spread over ranks, or are."""
        return self.z[ranks.share(len(self.z))] if self.ranks.alone else self.z

    def __repr__(self) -> str:
        return (
            f"{len(self.gamma)} samples by {self.solver} (preconditioner {self.preconditioner}): {self.steps} steps, "
            f"{self.passes} passes over the data, residual {self.residual:.2g}"
        )


@dataclass(frozen=True, eq=False)
class Streamed:
    """M = t·(RᵀWR + D), with R by passes over the data."""

    root: Root | None  # None where the data are not at hand: then only what is remembered can be had
    weights: Tensor  # W by column, (h,)
    near: Any  # Ĝ, an operator near RᵀWR
    plan: Plan
    diag: Diagonal | None = None  # D; the verbs that need M⁻¹ need it
    level: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))  # t
    cache: dict[Any, Any] = field(default_factory=dict)  # of R: base noise, and the samples of the last W and D

    @property
    def size(self) -> int:
        """p."""
        return self.near.size

    def reads(self) -> Root:
        """R; an error where the data are not at hand."""
        if self.root is None:
            raise InvalidValue(
                "this reads the training data again, which a file does not hold; give them: lw.load(path, model, "
                "data=loader). Predictions and draws under the saved prior and noise need none"
            )
        return self.root

    def precision(self) -> Diagonal:
        """D, without gradient; an error where there is none."""
        if self.diag is None:
            raise Unsupported("Rᵀ W R alone is singular; shift it by a prior precision first")
        return replace(self.diag, values=self.diag.values.detach())

    @cached_property
    def d(self) -> Tensor:
        """D's diagonal, (p,)."""
        return self.precision().dense()

    @cached_property
    def close(self) -> tuple[Any, str]:
        """P = Ĝ + D and its name; where Ĝ cannot absorb D exactly (a Kronecker product and one precision a weight), its
        diagonal does."""
        found = linalg.shift(self.near, self.precision())
        try:
            linalg.solve(found, torch.zeros(1, self.size, dtype=torch.float64, device=self.d.device))
        except Unsupported:
            return Diagonal(linalg.diagonal(self.near) + self.d, self.size), f"diagonal of {self.plan.preconditioner}"
        return found, self.plan.preconditioner

    # -- products in the unit of D ----------------------------------------------------------------------------------

    def gram(self, v: Tensor) -> Tensor:
        """RᵀWR v."""
        return self.reads().product(v, self.weights.detach())[0]

    def whitened(self, gram: Product) -> Product:
        """u ↦ u + D^-½ G D^-½ u, from products with G: the system in the unit of D."""
        scale = self.d.rsqrt()
        return lambda u: u + scale * gram(scale * u).to(u)

    def precondition(self, r: Tensor) -> Tensor:
        """D^½ P⁻¹ D^½ r for r (k, p), in the unit of D."""
        root = self.d.sqrt()
        return root * linalg.solve(self.close[0], root * r) if len(r) else r

    def sampled(self, noise: Tensor, prior: Tensor, start: Tensor) -> Solution:
        """The solve of a sample. Where the data say little, b is nearly all prior noise e₀, and relative to it the
        start e₀ would pass for the answer: the residual is relative to the data's part of b."""
        pulled, b = self.right(noise, 0 * prior), self.right(noise, prior)
        shares = self.reads().ranks.whole(pulled.norm(dim=-1) / b.norm(dim=-1), "shares of the data")
        share = float(shares.min().clamp(1e-12, 1.0))
        found = self.solved(b, start, share)
        return replace(found, residual=found.residual / share)

    def solved(self, b: Tensor, start: Tensor | None = None, share: float = 1.0) -> Solution:
        """u with (I + D^-½ RᵀWR D^-½) u = b to a residual of tolerance·share·‖b‖, columns in groups that fit the memory
        budget; raises unless converged. b and u are this rank's, residuals those of all."""
        plan, ranks, groups = self.plan, self.reads().ranks, self._groups(len(b), OWN_VECTORS, OTHERS_VECTORS)
        starts = [None] * len(groups) if start is None else start.split(groups)
        with ranks.sharing_errors("a solve"):
            found = [
                self._solve(some, x0, share * plan.tolerance) for some, x0 in zip(b.split(groups), starts, strict=True)
            ]
        out = Solution(
            torch.cat([one.x for one in found]),
            ranks.whole(torch.cat([one.residual for one in found]), "residuals"),
            max(one.steps for one in found),
            not ranks.anywhere(not all(one.converged for one in found), "whether solves converged"),
            sum(one.products for one in found),
        )
        if not out.converged:
            residual = float(out.residual.max()) / share
            raise NotConverged(
                f"{plan.solver} stopped at a residual of {residual:.2g} after {out.steps} steps, "
                f"above {plan.tolerance:g}; use preconditioner='nystrom' with a higher rank, a larger prior precision, "
                "more max_steps, a looser tolerance, or a network in float64"
            )
        return out

    def _at_once(self, held: int, passing: int) -> int:
        """How many columns of all ranks fit the memory budget, by the vectors for each of one's own, and of others'."""
        ranks, room = self.reads().ranks.size, self.plan.memory_budget // (8 * self.size)
        own = room // (held + (ranks - 1) * passing)
        return ranks * own if own else max(1, 1 + (room - held) // passing)

    def _groups(self, k: int, held: int, passing: int) -> list[int]:
        """How many of its k columns this rank takes in each of the groups that fit the memory budget. Columns come in
        turns: the first of each rank, then the second; so all ranks have as many groups."""
        ranks, at_once = self.reads().ranks, self._at_once(held, passing)
        turns = torch.arange(k) * ranks.size + ranks.rank
        groups = ranks.most(int(turns[-1]) // at_once + 1 if k else 1, "groups of columns")
        return torch.bincount(turns // at_once, minlength=groups).tolist()

    def _solve(self, b: Tensor, start: Tensor | None, tolerance: float) -> Solution:
        plan, root, mv = self.plan, self.reads(), self.whitened(self.gram)

        def anywhere(here: bool) -> bool:
            return root.ranks.anywhere(here, "columns that are not solved for")

        if plan.solver == "cg":
            return cg(mv, b, self.precondition, start, tolerance, plan.max_steps, anywhere)
        batches = (self.whitened(gram) for gram in root.minibatches(self.weights.detach()))
        whole = 2 * -(-ROUND // (2 * root.batches))  # passes a round, as many in each half
        rounds = max(1, plan.max_steps // whole)
        return sgd(mv, batches, b, whole * root.batches, self.precondition, start, tolerance, rounds, anywhere)

    # -- samples ----------------------------------------------------------------------------------------------------

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A name for W and D."""
        d = self.precision()
        index = None if d.index is None else hash(d.index.cpu().numpy().tobytes())
        return tuple(self.weights.tolist()), tuple(d.values.tolist()), index, d.key

    @property
    def known(self) -> Samples | None:
        """The samples, if they were solved for."""
        last = self.cache.get("samples")
        return last[1] if last is not None and last[0] == self.key else None

    @cached_property
    def samples(self) -> Samples:
        """The planned number of draws, of the same base noise for every W and D."""
        if self.known is not None:
            return self.known
        last = self.cache.get("samples")
        root, plan = self.reads(), self.plan
        before, prior = root.passes, self._normal(self._own(plan.samples), plan.seed + 1)
        start = prior if last is None else last[2].dense().sqrt() * last[1].share(root.ranks)
        solution = self.sampled(self.noise, prior, start)
        z = self.d.rsqrt() * solution.x
        groups = z.split(self._groups(len(z), 1, OTHERS_VECTORS))
        made = [root.product(some, self.weights.detach()) for some in groups]
        gz, squares = (torch.cat(parts) for parts in zip(*made, strict=True))
        found = Samples(
            z,
            root.ranks.whole(self.precision().sums(z * gz), "effective dimensions"),
            root.ranks.whole(squares, "squares of samples"),
            float(solution.residual.max()),
            solution.steps,
            root.passes - before,
            plan.solver,
            self.close[1],
            root.ranks,
        )
        self.remember(found)
        return found

    @property
    def noise(self) -> Tensor:
        """R_hᵀ e of this rank's samples, (h, k, p): one pass, and then for every W and D."""
        if "noise" not in self.cache:
            self.cache["noise"] = self._noise(self._own(self.plan.samples), self.plan.seed)
        return self.cache["noise"]

    def _noise(self, columns: Tensor, seed: int) -> Tensor:
        h = len(self.weights)
        groups = columns.split(self._groups(len(columns), h, 2 * h))
        return torch.cat([self.reads().noise(some, seed) for some in groups], 1)

    def _own(self, k: int) -> Tensor:
        """Which of k columns are this rank's."""
        return torch.arange(k)[self.reads().ranks.share(k)]

    def remember(self, samples: Samples) -> None:
        """Take these as the samples of this W and D, and start from them where others are asked for."""
        self.cache["samples"] = self.key, samples, self.precision()

    def _normal(self, columns: Tensor, seed: int) -> Tensor:
        """e₀ of columns, (k, p)."""
        drawn = [linalg.standard_normal((self.size,), generator_of(seed, j), self.d) for j in columns.tolist()]
        return torch.stack(drawn) if drawn else self.d.new_zeros(0, self.size)

    def right(self, noise: Tensor, prior: Tensor) -> Tensor:
        """D^-½ (RᵀW^½ e) + e₀."""
        return self.d.rsqrt() * self.pulled(noise) + prior

    def pulled(self, noise: Tensor) -> Tensor:
        """RᵀW^½ e, (k, p)."""
        return torch.einsum("h,hkp->kp", self.reads().amplitudes(self.weights.detach()), noise)

    @cached_property
    def spread(self) -> Tensor:
        """The samples at this t, (k, p): this rank's."""
        return self.samples.z * self.level.detach().rsqrt()

    @property
    def ranks(self) -> Ranks:
        """That the samples are spread over, or will be."""
        known, root = self.known, self.root
        return known.ranks if known is not None else ALONE if root is None else root.ranks

    def first(self, n: int) -> Tensor:
        """The first n samples at this t, (n, p), on every rank."""
        own = self.ranks.share(self.plan.samples)
        return self.ranks.whole(self.spread[: max(0, n - own.start)], "the first samples")

    def gathered(self) -> Streamed:
        """The same with all samples on every rank: what is made of them alone then takes none of the others."""
        kept = self.samples
        whole = replace(kept, z=kept.ranks.whole(kept.z, "samples"), ranks=ALONE)
        return replace(self, cache={**self.cache, "samples": (self.key, whole, self.precision())})

    # -- log|M| -----------------------------------------------------------------------------------------------------

    @cached_property
    def log_determinant(self) -> Estimate:
        """log|M| at t = 1, by as many probes as there are samples, in groups that fit the memory budget; where not even
        the Lanczos vectors of the fewest do, only the last ones are kept."""
        known = self.cache.get("logdet")
        if known is not None and known[0] == self.key:
            return known[1]
        close, plan, ranks = self.close[0], self.plan, self.reads().ranks
        k, room = max(FEWEST, plan.samples), plan.memory_budget // (8 * self.size)  # probes, vectors
        groups = torch.arange(k).tensor_split(
            max(1, min(k // FEWEST, -(-k // self._at_once(LANCZOS_VECTORS, OTHERS_VECTORS))))
        )
        own = -(-len(groups[0]) // ranks.size)  # probes of a group, at the most
        window = max(SHORT, (room - OTHERS_VECTORS * (len(groups[0]) - own)) // own - WORK)

        def step(v: Tensor) -> Tensor:
            mv = self.gram(v) + self.d * v
            return linalg.solve(close, mv) if len(v) else v

        def inner(v: Tensor) -> Tensor:
            return linalg.mv(close, v) if len(v) else v

        def starts(probes: Tensor) -> Tensor:
            own = probes[ranks.share(len(probes))].tolist()
            drawn = [linalg.draw(close, 1, generator_of(plan.seed + 2, j)) for j in own]
            return torch.cat([self.d.new_zeros(0, self.size), *drawn])

        def whole(numbers: Tensor) -> Tensor:
            return ranks.whole(numbers, "quadratures")

        with ranks.sharing_errors("the log-determinant"):
            found = [
                slq(step, starts(some), lambda values: values.log(), inner, plan.max_steps, window, whole)[0]
                for some in groups
            ]
        out = mean_of(torch.cat([one.samples for one in found]) + linalg.logdet(close))
        self.cache["logdet"] = self.key, out
        return out


@linalg.scale.register
def _(op: Streamed, s: Tensor) -> Streamed:
    return replace(op, level=op.level * s)


@linalg.shift.register
def _(op: Streamed, d: Diagonal) -> Streamed:
    d = linalg.scale(d, 1 / op.level)
    return replace(op, diag=d if op.diag is None else linalg.shift(op.diag, d))


@linalg.mv.register
def _(op: Streamed, v: Tensor) -> Tensor:
    ranks = op.reads().ranks
    flat = ranks.same(v.reshape(-1, op.size), "vectors of a product")
    out = ranks.whole(op.gram(flat[ranks.share(len(flat))]), "a product")
    out = out if op.diag is None else out + op.d * flat
    return (op.level.detach() * out).reshape(v.shape)


@linalg.solve.register
def _(op: Streamed, b: Tensor) -> Tensor:
    scale, ranks = op.d.rsqrt(), op.reads().ranks
    right = ranks.same(scale * b.reshape(-1, op.size), "right-hand sides")
    u = ranks.whole(op.solved(right[ranks.share(len(right))]).x, "solutions")
    return (scale * u / op.level.detach()).reshape(b.shape)


@linalg.logdet.register
def _(op: Streamed) -> Tensor:
    return op.log_determinant.value + linalg.logdet_slope(op)


@linalg.logdet_slope.register
def _(op: Streamed) -> Tensor:
    """log|M| without its value at t = 1: p log t, and zero with the derivatives that the samples give."""
    out = op.size * op.level.log()
    w, d = op.weights, op.diag
    if d is not None and d.values.requires_grad:
        slope = d.counts().detach() - op.samples.gamma.mean(0)
        out = out + (slope * (d.values / d.values.detach()).log()).sum()
    if w.requires_grad:
        out = out + (op.samples.squares.mean(0) * (w - w.detach())).sum()  # w may be zero, or negative
    return out


@linalg.draw.register
def _(op: Streamed, n: int, generator: torch.Generator) -> Tensor:
    """Of noise of their own; the samples that predictions use are `op.spread`."""
    ranks = op.reads().ranks
    seed, own = ranks.seed(generator), op._own(n)
    prior = op._normal(own, seed + 1)
    u = op.sampled(op._noise(own, seed), prior, prior).x
    return ranks.whole(u, "draws") * (op.d * op.level.detach()).rsqrt()


@linalg.covariance.register
def _(op: Streamed, rows: Tensor) -> Tensor:
    return rows @ linalg.solve(op, rows).mT


@linalg.diagonal.register
def _(op: Streamed) -> Tensor:
    out = op.weights.detach() @ op.reads().diagonal()
    return op.level.detach() * (out if op.diag is None else out + op.d)


@linalg._traces.register
def _(op: Streamed, groups: Diagonal) -> Tensor:
    """By the base noise: E (RᵀW^½e)² = diag RᵀWR."""
    own = op.pulled(op.noise).square().sum(0, keepdim=True)
    squares = op.reads().ranks.total([own], "squares of the noise")[0] / op.plan.samples
    out = groups.sums(squares if groups.unit is None else squares / groups.unit)[0]
    out = out if op.diag is None else out + linalg.traces(op.precision(), groups)
    return op.level.detach() * out


@linalg.to_dense.register
def _(op: Streamed) -> Tensor:
    eye = torch.eye(op.size, dtype=torch.float64, device=op.level.device)
    return torch.cat([linalg.mv(op, some) for some in eye.split(op.plan.samples)])
