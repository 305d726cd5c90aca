"""What one run of the model says: are its outputs sound, and do they and the targets match the likelihood?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.applied import applied
from lapwing.doctor.reading import Sample
from lapwing.doctor.report import Finding
from lapwing.errors import LapwingError
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

ENOUGH = 32  # values before a range is called suspicious
LABELED = ("categorical", "dirichlet")  # by name: one integer label a row


def output_checks(tangent: TangentModel, f: Tensor, x: Any) -> Iterator[Finding]:
    """The function itself: finite, the same each time, one example at a time."""
    if not bool(torch.isfinite(f).all()):
        yield Finding("error", "outputs", "the network's outputs hold NaN or infinite values; check weights and inputs")
        return
    eps, scale = torch.finfo(f.dtype).eps, float(f.abs().max())
    rounding = min(1e3 * eps, 0.05) * scale
    if float((tangent(x) - f).abs().max()) > rounding:
        message = (
            "two runs on the same batch differ, so the network is random in eval mode too (functional dropout with "
            "training=True, a noise layer?); switch that off"
        )
        yield Finding("error", "outputs", message)
        return
    apart = _apart(tangent, f, x)
    if apart > rounding:
        message = (
            f"outputs change by {apart:.2g} when half the batch is left out: they depend on the other examples "
            "(batch statistics?), and so will every result on how the data are cut; use running statistics"
        )
        yield Finding("warning", "outputs", message)
    spread = flat_outputs(f)
    if len(spread) > 1:
        still = (spread.amax(0) - spread.amin(0)) <= 10 * eps * scale
        if bool(still.all()):
            message = "the outputs are the same for every example; the network ignores its inputs (dead units?)"
            yield Finding("warning", "outputs", message)
        elif bool(still.any()):
            message = f"{int(still.sum())} of {still.numel()} outputs do not depend on the input"
            yield Finding("note", "outputs", message)


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
    tangent: TangentModel, likelihood: Likelihood, outputs: list[Tensor], sample: Sample
) -> Iterator[Finding]:
    """`outputs` are those of the batches of sample.spread."""
    f = outputs[0]
    found = [*_link(tangent, likelihood, f, sample.spread[0][0]), *_targets(likelihood, outputs, sample)]
    yield from found
    if not any(finding.severity in ("error", "warning") for finding in found):
        shape = "(n, " + "".join(f"{s}, " for s in f.shape[1:])[:-2] + ")"
        yield Finding("ok", "likelihood", f"outputs {shape} and targets suit {likelihood.name}")


def _link(tangent: TangentModel, likelihood: Likelihood, outputs: Tensor, x: Any) -> Iterator[Finding]:
    """A softmax or sigmoid applied by the network that the likelihood applies again."""
    f = flat_outputs(outputs)
    sure, words = applied(tangent, likelihood, f, x)
    if words:
        yield Finding("error" if sure else "warning", "likelihood", words)
    elif likelihood.response == "softmax" and not likelihood.quadratic and f.shape[-1] > 1 and _log_softmax(f):
        message = (
            "the outputs are log-probabilities (log_softmax is applied); curvature and evidence are the same, but "
            "link='probit' sees other variances: prefer logits, the default link, or link='probit_centered'"
        )
        yield Finding("note", "likelihood", message)


def _log_softmax(f: Tensor) -> bool:
    return bool((torch.logsumexp(f, -1).abs() < min(1e3 * torch.finfo(f.dtype).eps, 0.1)).all())


def _targets(likelihood: Likelihood, outputs: list[Tensor], sample: Sample) -> Iterator[Finding]:
    for f, (_, y) in zip(outputs, sample.spread, strict=True):
        if not isinstance(y, Tensor):
            yield Finding("error", "targets", f"targets must be a tensor, got {type(y).__name__}")
            return
        if y.ndim == 0 or y.shape[0] != f.shape[0]:
            message = f"the model gives {len(f)} outputs for targets of shape {tuple(y.shape)}; batch sizes must agree"
            yield Finding("error", "targets", message)
            return
        try:
            likelihood.validate(flat_outputs(f), flat_targets(f, y))
        except LapwingError as error:
            yield Finding("error", "targets", f"{error}{_target_hint(likelihood, f, y)}")
            return
    yield from _every_label(likelihood, outputs[0].shape[-1], sample)


def _target_hint(likelihood: Likelihood, f: Tensor, y: Tensor) -> str:
    whole = y.is_floating_point() and bool((y == y.round()).all())
    if likelihood.name in LABELED:
        if y.shape == f.shape and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(-1) == 1).all()):
            return ". They are one-hot: give y.argmax(-1)"
        if y.is_floating_point() and not whole:
            return ". They look like regression targets: use likelihood='gaussian'"
        if not y.is_floating_point() and y.numel() and int(y.min()) == 1 and int(y.max()) == f.shape[-1]:
            return ". They seem to count from 1: subtract it"
        if y.ndim == f.ndim and y.shape[-1] == 1:
            return ". Drop the last dimension with y.squeeze(-1)"
    return ""


def _every_label(likelihood: Likelihood, c: int, sample: Sample) -> Iterator[Finding]:
    """Labels that lie in memory are checked to the last; regression on what looks like classes is named."""
    labels = sample.labels if sample.labels is not None else torch.cat([y.reshape(-1) for _, y in sample.spread])
    labels = labels.reshape(-1)
    if likelihood.name in LABELED and not labels.is_floating_point():
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= c:
            yield Finding("error", "targets", f"labels run from {low} to {high}, outside 0..{c - 1} of the outputs")
        elif high < c - 1 and labels.numel() >= 20 * c:
            message = f"labels run to {high} in {labels.numel():,} examples, but there are {c} outputs"
            yield Finding("note", "targets", message)
    elif likelihood.name == "bernoulli":
        if not bool(((labels == 0) | (labels == 1)).all()):
            yield Finding("error", "targets", "bernoulli targets must be 0 or 1; some are not")
    elif likelihood.name == "gaussian":
        if not bool(torch.isfinite(labels).all()):
            yield Finding("error", "targets", "the targets hold NaN or infinite values; clean the data before fitting")
        elif labels.numel() >= ENOUGH and bool((labels == labels.round()).all()) and labels.unique().numel() <= 10:
            message = (
                f"the targets take {labels.unique().numel()} whole values only; if they are class labels, use "
                "likelihood='categorical' with integer labels"
            )
            yield Finding("note", "targets", message)
