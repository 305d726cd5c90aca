"""Streamed root plus diagonal: M = t·(Rᵀ W R + D), R known by products alone, each a pass over data.

Samples are solves of one system (system.py), of base noise that is drawn once (Eq. 13):

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

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.distributed import ALONE, Ranks
from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal
from lapwing.operators.system import OTHERS_VECTORS, System
from lapwing.solvers import Estimate, Solution, slq
from lapwing.solvers.estimate import FEWEST, mean_of
from lapwing.solvers.lanczos import SHORT
from lapwing.solvers.noise import generator_of

LANCZOS_VECTORS = 64  # that Lanczos keeps for each probe, where the memory budget has room for them
WORK_VECTORS = 10  # others that it holds for each


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


@dataclass(eq=False)
class Remembered:
    """Of R: the base noise, and what belongs to the last W and D, under a name for them."""

    noise: Tensor | None = None  # R_hᵀ e of this rank's samples, (h, k, p)
    samples: tuple[Any, Samples, Diagonal] | None = None  # with D
    logdet: tuple[Any, Estimate] | None = None  # log|M| at t = 1


@dataclass(frozen=True, eq=False)
class Streamed(System):
    """M = t·(RᵀWR + D), with R by passes over the data."""

    level: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))  # t
    memo: Remembered = field(default_factory=Remembered)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A name for W and D."""
        d = self.precision()
        index = None if d.index is None else hash(d.index.cpu().numpy().tobytes())
        return tuple(self.weights.tolist()), tuple(d.values.tolist()), index, d.unit_key

    @property
    def known(self) -> Samples | None:
        """The samples, if they were solved for."""
        last = self.memo.samples
        return last[1] if last is not None and last[0] == self.key else None

    @property
    def known_logdet(self) -> Estimate | None:
        """log|M| at t = 1, if it was estimated."""
        last = self.memo.logdet
        return last[1] if last is not None and last[0] == self.key else None

    @cached_property
    def samples(self) -> Samples:
        """The planned number of draws, of the same base noise for every W and D."""
        if self.known is not None:
            return self.known
        last = self.memo.samples
        root, plan = self.reads(), self.plan
        before, prior = root.passes, self._normal(self._own(plan.samples), plan.seed + 1)
        start = prior if last is None else last[2].dense().sqrt() * last[1].share(root.ranks)
        solution = self.sampled(self.noise, prior, start)
        z = self.d.rsqrt() * solution.x
        groups = z.split(self.groups(len(z), 1, OTHERS_VECTORS))
        made = [root.product(some, self.weights.detach()) for some in groups]
        gz, squares = (torch.cat(parts) for parts in zip(*made, strict=True))
        gamma = root.ranks.whole(self.precision().sums(z * gz), "effective dimensions")
        squares = root.ranks.whole(squares, "squares of samples")
        how = float(solution.residual.max()), solution.steps, root.passes - before, plan.solver, self.close[1]
        found = Samples(z, gamma, squares, *how, root.ranks)
        self.remember(found)
        return found

    @property
    def noise(self) -> Tensor:
        """R_hᵀ e of this rank's samples, (h, k, p): one pass, and then for every W and D."""
        if self.memo.noise is None:
            self.memo.noise = self._noise(self._own(self.plan.samples), self.plan.seed)
        return self.memo.noise

    def _noise(self, columns: Tensor, seed: int) -> Tensor:
        h = len(self.weights)
        groups = columns.split(self.groups(len(columns), h, 2 * h))
        return torch.cat([self.reads().noise(some, seed) for some in groups], 1)

    def _own(self, k: int) -> Tensor:
        """Which of k columns are this rank's."""
        return torch.arange(k)[self.reads().ranks.share(k)]

    def sampled(self, noise: Tensor, prior: Tensor, start: Tensor) -> Solution:
        """The solve of a sample. Where the data say little, b is nearly all prior noise e₀, and relative to it the
        start e₀ would pass for the answer: the residual is relative to the data's part of b."""
        pulled, b = self.right(noise, 0 * prior), self.right(noise, prior)
        shares = self.reads().ranks.whole(pulled.norm(dim=-1) / b.norm(dim=-1), "shares of the data")
        share = float(shares.min().clamp(1e-12, 1.0))
        found = self.solved(b, start, share)
        return replace(found, residual=found.residual / share)

    def remember(self, samples: Samples) -> None:
        """Take these as the samples of this W and D, and start from them where others are asked for."""
        self.memo.samples = self.key, samples, self.precision()

    def remember_logdet(self, found: Estimate) -> None:
        """Take this as log|M| of this W and D, at t = 1."""
        self.memo.logdet = self.key, found

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
        return replace(self, memo=replace(self.memo, samples=(self.key, whole, self.precision())))

    # -- log|M| -----------------------------------------------------------------------------------------------------

    @cached_property
    def log_determinant(self) -> Estimate:
        """log|M| at t = 1, by as many probes as there are samples, in groups that fit the memory budget; where not even
        the Lanczos vectors of the fewest do, only the last ones are kept."""
        if self.known_logdet is not None:
            return self.known_logdet
        close, plan, ranks = self.close[0], self.plan, self.reads().ranks
        k, room = max(FEWEST, plan.samples), plan.memory_budget // (8 * self.size)  # probes, vectors
        at_once = self.at_once(LANCZOS_VECTORS, OTHERS_VECTORS)
        groups = torch.arange(k).tensor_split(max(1, min(k // FEWEST, -(-k // at_once))))
        own = -(-len(groups[0]) // ranks.size)  # probes of a group, at the most
        window = max(SHORT, (room - OTHERS_VECTORS * (len(groups[0]) - own)) // own - WORK_VECTORS)

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

        how = inner, plan.max_steps, window, whole
        with ranks.sharing_errors("the log-determinant"):
            found = [slq(step, starts(some), torch.log, *how)[0] for some in groups]
        out = mean_of(torch.cat([one.samples for one in found]) + linalg.logdet(close))
        self.remember_logdet(out)
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


@linalg.traces.register
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


linalg.log_determinant.register(Streamed, lambda op: op.log_determinant)
linalg.gathered.register(Streamed, Streamed.gathered)
linalg.by_samples.register(Streamed, lambda op: True)


@linalg.kept_draws.register
def _(op: Streamed, n: int) -> Tensor | None:
    return op.first(n) if n <= op.plan.samples else None
