"""The Gaussian q(v) = N(m, S) nearest to the posterior of the tangent model h(x, v) = f(x, θ*) + J(x)(v − θ*), which
maximizes a lower bound of that model's evidence:

    L = Σ_n E[log p(y_n | f)] − KL(q ‖ N(m₀, A⁻¹)),      f ~ N(h(x_n, m), V_n),   V_n = J_n S J_nᵀ
    KL = ½ [‖m − m₀‖²_A + log|S⁻¹| − log|A| − Σ_n tr W_n V_n]

At its maximum S⁻¹ = A + Σ J_nᵀ W_n J_n with W_n = E[−∂² log p], and A (m − m₀) = Σ J_nᵀ E[∂ log p]. A step goes a
part t of the way to both, and is halved until L rises; t = 1 is Newton's. Laplace has W_n at one f, in place of its
mean. Where log p is quadratic in f, q is the posterior and L its evidence. Elsewhere q is as wide as the data leave it,
also where the network is sure: there W_n vanishes at f, and not on the average. (Opper and Archambeau 2009; Friston et
al. 2007, "variational Laplace".)

Expectations are by the nodes that predictions have. Shapes: m rows of outputs (one a position), c outputs, p weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lapwing import data as loading
from lapwing import given
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.errors import InvalidValue, NotConverged, Unsupported
from lapwing.operators import Dense, Diagonal, HeldRows, RootPlusDiagonal, linalg
from lapwing.outputs import Nodes, Normal, Outputs
from lapwing.outputs.points import psd_root
from lapwing.posterior import register
from lapwing.posterior.gaussian import Gaussian
from lapwing.predictive.integral import Integral
from lapwing.priors import check_independent
from lapwing.samplers.target import Target, targeted
from lapwing.shell import Fitted
from lapwing.tangent import TangentModel
from lapwing.tree import Layout
from lapwing.variational.posterior import Bound

SMALLEST = 2.0**-10  # part of a step: where none rises, L is at its maximum, to what nodes leave open


def tangent(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    prior: Any = 1.0,
    steps: int = 100,
    tolerance: float = 1e-8,
    subset: Any = "all",
    forward: Any = None,
    memory_budget: Any = 2**30,
    progress: bool = False,
) -> Fitted:
    """The nearest Gaussian of all weights together, in the tangent model; predictions are about h(x, m), its own mean.

    prior: Gaussian, as that of a tuned `lw.laplace`. J of all data is held in memory, within memory_budget bytes.
    tolerance: of the bound, relative, at which steps end. `post.diagnostics` has the bound at each step."""
    target = targeted(model, data, likelihood, prior, 1.0, subset, forward)
    _check(target)
    problem = _read(target, given.memory(memory_budget))
    here, t = problem.start, 1.0
    trace = [here.bound]
    for _ in tqdm(range(given.whole(steps, "steps", 1)), "variational", disable=not progress, leave=False):
        there, t = _risen(problem, here, min(1.0, 2 * t))
        if t < SMALLEST:
            break
        trace.append(there.bound)
        small = float(there.bound - here.bound) <= tolerance * max(1.0, abs(float(here.bound)))
        here = there
        if small:
            break
    else:
        raise NotConverged(
            f"the bound still rose by {float(trace[-1] - trace[-2]):.3g} in the last of {steps} steps; give more "
            "steps, or a larger tolerance"
        )
    root = problem.root(here.w)
    found = TangentVariational(target.joint.tangent, here.mean, problem.m0, root, problem.a, torch.stack(trace))
    return target.joint.fitted(found, "variational inference in the tangent model")


def _check(target: Target) -> None:
    likelihood, prior = target.joint.likelihood, target.joint.prior
    if not prior.gaussian:
        raise Unsupported(
            f"variational inference in the tangent model needs a Gaussian prior, and {type(prior).__name__} is none; "
            "use lw.variational.mean_field or layerwise"
        )
    check_independent(prior, "variational inference in the tangent model")
    if target.unknown:
        raise Unsupported(
            f"variational inference keeps the likelihood's {', '.join(target.unknown)} fixed; give a number, or sample "
            "it with lw.samplers.hmc"
        )
    if not likelihood.concave:
        raise Unsupported(
            f"{likelihood.name} is not concave in the network's outputs, so W may not be positive; use "
            "lw.variational.mean_field or layerwise"
        )


# -- the problem --------------------------------------------------------------------------------------------------


class Iterate(NamedTuple):
    """A q, and what follows from it."""

    mean: Tensor  # (p,)
    w: Tensor  # W (m, c, c)
    bound: Tensor  # L, 0-dim
    score: Tensor  # E[∂ log p] (m, c)
    curvature: Tensor  # E[−∂² log p] (m, c, c)


@dataclass(frozen=True, eq=False)
class TangentBound:
    """The tangent model at all data, with its prior."""

    likelihood: Any
    f: Tensor  # h at θ*, (m, c)
    y: Tensor
    rows: Tensor  # J (m, c, p)
    theta: Tensor  # θ* (p,)
    a: Tensor  # diag A (p,)
    m0: Tensor  # (p,)

    @cached_property
    def start(self) -> Iterate:
        """Laplace's q about θ*."""
        root = self.likelihood.scaled_root(self.f, self.y)
        return self.at(self.theta, root @ root.mT)

    def root(self, w: Tensor) -> Tensor:
        """R with RᵀR = Σ J_nᵀ W_n J_n, (m·c, p), or (p, p) where that is less."""
        r = torch.einsum("mcq,mcp->mqp", psd_root(w), self.rows).flatten(0, 1)
        return r if len(r) <= r.shape[1] else torch.linalg.qr(r, mode="r").R

    @cached_property
    def gram(self) -> Tensor:
        """K = J A⁻¹ Jᵀ (m·c, m·c)."""
        rows = self.rows.flatten(0, 1)
        return rows / self.a @ rows.mT

    def precision(self, w: Tensor) -> Primal | Dual:
        """S⁻¹, in the form that is smaller."""
        return (Dual if self.rows[..., 0].numel() < self.rows.shape[2] else Primal)(self, psd_root(w).mT)

    def at(self, mean: Tensor, w: Tensor, precision: Primal | Dual | None = None) -> Iterate:
        """The bound, and where it points. precision: that of w, where it is known."""
        precision = precision or self.precision(w)
        h, v = self.f + self.rows @ (mean - self.theta), precision.variances
        integral = Integral(self.likelihood, Normal(h, v))
        fit = integral.over(lambda one, some, rows: some.average(self._log_prob(one, some, rows)))
        score = integral.over(lambda one, some, rows: some.average(one.gradient(some.f, self._y(some, rows))))
        curvature = integral.over(self._curvature)
        price = (self.a * (mean - self.m0).square()).sum() + precision.log_ratio
        kl = 0.5 * (price - torch.einsum("mab,mab->", w, v))
        return Iterate(mean, w, fit.sum() - kl, score, curvature)

    def towards(self, here: Iterate, t: float) -> Iterate:
        """A part t of the way."""
        gradient = torch.einsum("mc,mcp->p", here.score, self.rows) - self.a * (here.mean - self.m0)
        w = torch.lerp(here.w, here.curvature, t)
        precision = self.precision(w)
        return self.at(here.mean + t * precision.solve(gradient), w, precision)

    def _y(self, some: Nodes, rows: Tensor) -> Tensor:
        return self.y[rows].expand(len(some.f), len(rows), *self.y.shape[1:])

    def _log_prob(self, likelihood: Any, some: Nodes, rows: Tensor) -> Tensor:
        y = self._y(some, rows)
        return likelihood.log_prob(some.f.flatten(0, 1), y.flatten(0, 1)).reshape(some.f.shape[:2])

    def _curvature(self, likelihood: Any, some: Nodes, rows: Tensor) -> Tensor:
        root = likelihood.scaled_root(some.f.flatten(0, 1), self._y(some, rows).flatten(0, 1))
        root = root.reshape(*some.f.shape, -1) * (0.5 * some.log_weight).exp()[..., None, None]  # (s, n, c, q)
        root = root.permute(1, 2, 0, 3).flatten(2)
        return root @ root.mT


@dataclass(frozen=True, eq=False)
class Primal:
    """S⁻¹ = A + JᵀWJ (p, p), with W = BᵀB."""

    problem: TangentBound
    b: Tensor  # B (m, q, c)

    @cached_property
    def factor(self) -> Tensor:
        """Its Cholesky factor."""
        r = (self.b @ self.problem.rows).flatten(0, 1)
        h = r.mT @ r
        return linalg.cholesky(h.diagonal_scatter(h.diagonal() + self.problem.a))[0]

    @property
    def log_ratio(self) -> Tensor:
        """log|S⁻¹| − log|A|."""
        return 2 * self.factor.diagonal().log().sum() - self.problem.a.log().sum()

    @property
    def variances(self) -> Tensor:
        """V_n = J_n S J_nᵀ (m, c, c)."""
        return torch.cat([self._variances(some) for some in self.problem.rows.split(64)])

    def _variances(self, rows: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, rows.flatten(0, 1).mT, upper=False).mT.reshape(rows.shape)
        return half @ half.mT

    def solve(self, g: Tensor) -> Tensor:
        """S g, (p,)."""
        return torch.cholesky_solve(g.unsqueeze(1), self.factor)[:, 0]


@dataclass(frozen=True, eq=False)
class Dual:
    """The same by M = I + B K Bᵀ (m·q, m·q): S = A⁻¹ − A⁻¹ JᵀBᵀ M⁻¹ B J A⁻¹."""

    problem: TangentBound
    b: Tensor  # B (m, q, c)

    @cached_property
    def product(self) -> Tensor:
        """B K (m·q, m·c)."""
        return (self.b @ self.problem.gram.unflatten(0, self.b.shape[::2])).flatten(0, 1)

    @cached_property
    def factor(self) -> Tensor:
        """Of M, by Cholesky."""
        m = torch.einsum("rmc,mqc->rmq", self.product.unflatten(1, self.b.shape[::2]), self.b).flatten(1)
        return linalg.cholesky(m.diagonal_scatter(m.diagonal() + 1))[0]

    @property
    def log_ratio(self) -> Tensor:
        """log|S⁻¹| − log|A|."""
        return 2 * self.factor.diagonal().log().sum()

    @property
    def variances(self) -> Tensor:
        """V_n = J_n S J_nᵀ (m, c, c)."""
        shape = self.b.shape[::2]  # m, c
        half = torch.linalg.solve_triangular(self.factor, self.product, upper=False).unflatten(1, shape)
        own = self.problem.gram.unflatten(1, shape).unflatten(0, shape).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        return own - torch.einsum("rma,rmb->mab", half, half)

    def solve(self, g: Tensor) -> Tensor:
        """S g, (p,)."""
        rows, a = self.problem.rows, self.problem.a
        seen = (self.b @ (rows @ (g / a)).unsqueeze(2)).flatten(0, 1)  # (m·q, 1)
        back = self.b.mT @ torch.cholesky_solve(seen, self.factor).reshape(*self.b.shape[:2], 1)  # (m, c, 1)
        return (g - back.flatten() @ rows.flatten(0, 1)) / a


def _precision(root: Tensor, a: Tensor) -> Any:
    """RᵀR + A, whichever form is smaller."""
    k, p = root.shape
    held = RootPlusDiagonal(HeldRows(root), Diagonal(root.new_ones(1), k)) if k < p else Dense(root.mT @ root)
    return linalg.shift(held, Diagonal(a, p))


def _risen(problem: TangentBound, here: Iterate, t: float) -> tuple[Iterate, float]:
    """A step up from here and its part, t at the most; less than SMALLEST where there is none."""
    while t >= SMALLEST:
        there = problem.towards(here, t)
        if float(there.bound) > float(here.bound):
            return there, t
        t /= 2
    return here, t


def _read(target: Target, budget: int) -> TangentBound:
    """Outputs and J at all data, by one pass."""
    joint = target.joint
    model, fs, ys, rows = joint.tangent, [], [], []
    p = model.layout.size
    for x, y in loading.passes(joint.batches, model.device):
        out = model(x)
        f = flat_outputs(out).to(torch.float64)
        size = 8 * joint.n * f.numel() // len(y) * p
        if size > budget:
            raise InvalidValue(
                f"J of all data takes {size / 1e9:.3g} GB, past memory_budget; raise it, give subset='last_layer', or "
                "use lw.variational.mean_field, which holds none"
            )
        fs.append(f)
        ys.append(flat_targets(joint.likelihood, out, y))
        rows.append(model.rows(x).to(torch.float64).reshape(*f.shape, p))
    theta = model.theta.to(torch.float64)
    precision, shift = joint.prior.quadratic(theta)
    a = precision.dense()
    return TangentBound(joint.likelihood, torch.cat(fs), torch.cat(ys), torch.cat(rows), theta, a, shift / a)


# -- what is found ------------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True, eq=False)
class TangentVariational:
    """N(m, (RᵀR + A)⁻¹) over the weights of the tangent model; outputs are about h(x, m)."""

    unsaved: ClassVar[tuple[str, ...]] = ("tangent",)  # by a network; not in files
    tangent: TangentModel
    mean: Tensor  # m (p,)
    prior_mean: Tensor  # (p,)
    root: Tensor  # R (k, p)
    prior_precision: Tensor  # diag A (p,)
    trace: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @cached_property
    def gaussian(self) -> Gaussian:
        """With its precision as an operator."""
        return Gaussian(self.tangent, self.mean, _precision(self.root, self.prior_precision))

    @property
    def layout(self) -> Layout:
        """Of the selected weights."""
        return self.tangent.layout

    @property
    def diagnostics(self) -> Bound:
        """The bound, without a sampling error, and its values at each step."""
        return Bound(self.trace[-1], torch.zeros_like(self.trace[-1]), self.trace)

    def outputs(self, x: Any, joint: bool = False) -> Outputs:
        """N(h(x, m), J S Jᵀ)."""
        return self.gaussian.outputs(x, joint, center=self.mean)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n weight vectors, (n, p)."""
        return self.gaussian.draw(n, generator)

    def __str__(self) -> str:
        return "a Gaussian of all weights"
