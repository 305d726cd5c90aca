"""What one run of the model says: do outputs and targets match the likelihood, is the network trained?

At a mode of the posterior the gradient of the log-likelihood balances the prior's, Σ_n ∂ log p_n = λ θ; so

    weight decay = ⟨ḡ, θ⟩ / ‖θ‖²     ḡ = mean_n ∂ log p_n,   λ = N · weight decay

and what is left of ḡ beside θ should be noise: the residues of two halves of the data should not point the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import tree
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.doctor.checks import named, plural
from lapwing.doctor.reading import Batch, Sample
from lapwing.doctor.report import Finding
from lapwing.errors import InvalidValue, LapwingError
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel
from lapwing.tangent.kernels import plain_kernels
from lapwing.tangent.linearize import evaluating

ENOUGH = 32  # values before a range is called suspicious
ALIGNED = 0.7  # cosine of two halves' gradients beyond which training has far to go


# -- outputs against the likelihood --------------------------------------------------------------------------------


def output_checks(tangent: TangentModel, f: Tensor, x: Any) -> Iterator[Finding]:
    """The function itself: finite, the same each time, one example at a time."""
    if not bool(torch.isfinite(f).all()):
        yield Finding("error", "outputs", "the network's outputs hold NaN or infinite values; check weights and inputs")
        return
    scale = float(f.abs().max()) + torch.finfo(f.dtype).tiny
    rounding = 1e3 * torch.finfo(f.dtype).eps * scale
    if float((tangent(x) - f).abs().max()) > rounding:
        message = (
            "two runs on the same batch differ, so the network is random in eval mode too (functional dropout with "
            "training=True, a noise layer?); switch that off"
        )
        yield Finding("error", "outputs", message)
        return
    half = len(f) // 2
    if half and _separable(x, len(f)):
        apart = float((tangent(tree.rows_of(x, slice(0, half))) - f[:half]).abs().max())
        if apart > rounding * 10:
            message = (
                f"outputs change by {apart:.2g} when half the batch is left out: they depend on the other examples "
                "(batch statistics?), so there is no likelihood of a single example; use running statistics"
            )
            yield Finding("error", "outputs", message)
    spread = flat_outputs(f)
    if len(spread) > 1:
        still = (spread.amax(0) - spread.amin(0)) <= rounding
        if bool(still.all()):
            message = "the outputs are the same for every example; the network ignores its inputs (dead units?)"
            yield Finding("warning", "outputs", message)
        elif bool(still.any()):
            message = f"{int(still.sum())} of {still.numel()} outputs do not depend on the input"
            yield Finding("note", "outputs", message)


def _separable(x: Any, n: int) -> bool:
    try:
        return tree.batch_size(x) == n
    except InvalidValue:
        return False


def likelihood_checks(
    model: nn.Module, likelihood: Likelihood, outputs: list[Tensor], sample: Sample
) -> Iterator[Finding]:
    """`outputs` are those of the batches of sample.spread."""
    f = outputs[0]
    found = [*_link(model, likelihood, f), *_targets(likelihood, outputs, sample)]
    yield from found
    if not any(finding.severity in ("error", "warning") for finding in found):
        shape = "(n, " + "".join(f"{s}, " for s in f.shape[1:])[:-2] + ")"
        yield Finding("ok", "likelihood", f"outputs {shape} and targets suit {likelihood.name}")


def _link(model: nn.Module, likelihood: Likelihood, outputs: Tensor) -> Iterator[Finding]:
    """A softmax or sigmoid applied by the network that the likelihood applies again."""
    f = flat_outputs(outputs)
    rounding = min(100 * torch.finfo(outputs.dtype).eps, 1e-2)
    if likelihood.name == "categorical" and f.shape[-1] > 1:
        if bool((f >= 0).all()) and bool(((f.sum(-1) - 1).abs() < rounding).all()):
            message = (
                "the outputs are probabilities already (each row sums to 1) and would pass a softmax twice; take the "
                "softmax out of the network, or give logits by forward=lambda model, x: model(x).log()"
            )
            yield Finding("error", "likelihood", message)
        elif bool((torch.logsumexp(f, -1).abs() < 10 * rounding).all()):
            message = (
                "the outputs are log-probabilities (log_softmax is applied); curvature and evidence are the same, but "
                "the probit link sees other variances: prefer logits, or predict with link='probit_centered'"
            )
            yield Finding("note", "likelihood", message)
    if likelihood.name == "bernoulli" and bool(((f >= 0) & (f <= 1)).all()):
        sure = isinstance(list(model.modules())[-1], nn.Sigmoid)
        if sure or f.numel() >= ENOUGH:
            message = (
                f"all {f.numel()} outputs lie in [0, 1], as if a sigmoid were applied already; bernoulli wants logits: "
                "take it out of the network, or use forward=lambda model, x: torch.logit(model(x))"
            )
            yield Finding("error" if sure else "warning", "likelihood", message)


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
    if likelihood.name == "categorical":
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
    if likelihood.name == "categorical":
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


# -- is it trained? ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """Gradients of the mean log-likelihood over two halves of the examples, flat (p,), and the fit itself."""

    halves: tuple[Tensor, ...]
    log_prob: float
    examples: int

    @property
    def mean(self) -> Tensor:
        return torch.stack(self.halves).mean(0)


def slope(tangent: TangentModel, likelihood: Likelihood, batches: tuple[Batch, ...]) -> Slope:
    """Every other example into each half, so that sorted data do not come out as a trend."""
    parts: list[list[Batch]] = [[], []]
    for x, y in batches:
        if _separable(x, len(y)) and len(y) > 1:
            for k in (0, 1):
                cut = slice(k, None, 2)
                parts[k].append((tree.rows_of(x, cut), y[cut]))
        else:
            parts[min(parts, key=len) is parts[1]].append((x, y))
    halves, total, count = [], 0.0, 0
    for part in parts:
        if not part:
            continue
        grads, examples = torch.zeros_like(tangent.theta, dtype=torch.float64), 0
        for x, y in part:
            log_prob, grad = log_prob_and_gradient(tangent, likelihood, x, y)
            grads += grad.double()
            total, count, examples = total + float(log_prob), count + len(y), examples + len(y)
        halves.append(grads / examples)
    return Slope(tuple(halves), total / max(1, count), count)


def log_prob_and_gradient(tangent: TangentModel, likelihood: Likelihood, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Σ log p(y | f(x, θ)) and its gradient, (p,)."""
    value, grads = differentiated(tangent, x, lambda f: likelihood.log_prob(flat_outputs(f), flat_targets(f, y)).sum())
    return value, tangent.layout.flatten(grads)


def differentiated(
    tangent: TangentModel, x: Any, objective: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective of the outputs, and its gradient, by plain autograd on copies of the weights: what training does."""
    leaves = {n: t.detach().requires_grad_() for n, t in tangent.params.items()}
    with torch.enable_grad(), evaluating(tangent.model), plain_kernels():
        value = objective(tangent.apply(leaves, x))
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    filled = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves.values(), strict=True)]
    return value.detach(), dict(zip(leaves, filled, strict=True))


def training_checks(tangent: TangentModel, likelihood: Likelihood, found: Slope, sample: Sample) -> Iterator[Finding]:
    theta, mean = tangent.theta.double(), found.mean
    norm, size = float(mean.norm()), float(theta.norm())
    if not math.isfinite(norm):
        yield Finding("error", "training", "the gradient of the log-likelihood is not finite; check weights and inputs")
        return
    decay = float(mean @ theta) / max(size**2, torch.finfo(torch.float64).tiny)
    precision = "" if sample.n is None else f" (prior precision {decay * sample.n:.3g} for {sample.n:,} examples)"
    balance = f"it would balance a weight decay of {decay:.2g}{precision}"
    if decay <= 0:
        balance = "no weight decay would balance it, since it points away from zero"
    what = (
        f"mean log-likelihood {found.log_prob:.3g}, its mean gradient has norm {norm:.2g} (weights {size:.3g}) over "
        f"{plural(found.examples, 'example')}; {balance}"
    )
    flat = _constant_fit(likelihood, sample)
    cosine = _alignment(found, theta, decay)
    if flat is not None and found.log_prob < flat:
        message = (
            f"{what}. A constant prediction would reach {flat:.3g}: the network is not trained, or is evaluated on "
            "other data or with another likelihood than in training; a Laplace approximation needs a minimum"
        )
        yield Finding("warning", "training", message)
    elif cosine is not None and cosine > ALIGNED:
        message = (
            f"{what}. The gradients of two halves of these examples point the same way (cosine {cosine:.2f}), so there "
            "is far to go to a minimum; train on, or recheck the data and the loss"
        )
        yield Finding("warning", "training", message)
    else:
        yield Finding("ok", "training", what)


def _alignment(found: Slope, theta: Tensor, decay: float) -> float | None:
    if len(found.halves) < 2 or found.examples < ENOUGH:
        return None
    a, b = (half - max(decay, 0.0) * theta for half in found.halves)
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def _constant_fit(likelihood: Likelihood, sample: Sample) -> float | None:
    """The mean log-likelihood, an example, of the best prediction that ignores the input."""
    y = torch.cat([y.reshape(-1, y.shape[-1]) if y.ndim > 1 else y for _, y in sample.spread])
    n = sum(len(t) for _, t in sample.spread)
    if n < ENOUGH:
        return None
    if likelihood.name == "categorical":
        p = torch.bincount(y.reshape(-1).long()).double() / y.numel()
        return float((p[p > 0] * p[p > 0].log()).sum()) * y.numel() / n
    if likelihood.name == "bernoulli":
        f = torch.logit(y.double().mean(0).clamp(1e-6, 1 - 1e-6)).expand(len(y), -1)
        return float(likelihood.log_prob(f, y).sum()) / n
    if likelihood.name == "gaussian":
        return float(likelihood.log_prob(y.double().mean(0).expand(len(y), -1), y.double()).sum()) / n
    return None


def dead_checks(tangent: TangentModel, f: Tensor, x: Any) -> Iterator[Finding]:
    """Parameters that no output depends on, by one backward pass of random cotangents."""
    u = torch.randn(f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f)
    _, pulled = differentiated(tangent, x, lambda f: (f * u).sum())
    silent = [n for n, g in pulled.items() if not bool(g.any())]
    if silent:
        message = (
            f"{named(silent)} move no output on {plural(len(f), 'example')} (unused, or behind dead units); their "
            "posterior is the prior: freeze them with requires_grad_(False) to leave them out"
        )
        yield Finding("warning", "dead", message)
    units = _dead_units(tangent, {n: g for n, g in pulled.items() if n not in silent})
    if units:
        shown = [f"{n} ({k} of {m})" for n, (k, m) in units.items()]
        message = (
            f"units without any gradient on {plural(len(f), 'example')}: {named(shown)}; their posterior is the prior"
        )
        yield Finding("note", "dead", message)


def _dead_units(tangent: TangentModel, pulled: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    out = {}
    for name, g in pulled.items():
        owner = tangent.model.get_submodule(name.rpartition(".")[0])
        if g.ndim < 2 or name in tangent.layout.masks or isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            continue  # an embedding's rows are silent wherever their token did not occur
        dead = int((~g.flatten(1).any(1)).sum())
        if dead:
            out[name] = dead, g.shape[0]
    return out
