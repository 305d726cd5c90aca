"""ELLA, the linearized Laplace approximation by Nyström features of the tangent kernel K = J A⁻¹ Jᵀ:

    K_MM = q diag(λ) qᵀ      the kernel at M anchors, rows of J at training inputs; its top k eigenpairs
    V = λ^-½ qᵀ J_M A⁻¹       (k, p), and ψ(x) = J(x) Vᵀ (c, k), by k jvps: ψ ψᵀ ≈ K
    G = Σ_n ψ_nᵀ Λ_n ψ_n + I    over all the data
    f(x) ~ N(f(x, θ*), ψ G⁻¹ ψᵀ)

With all rows as anchors and their full rank it is the exact linearized Laplace approximation wherever J(x) lies in the
span of the data's rows. What lies outside of it has no variance at all, unlike with structure="lowrank": error bars far
from the data are too small. Source: Deng, Zhou and Zhu 2022, who sum G over a part of the data, chosen by validation;
here it is summed over all. Shapes: n data, c outputs, p parameters, k features, h curvature weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import given, tree
from lapwing.arguments import as_budget, as_likelihood, as_prior, as_tangent
from lapwing.curvature import Accumulator, Factor, Part, Probe, State, Structure, accumulate, probe
from lapwing.curvature.rows import StreamedRows
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal, RootPlusDiagonal, linalg
from lapwing.outputs import Normal
from lapwing.predictive import Prediction
from lapwing.priors import Gaussian
from lapwing.push import pushed
from lapwing.tangent import TangentModel

TOGETHER = 32  # anchors whose rows are made at once
LEAST = 1e-12  # of the largest eigenvalue, a dimension, below which one is rounding


@torch.inference_mode(False)
def ella(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    anchors: int = 2_000,
    rank: int = 20,
    prior: Any = 1.0,
    subset: Any = "all",
    forward: Any = None,
    memory_budget: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Ella:
    """Fit ELLA by two passes over the data: one for its anchors, one for G.

    anchors: how many rows of the Jacobian (an output of an example each) are drawn from the data, without replacement.
    rank: how many features are made of them. The other arguments are those of `lw.laplace`.
    """
    anchors, rank = given.whole(anchors, "anchors of ella", 1), given.whole(rank, "the rank of ella", 1)
    budget, likelihood, batches = as_budget(memory_budget), as_likelihood(likelihood), loading.as_batches(data)
    tangent = as_tangent(model, batches, subset, forward)
    bound = as_prior(prior, tangent.layout, tangent.device)
    if not isinstance(bound, Gaussian):
        raise Unsupported(f"ella's features need a Gaussian prior, and {type(bound).__name__} is none; use a precision")
    if hasattr(bound, "at"):
        raise Unsupported("ella's prior cannot look at the curvature; use a precision or 'layerwise', not 'gprior'")
    seen = probe(tangent, batches, likelihood)
    generator = generator or torch.Generator().manual_seed(0)
    rows = StreamedRows(tangent, _anchors(tangent, batches, seen, anchors, generator, progress), budget)
    directions, share = _directions(rows, bound, rank)
    likelihood = likelihood.to(tangent.device)
    state = accumulate(Span(directions), tangent, likelihood, batches, "exact", progress=progress, seen=seen)
    if state.n != seen.n - loading.dropped(batches):
        raise InvalidValue(
            f"the data gave {seen.n - loading.dropped(batches)} examples in one pass and {state.n} in another; give a "
            "loader that holds the same examples in every pass"
        )
    return Ella(state, bound, likelihood, rows.shape[0], share)


@dataclass(frozen=True, eq=False, repr=False)
class Ella:
    """A network with a Gaussian process over its outputs, of finite rank. Frozen."""

    state: State  # Σ ψᵀΛψ at unit noise
    prior: Gaussian
    likelihood: Likelihood
    anchors: int  # rows
    share: float  # Σ_k λ / tr K at the anchors

    @property
    def tangent(self) -> TangentModel:
        """The network as a function of its selected weights."""
        return self.state.tangent

    @property
    def directions(self) -> Tensor:
        """V (k, p), orthonormal in the prior's precision: V A Vᵀ = I."""
        return self.state.structure.directions  # type: ignore[attr-defined]

    @cached_property
    def precision(self) -> Tensor:
        """G, (k, k)."""
        weights = self.likelihood.curvature_weights().to(self.tangent.device).detach()
        gram = torch.einsum("h,hab->ab", weights.expand(self.state.weights), self.state.sums["gram"])
        return gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def predict(self, x: Any, link: str = "auto", joint: bool = False) -> Prediction:
        """Predict with error bars; the arguments are those of `Laplace.predict`."""
        inputs = tree.moved(loading.inputs_of(x), self.tangent.device)
        loading.check_finite(inputs, "the inputs")
        if any(t.ndim and not len(t) for t in tree.tensors(inputs)):
            raise InvalidValue("the inputs hold no example to predict at; give at least one")
        f, features = pushed(self.tangent, self.directions, inputs)  # (n, ..., c), (k, n, ..., c)
        if joint and f.ndim != 2:
            raise InvalidValue(f"joint=True needs outputs (n, c), got {tuple(f.shape)}")
        factor, _ = linalg.cholesky(self.precision)
        half = torch.linalg.solve_triangular(factor, features.flatten(1).to(factor), upper=False)
        half = half.reshape(features.shape)
        cov = torch.einsum("kna,kmb->namb" if joint else "k...a,k...b->...ab", half, half)
        return Prediction(self.likelihood.plain, Normal(f, cov.to(f), joint), link)

    def __call__(self, x: Any) -> Prediction:
        return self.predict(x)

    def replace(self, prior: Any = None, likelihood: Any = None) -> Ella:
        """The same features under another noise, or a prior that is this one times a number: no pass."""
        new = self if likelihood is None else replace(self, likelihood=self._likelihood(likelihood))
        if prior is None:
            return new
        bound = as_prior(prior, self.state.layout, self.tangent.device)
        if not isinstance(bound, Gaussian):
            raise Unsupported(f"ella needs a Gaussian prior, and {type(bound).__name__} is none; use a precision")
        if hasattr(bound, "at"):
            raise Unsupported("ella's prior cannot look at the curvature; use a precision or 'layerwise', not 'gprior'")
        ratio = bound.operator().dense() / self.prior.operator().dense()
        if not torch.allclose(ratio, ratio[0], rtol=1e-12, atol=0):
            raise InvalidValue("ella's features belong to this prior times any number; for others, fit again")
        c = ratio[0].detach()
        sums = {"gram": self.state.sums["gram"] / c}
        state = replace(self.state, structure=Span(self.directions / c.sqrt()), sums=sums)
        return replace(new, prior=bound, state=state)

    def _likelihood(self, likelihood: Any) -> Likelihood:
        found = as_likelihood(likelihood).to(self.tangent.device)
        if found.kind != self.state.likelihood or len(found.curvature_weights()) not in (1, self.state.weights):
            raise InvalidValue(f"ella was fitted for {self.state.likelihood}, and cannot serve {found}; fit again")
        return found

    def __repr__(self) -> str:
        return (
            f"Ella({self.likelihood.name}; rank {len(self.directions)} with {100 * self.share:.1f} % of the kernel at "
            f"{self.anchors:,} anchors; {self.state.layout.size:,} parameters, {self.state.n:,} examples)"
        )


@dataclass(frozen=True, eq=False)
class Span(Structure):
    """The curvature within the span of some directions, V G Vᵀ: what the loop over data needs to sum it."""

    directions: Tensor  # V (k, p)

    def __str__(self) -> str:
        return "ella"

    def resolved(self, probe: Probe, factor: Factor) -> Span:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        return self

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        return FeatureSum(tangent, self.directions, len(likelihood.curvature_weights(factor.kind)))

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, f"{len(self.directions)} directions of the whole network")


class FeatureSum:
    """Σ_n ψᵀ u uᵀ ψ, (h, k, k), in float64."""

    def __init__(self, tangent: TangentModel, directions: Tensor, weights: int) -> None:
        self.tangent, self.directions = tangent, directions
        k = len(directions)
        self.gram = torch.zeros(weights, k, k, dtype=torch.float64, device=tangent.device)

    def forward(self, x: Any) -> Tensor:
        """The outputs f (n, ..., c) of a batch."""
        f, self.features = pushed(self.tangent, self.directions, x)  # (n, ..., c), (k, n, ..., c)
        return f

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add a batch: inputs x, targets y, outputs f (n, ..., c), cotangents u (n, K, ..., c) and the output of
        each column."""
        inner = torch.einsum("kna,nja->knj", self.features.flatten(2).double(), u.flatten(2).double())
        weights = len(self.gram)
        for h, total in enumerate(self.gram):
            mine = inner[..., h::weights].flatten(1)
            total += mine @ mine.mT
        del self.features

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        """The sums by their names, and the batches that are kept."""
        return {"gram": self.gram}, ()


def _anchors(
    tangent: TangentModel, batches: Any, seen: Probe, anchors: int, generator: torch.Generator, progress: bool
) -> tuple[tuple[Any, Tensor], ...]:
    """Inputs and cotangents (m, 1, ..., c) of the rows that were drawn, among all outputs of all examples."""
    each = seen.positions * seen.outputs
    n = seen.n - loading.dropped(batches)
    drawn = torch.randperm(n * each, generator=generator, device=generator.device)[:anchors].sort().values.cpu()
    kept, start = [], 0
    for x, y in loading.passes(batches, tangent.device, progress, "anchors"):
        loading.check_finite(x, "the inputs")
        stop = start + len(y) * each
        mine = drawn[(drawn >= start) & (drawn < stop)] - start
        start = stop
        if not len(mine):
            continue
        if not tangent.separable(x):
            raise InvalidValue(
                "ella takes single examples as anchors, and the inputs of this network cannot be cut into examples; "
                "use structure='lowrank'"
            )
        for some in mine.to(tangent.device).split(TOGETHER):
            inputs = tree.map_tensors(functools.partial(torch.index_select, dim=0, index=some // each), x)
            f = tangent(inputs)
            if f[0].numel() != each:
                raise InvalidValue(
                    f"ella draws among {each} outputs an example, and a batch has {f[0].numel()}; give inputs of one "
                    "length"
                )
            u = nn.functional.one_hot(some % each, each).to(f)
            kept.append((inputs, u.reshape(len(some), 1, *f.shape[1:])))
    if not kept:
        raise InvalidValue("the data gave no example in the pass for anchors; give a loader that can be read again")
    return tuple(kept)


@torch.no_grad()
def _directions(rows: StreamedRows, prior: Gaussian, rank: int) -> tuple[Tensor, float]:
    """V (k, p), and the share of the kernel's trace at the anchors that it has."""
    m = rows.shape[0]
    a = prior.operator()
    ones = Diagonal(torch.ones(1, dtype=torch.float64, device=a.values.device), m)
    kernel = RootPlusDiagonal(rows, ones, a)
    values, vectors = torch.linalg.eigh(kernel.gram().detach())
    if not bool(values[-1] > 0):
        raise InvalidValue("no output at the anchors depends on the selected weights, so ella has no feature")
    kept = min(rank, int((values > LEAST * m * values[-1]).sum()))
    values, vectors, total = values[-kept:].flip(0), vectors[:, -kept:].flip(1), values.clamp(min=0).sum()
    directions = kernel.transpose_times((vectors / values.sqrt()).mT) / a.dense().detach()
    return directions, float(values.sum() / total)
