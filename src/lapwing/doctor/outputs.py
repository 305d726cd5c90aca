"""What one run of the model says: are its outputs sound, and do they and the targets match the likelihood?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature.accumulate import check_targets, flat_outputs, flat_targets
from lapwing.curvature.applied import applied
from lapwing.doctor.reading import Excerpt
from lapwing.doctor.report import Finding, error, note, ok, warning
from lapwing.errors import LapwingError
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

ENOUGH = 32  # values before a range is called suspicious


def output_checks(tangent: TangentModel, f: Tensor, x: Any) -> Iterator[Finding]:
    """The function itself: finite, the same each time, one example at a time."""
    if not bool(torch.isfinite(f).all()):
        yield error("outputs: the network's outputs hold NaN or infinite values; check weights and inputs")
        return
    eps, scale = torch.finfo(f.dtype).eps, float(f.abs().max())
    rounding = min(1e3 * eps, 0.05) * scale
    if float((tangent(x) - f).abs().max()) > rounding:
        yield error(
            "outputs: two runs on the same batch differ, so the network is random in eval mode too (functional dropout "
            "with training=True, a noise layer?); switch that off"
        )
        return
    apart = _apart(tangent, f, x)
    if apart > rounding:
        yield warning(
            f"outputs: outputs change by {apart:.2g} when half the batch is left out: they depend on the other "
            "examples (batch statistics?), and so will every result on how the data are cut; use running statistics"
        )
    spread = flat_outputs(f)
    if len(spread) > 1:
        still = (spread.amax(0) - spread.amin(0)) <= 10 * eps * scale
        if bool(still.all()):
            yield warning(
                "outputs: the outputs are the same for every example; the network ignores its inputs (dead units?)"
            )
        elif bool(still.any()):
            yield note(f"outputs: {int(still.sum())} of {still.numel()} outputs do not depend on the input")


def _apart(tangent: TangentModel, f: Tensor, x: Any) -> float:
    """How far outputs move when half of the batch is left out; 0 where it cannot be cut (a graph)."""
    half = len(f) // 2
    try:
        if not half or tree.batch_size(x) != len(f):
            return 0.0
        part = tangent(tree.rows_of(x, slice(0, half)))
    except (RuntimeError, IndexError, ValueError):
        return 0.0
    return float((part - f[:half]).abs().max()) if part.shape == f[:half].shape else 0.0


def likelihood_checks(
    tangent: TangentModel, likelihood: Likelihood, outputs: list[Tensor], sample: Excerpt
) -> Iterator[Finding]:
    """`outputs` are those of the batches of sample.spread."""
    f = outputs[0]
    found = [*_link(tangent, likelihood, f, sample.spread[0][0]), *_targets(likelihood, outputs, sample)]
    yield from found
    if not any(finding.severity in ("error", "warning") for finding in found):
        shape = "(n, " + "".join(f"{s}, " for s in f.shape[1:])[:-2] + ")"
        yield ok(f"likelihood: outputs {shape} and targets suit {likelihood.name}")


def _link(tangent: TangentModel, likelihood: Likelihood, outputs: Tensor, x: Any) -> Iterator[Finding]:
    """A softmax or sigmoid applied by the network that the likelihood applies again."""
    f = flat_outputs(outputs)
    sure, words = applied(tangent, likelihood, f, x)
    if words:
        yield (error if sure else warning)(f"likelihood: {words}")
    elif likelihood.response == "softmax" and not likelihood.quadratic and f.shape[-1] > 1 and _log_softmax(f):
        yield note(
            "likelihood: the outputs are log-probabilities (log_softmax is applied); curvature and evidence are the "
            "same, but link='probit' sees other variances: prefer logits, the default link, or link='probit_centered'"
        )


def _log_softmax(f: Tensor) -> bool:
    return bool((torch.logsumexp(f, -1).abs() < min(1e3 * torch.finfo(f.dtype).eps, 0.1)).all())


def _targets(likelihood: Likelihood, outputs: list[Tensor], sample: Excerpt) -> Iterator[Finding]:
    for f, (_, y) in zip(outputs, sample.spread, strict=True):
        if not isinstance(y, Tensor):
            yield error(f"targets: targets must be a tensor, got {type(y).__name__}")
            return
        if y.ndim == 0 or y.shape[0] != f.shape[0]:
            yield error(
                f"targets: the model gives {len(f)} outputs for targets of shape {tuple(y.shape)}; batch sizes must "
                "agree"
            )
            return
        try:
            check_targets(likelihood, f, y)
        except LapwingError as refusal:
            yield error(f"targets: {refusal}")
            return
    yield from _every_label(likelihood, outputs[0], sample)


def _every_label(likelihood: Likelihood, f: Tensor, sample: Excerpt) -> Iterator[Finding]:
    """Targets that lie in memory are held to the likelihood to the last, unless a collate function changes them."""
    few, every = sample.spread[0][1], sample.labels
    if every is not None and (every.dtype, every.shape[1:]) == (few.dtype, few.shape[1:]):
        rows = flat_targets(likelihood, f[:1].expand(len(every), *f.shape[1:]), every)
        try:
            likelihood.validate(flat_outputs(f)[:1].expand(len(rows), -1).to(every.device), rows)
        except LapwingError as refusal:
            yield error(f"targets: {refusal}")
            return
    seen = every if every is not None else torch.cat([y.reshape(-1) for _, y in sample.spread])
    said = likelihood.target_note(seen.reshape(-1), f.shape[-1])
    if said:
        yield note(f"targets: {said}")
