"""The one loop over data: batches in, a State out, for every structure and every output factor.

A structure gives an *accumulator*, mutable only inside this loop:

    forward(x) -> f              run the network on a batch
    observe(x, y, f, u, column)  add Σ_n J_nᵀ u_n u_nᵀ J_n for cotangents u (n, K, ..., c)
    finish() -> (sums, batches)  what the State keeps
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import tree
from lapwing.curvature.factor import Factor, cotangents, output_factor
from lapwing.curvature.parts import Part
from lapwing.curvature.state import State
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

FEW = 4  # examples that a probe keeps
BUDGET = 2**30  # bytes of working memory, unless the user says otherwise


class Accumulator(Protocol):
    def forward(self, x: Any) -> Tensor: ...

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None: ...

    def finish(self) -> tuple[dict[str, Tensor], tuple[tuple[Any, Tensor], ...]]: ...


class Structure(Protocol):
    """A frozen dataclass that says how G is stored."""

    def resolved(self, probe: Probe, factor: Factor) -> Any:
        """Itself, with every automatic choice made."""
        ...

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """A structure of two passes has `first`, the structure of the first, and takes its state as `basis` here."""
        ...

    def operator(self, state: State, weights: Tensor) -> Any:
        """Σ_g w_g G_g as an operator, without the prior."""
        ...

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each selected parameter is treated."""
        ...


@dataclass(frozen=True)
class Probe:
    """What one batch tells about a problem."""

    n: int  # examples in all
    positions: int
    outputs: int
    parameters: int
    inputs: Any  # a few examples of the first batch


@torch.inference_mode(False)
def probe(tangent: TangentModel, batches: Iterable[Any]) -> Probe:
    """Look at the first batch, and count the examples (by a pass, where the data cannot tell)."""
    first = next(iter(loading.passes(batches, tangent.device)))[0]
    if tangent.separable(first):
        first = tree.rows_of(first, slice(0, FEW))
    f = tangent(first)
    n = loading.examples(batches)
    if n is None:
        n = sum(len(y) for _, y in loading.passes(batches, tangent.device, label="counting"))
    return Probe(n, f[0, ..., 0].numel(), f.shape[-1], tangent.layout.size, first)


@torch.inference_mode(False)
def accumulate(
    structure: Any,
    tangent: TangentModel,
    likelihood: Likelihood,
    data: Any,
    factor: Factor | str = "exact",
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    seen: Probe | None = None,
    basis: State | None = None,
) -> State:
    """Accumulate the curvature of a network over data in one pass, or in two where the structure says so.

    basis: for a structure of two passes, a state whose basis to use in place of a first pass: states add only in a
    shared one."""
    factor = Factor(factor) if isinstance(factor, str) else factor
    generator = generator or torch.Generator().manual_seed(0)
    batches = loading.as_batches(data)
    weights = likelihood.curvature_weights(factor.kind)
    seen = seen or probe(tangent, batches)
    structure = structure.resolved(seen, factor)
    first = getattr(structure, "first", None)
    if first is None and basis is not None:
        raise InvalidValue(f"basis= is for structures of two passes, such as 'ekfac'; got structure {structure}")
    if hasattr(structure, "streamed"):  # it keeps a reference to the data, and no sums of its own
        return structure.streamed(tangent, likelihood, batches, generator=generator, progress=progress, seen=seen)
    if first is not None:
        if basis is None:
            basis = accumulate(
                first, tangent, likelihood, batches, factor, generator=generator, progress=progress, seen=seen
            )
        accumulator = structure.start(tangent, likelihood, factor, seen, basis)
        del basis  # its memory, before the second pass
    else:
        accumulator = structure.start(tangent, likelihood, factor, seen)
    n, targets_seen, statistics = 0, 0, {}  # type: ignore[var-annotated]
    each = 4 * factor.columns(seen.outputs, seen.positions) * seen.positions * seen.outputs  # bytes of u, an example
    size = max(1, getattr(structure, "memory_budget", BUDGET) // 4 // each)
    for x, y in _pieces(tangent, loading.passes(batches, tangent.device, progress, str(structure)), size):
        loading.check_finite(x, "the inputs")
        f = accumulator.forward(x)
        _check_outputs(f, y)
        flat, targets = flat_outputs(f), flat_targets(f, y)
        likelihood.validate(flat, targets)
        for key, value in likelihood.statistics(flat, targets).items():
            statistics[key] = statistics[key] + value if key in statistics else value
        S = (
            flat.new_zeros(len(flat), 1, 1)
            if factor.kind == "hessian"
            else output_factor(factor, likelihood, flat, targets, generator)
        )
        u, column = cotangents(factor, S, len(f))
        accumulator.observe(x, y, f, u.reshape(*u.shape[:2], *f.shape[1:]) if factor.kind != "hessian" else u, column)
        n += len(f)
        targets_seen = (targets_seen + tree.digest(y)) % 2**64
    sums, kept = accumulator.finish()
    parts = getattr(accumulator, "parts", ())
    return State(
        structure=structure,
        factor=factor,
        likelihood=likelihood.name,
        weights=len(weights),
        tangent=tangent,
        fingerprints=tangent.fingerprints(),
        n=n,
        statistics=statistics,
        sums=sums,
        basis=getattr(accumulator, "basis", {}),
        batches=kept,
        parts=parts,
        coverage=structure.coverage(parts, tangent),
        targets=targets_seen,
    )


def _pieces(tangent: TangentModel, batches: Iterable[Any], size: int) -> Iterator[tuple[Any, Any]]:
    """Batches of at most `size` examples, where they can be cut: cotangents are as many as outputs."""
    for x, y in batches:
        if not isinstance(y, Tensor) or len(y) <= size or not tangent.separable(x):
            yield x, y
        else:
            for start in range(0, len(y), size):
                index = slice(start, start + size)
                yield tree.rows_of(x, index), y[index]


def flat_outputs(f: Tensor) -> Tensor:
    """Outputs (n, ..., c) as rows (n·q, c), in float32 or better."""
    return f.reshape(-1, f.shape[-1]).to(torch.promote_types(f.dtype, torch.float32))


def flat_targets(f: Tensor, y: Tensor) -> Tensor:
    """Targets with their positions flattened like the outputs'; shapes that do not fit are left for validate."""
    if y.shape == f.shape:
        return y.reshape(-1, f.shape[-1])
    return y.reshape(-1) if y.shape == f.shape[:-1] else y


def _check_outputs(f: Tensor, y: Any) -> None:
    if not isinstance(y, Tensor):
        raise InvalidValue(f"targets must be a tensor, got {type(y).__name__}")
    if f.shape[0] != (y.shape[0] if y.ndim else 0):
        raise InvalidValue(f"the model gives {f.shape[0]} outputs for {tuple(y.shape)} targets; batch sizes must agree")
    if not torch.isfinite(f).all():
        raise InvalidValue("the network's outputs hold NaN or infinite values; check weights and inputs")
