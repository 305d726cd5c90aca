"""Nyström features of the tangent kernel K = J A⁻¹ Jᵀ, and their sums over the data:

    K_MM = q diag(λ) qᵀ      the kernel at M anchors, rows of J at training inputs; its top k eigenpairs
    V = λ^-½ qᵀ J_M A⁻¹       (k, p), V A Vᵀ = I, and ψ(x) = J(x) Vᵀ (c, k), by k jvps: ψ ψᵀ ≈ K
    Σ_n ψ_nᵀ Λ_n ψ_n           (k, k), over all the data

Shapes: n data, c outputs, p parameters, k features, h curvature weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import tree
from lapwing.curvature import Accumulator, Factor, Full, Part, Probe, State, Structure, register
from lapwing.curvature.rows import StreamedRows
from lapwing.curvature.structure import Kept
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal, RootPlusDiagonal
from lapwing.packing import Expected
from lapwing.priors import Gaussian
from lapwing.push import pushed
from lapwing.tangent import TangentModel

TOGETHER = 32  # anchors whose rows are made at once
Features = Callable[[Any], tuple[Tensor, Tensor]]  # of inputs: f (n, ..., c) and ψ (k, n, ..., c)
LEAST = 1e-12  # of the largest eigenvalue, a dimension, below which one is rounding


@register
@dataclass(frozen=True, eq=False)
class Span(Structure):
    """The curvature within the span of some directions: what the loop over data needs to sum it, and a file to hold."""

    bound: ClassVar[str] = "upper"
    shell: ClassVar[str] = "ella"
    directions: Tensor  # V (k, p)
    precision: Tensor  # diag A, (p,)
    anchors: int  # rows
    share: float  # Σ_k λ / tr K at the anchors

    def __str__(self) -> str:
        return "ella"

    def to(self, device: torch.device) -> Span:
        """The same on a device."""
        return replace(self, directions=self.directions.to(device), precision=self.precision.to(device))

    def scale(self, prior: Gaussian) -> Tensor:
        """c, 0-dim, of a prior that is c times that of the features; differentiable."""
        return scale_of(prior, self.precision)

    def resolved(self, probe: Probe, factor: Factor) -> Span:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        return self

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        terms = len(likelihood.curvature_weights(factor.kind))
        return FeatureSum(tangent, self.features(tangent), len(self.directions), terms)

    def features(self, tangent: TangentModel) -> Features:
        """x -> f (n, ..., c) and ψ (k, n, ..., c), by k jvps."""
        return functools.partial(pushed, tangent, self.directions)

    def operator(self, state: State, weights: Tensor) -> Any:
        """Σ_h w_h Σ ψᵀΛ_hψ, (k, k): over coordinates z of the span, θ = θ* + z V."""
        return Full("primal").operator(state, weights)

    def keeps(self, layout: tree.Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        k, double = len(self.directions), torch.float64
        shapes = self.directions.shape == (k, layout.size) and self.precision.shape == (layout.size,)
        if not shapes or self.directions.dtype != double or self.precision.dtype != double:
            raise InvalidValue(f"directions {tuple(self.directions.shape)} are not (k, {layout.size}) in float64")
        if not bool(torch.isfinite(self.directions).all() and torch.isfinite(self.precision).all()):
            raise InvalidValue("directions hold NaN or infinite values")
        if parts or not (0 < k <= self.anchors and 0 < self.share <= 1 + 1e-6 and bool((self.precision > 0).all())):
            raise InvalidValue(f"{k} features of {self.anchors} anchors with a share of {self.share}")
        return {"gram": Expected(((terms, k, k),), squares=True, gram=True)}, {}

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, f"{len(self.directions)} directions of the whole network")


def scale_of(prior: Gaussian, precision: Tensor) -> Tensor:
    """c, 0-dim, of a prior that is c times one with this precision (p,); differentiable."""
    ratio = prior.operator().dense() / precision
    if not torch.allclose(ratio, ratio[0], rtol=1e-12, atol=0):
        raise InvalidValue("the features belong to this prior times any number; for others, fit again")
    return ratio.mean()


class FeatureSum:
    """Σ_n ψᵀ u uᵀ ψ, (h, k, k), in float64."""

    def __init__(self, tangent: TangentModel, features: Features, k: int, terms: int) -> None:
        self.tangent, self.made = tangent, features
        self.gram = torch.zeros(terms, k, k, dtype=torch.float64, device=tangent.device)

    def forward(self, x: Any) -> Tensor:
        """The outputs f (n, ..., c) of a batch."""
        f, self.features = self.made(x)  # (n, ..., c), (k, n, ..., c)
        return f

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add a batch: inputs x, targets y, outputs f (n, ..., c), cotangents u (n, K, ..., c) and the output of
        each column."""
        inner = torch.einsum("kna,nja->knj", self.features.flatten(2).double(), u.flatten(2).double())
        terms = len(self.gram)
        for h, total in enumerate(self.gram):
            mine = inner[..., h::terms].flatten(1)
            total += mine @ mine.mT
        del self.features

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        """The sums by their names, and the batches that are kept."""
        return {"gram": self.gram}, ()


@torch.no_grad()
def anchored(
    tangent: TangentModel,
    batches: Any,
    prior: Gaussian,
    seen: Probe,
    anchors: int,
    rank: int,
    budget: int,
    generator: torch.Generator,
    progress: bool,
) -> Span:
    """V from anchors that are drawn among all outputs of all examples, without replacement; the same on every rank."""
    ranks, each = loading.ranks_of(batches), seen.positions * seen.outputs
    start, n = _place(tangent, batches, seen)
    drawn = torch.randperm(n * each, generator=generator, device=generator.device)[:anchors].sort().values.cpu()
    with ranks.sharing_errors("the pass for anchors"):
        mine = list(_rows(tangent, batches, drawn - start * each, each, progress))
    kept = tuple(ranks.joined(mine, "anchors of ella"))
    if not kept:
        raise InvalidValue("the data gave no example in the pass for anchors; give a loader that can be read again")
    return _spanned(StreamedRows(tangent, kept, budget), prior, rank, ranks)


def _place(tangent: TangentModel, batches: Any, seen: Probe) -> tuple[int, int]:
    """How many examples the ranks before this one have, and how many all have."""
    ranks = loading.ranks_of(batches)
    if ranks.alone:
        return 0, seen.n - loading.dropped(batches)
    with ranks.sharing_errors("counting the examples of a rank"):
        own = loading.examples(batches)
        if own is None:
            own = sum(len(y) for _, y in loading.passes(batches, tangent.device))
    counts = ranks.gather(own - loading.dropped(batches), "the examples of each rank")
    return sum(counts[: ranks.rank]), sum(counts)


def _rows(
    tangent: TangentModel, batches: Any, drawn: Tensor, each: int, progress: bool
) -> Iterator[tuple[Any, Tensor]]:
    """Inputs and cotangents (m, 1, ..., c) of the rows that were drawn among these data's."""
    start = 0
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
            yield inputs, u.reshape(len(some), 1, *f.shape[1:])


def _spanned(rows: StreamedRows, prior: Gaussian, rank: int, ranks: Ranks) -> Span:
    """V (k, p) by the eigenvectors of the kernel at the anchors, which are rank 0's where ranks differ in them."""
    m = rows.shape[0]
    a = prior.operator()
    ones = Diagonal(torch.ones(1, dtype=torch.float64, device=a.values.device), m)
    kernel = RootPlusDiagonal(rows, ones, a)
    found = dict(zip(("values", "vectors"), torch.linalg.eigh(kernel.gram().detach()), strict=True))
    if not ranks.agrees(found):
        found = ranks.lead(found)
    values, vectors = found.values()
    if not bool(values[-1] > 0):
        raise InvalidValue("no output at the anchors depends on the selected weights, so ella has no feature")
    kept = min(rank, int((values > LEAST * m * values[-1]).sum()))
    values, vectors, total = values[-kept:].flip(0), vectors[:, -kept:].flip(1), values.clamp(min=0).sum()
    precision = a.dense().detach().clone()
    directions = kernel.transpose_times((vectors / values.sqrt()).mT) / precision
    return Span(ranks.same(directions, "ella's directions"), precision, m, float(values.sum() / total))
