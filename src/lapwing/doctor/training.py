"""Is the network trained, and does every parameter do something?

At a mode of the posterior the gradient of the log-likelihood balances the prior's, Σ_n ∂ log p_n = λ θ; so

    weight decay = ⟨ḡ, θ⟩ / ‖θ‖²     ḡ = mean_n ∂ log p_n,   λ = N · weight decay

and what is left of ḡ beside θ should be noise: a step along it, taken from half of the data, should not help the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import tree
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.doctor.checks import named, plural
from lapwing.doctor.outputs import ENOUGH
from lapwing.doctor.reading import Batch, Excerpt
from lapwing.doctor.report import Finding, error, note, ok, warning
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

FITTED = 0.05  # nats a row of training data, below which the evidence picks priors that are too weak for a classifier
UNTRAINED = 0.025  # share of what a network learned that one more step would add, if it has far to go


@dataclass(frozen=True)
class Slope:
    """Gradients of the mean log-likelihood over two halves of the examples, flat (p,), and the fit itself."""

    parts: tuple[tuple[Batch, ...], ...]
    halves: tuple[Tensor, ...]
    log_prob: float  # of an example
    examples: int

    @property
    def mean(self) -> Tensor:
        """The gradient of the mean log-likelihood, (p,)."""
        return torch.stack(self.halves).mean(0)


def slope(tangent: TangentModel, likelihood: Likelihood, batches: tuple[Batch, ...]) -> Slope:
    """Every other example into each half, so that sorted data do not come out as a trend."""
    parts = tuple(part for part in _halves(tangent, batches) if part)
    halves, total, count = [], 0.0, 0
    for part in parts:
        grads, examples = torch.zeros_like(tangent.theta, dtype=torch.float64), 0
        for x, y in part:
            f = tangent(x)
            rows, targets = flat_outputs(f), flat_targets(likelihood, f, y)
            pulled = tangent.vjp(x, likelihood.gradient(rows, targets).reshape(f.shape).to(f))
            grads += tangent.layout.flatten(pulled).double()
            total, examples = total + float(likelihood.log_prob(rows, targets).sum()), examples + len(y)
        halves.append(grads / examples)
        count += examples
    return Slope(parts, tuple(halves), total / max(1, count), count)


def _halves(tangent: TangentModel, batches: tuple[Batch, ...]) -> tuple[tuple[Batch, ...], ...]:
    if all(len(y) > 1 and tangent.separable(x) for x, y in batches):
        cuts = [slice(k, None, 2) for k in (0, 1)]
        return tuple(tuple((tree.rows_of(x, cut), y[cut]) for x, y in batches) for cut in cuts)
    return batches[0::2], batches[1::2]


def gain(tangent: TangentModel, likelihood: Likelihood, found: Slope, decay: float) -> float | None:
    """What the best step along the gradient of one half would add to the mean log-posterior of the other half.

    With r the first half's gradient beside the prior's and H the curvature: ⟨r, g⟩² / 2rᵀHr where ⟨r, g⟩ > 0, else 0.
    """
    if len(found.halves) < 2 or found.examples < ENOUGH:
        return None
    theta, decay = tangent.theta.double(), max(decay, 0.0)
    r, g = (half - decay * theta for half in found.halves)
    rise = float(r @ g)
    step = 1e-3 * float(theta.norm()) / max(float(r.norm()), torch.finfo(torch.float64).tiny)
    moved = tangent.layout.unflatten((theta + step * r).to(tangent.dtype))
    bend, examples = decay * float(r @ r), sum(len(y) for _, y in found.parts[1])
    for x, y in found.parts[1]:
        with torch.no_grad(), evaluating(tangent.model), plain_kernels():
            raw, other = (tangent.apply(p, x) for p in (tangent.params, moved))
        f, away, targets = flat_outputs(raw).double(), flat_outputs(other).double(), flat_targets(likelihood, raw, y)
        turned = likelihood.gradient(f, targets) - likelihood.gradient(away, targets)  # Λ (away − f), to first order
        bend += float(((away - f) * turned).sum()) / (step**2 * examples)
    return rise**2 / (2 * bend) if rise > 0 and bend > 0 else 0.0


def training_checks(tangent: TangentModel, likelihood: Likelihood, found: Slope, sample: Excerpt) -> Iterator[Finding]:
    """Whether the network is trained: how steep the log-likelihood still is."""
    theta, mean = tangent.theta.double(), found.mean
    norm, size = float(mean.norm()), float(theta.norm())
    if not math.isfinite(norm):
        yield error("training: the gradient of the log-likelihood is not finite; check weights and inputs")
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
    more = gain(tangent, likelihood, found, decay)
    if flat is not None and found.log_prob < flat:
        yield warning(
            f"training: {what}. A constant prediction would reach {flat:.3g}: the network is not trained, or is "
            "evaluated on other data or with another likelihood than in training; a Laplace approximation needs a "
            "minimum"
        )
    elif flat is not None and more is not None and more > UNTRAINED * (found.log_prob - flat):
        yield warning(
            f"training: {what}. One step along the gradient of half the examples would add {more:.2g} to the mean "
            f"log-likelihood of the other half (a constant prediction: {flat:.3g}), so there is far to go to a "
            "minimum; train on"
        )
    else:
        yield ok(f"training: {what}")


def closely_fitted(likelihood: Likelihood, found: Slope, rows: int) -> bool:
    """Whether a classifier fits its training data so closely that its evidence is no guide; rows: of an example."""
    return likelihood.classes and not likelihood.quadratic and -found.log_prob < FITTED * rows


def fit_checks(found: Slope) -> Iterator[Finding]:
    """That a classifier fits its training data, which the evidence does not take well."""
    yield warning(
        f"evidence: the classifier fits its training data (mean log-likelihood {found.log_prob:.2g}): tuned() then "
        "picks a prior that is too weak, and predictions are underconfident, on the training data too; with held-out "
        "data, call tuned(method='validation', data=held_out); without, fit with likelihood='classification'"
    )


def _constant_fit(likelihood: Likelihood, sample: Excerpt) -> float | None:
    """The mean log-likelihood, an example, of the best prediction that ignores the input."""
    n = sum(len(y) for _, y in sample.spread)
    ys = [y.unsqueeze(-1) if y.ndim == likelihood.event_of(y) == 1 else y for _, y in sample.spread]
    y = torch.cat([y.reshape(-1, *y.shape[y.ndim - likelihood.event_of(y) :]) for y in ys])
    f = likelihood.constant(y) if n >= ENOUGH else None
    if f is None:
        return None
    y = y.double() if y.is_floating_point() else y
    return float(likelihood.log_prob(f.to(y.device).expand(len(y), -1), y).sum()) / n


def dead_checks(tangent: TangentModel, f: Tensor, x: Any) -> Iterator[Finding]:
    """Parameters that no output depends on, by one backward pass of random cotangents."""
    u = torch.randn(f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f)
    pulled = tangent.vjp(x, u)
    silent = [n for n, g in pulled.items() if not bool(g.any())]
    if silent:
        yield warning(
            f"dead: {named(silent)} move no output on {plural(len(f), 'example')} (unused, or behind dead units); "
            "their posterior is the prior: freeze them with requires_grad_(False) to leave them out"
        )
    units = _dead_units(tangent, {n: g for n, g in pulled.items() if n not in silent})
    if units:
        shown = [f"{n} ({k} of {m})" for n, (k, m) in units.items()]
        yield note(
            f"dead: units without any gradient on {plural(len(f), 'example')}: {named(shown)}; their posterior is the "
            "prior"
        )


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
