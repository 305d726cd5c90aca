"""What a network is trained on while its hyperparameters are learnt:

    loss(θ) = −(1/n) Σ_batch log p(y | f(x, θ)) + ½ (θ − m)ᵀ A (θ − m) / N

N examples in all, n in the batch: the mean over a batch estimates the mean over the data, and N times the loss is the
negative log joint density, whose minimum is the MAP.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from lapwing import arguments
from lapwing.curvature import BUDGET, probe
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.data import dropped
from lapwing.errors import InvalidValue, NetworkFailed, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.priors import Gaussian, check_independent
from lapwing.tangent import linearize
from lapwing.tree import Layout


@dataclass(frozen=True, eq=False)
class TrainingLoss:
    """The loss at fixed hyperparameters; called on a model, its penalty alone."""

    model: nn.Module
    prior: Gaussian  # bound
    likelihood: Likelihood
    n: int  # N, examples in all

    @property
    def layout(self) -> Layout:
        """The weights that the prior is over."""
        assert self.prior.layout is not None
        return self.prior.layout

    @cached_property
    def terms(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """λ/N and m of each selected parameter, in its dtype; 0-dim where all its weights share them, no m for 0."""
        with torch.inference_mode(False), torch.no_grad():
            layout, named = self.layout, dict(self.model.named_parameters())
            precision = layout.unflatten(self.prior.operator().dense().detach())
            mean = layout.unflatten(self.prior.mean_vector())
            kinds = {n: torch.promote_types(named[n].dtype, torch.float32) for n in layout.names}
            return {
                n: (_shared(precision[n] / self.n, kinds[n]), _shared(mean[n], kinds[n]) if mean[n].any() else None)
                for n in layout.names
            }

    @cached_property
    def weights(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """λ/N as `Quadratic` takes it."""
        each = tuple(precision for precision, _ in self.terms.values())
        return torch.stack([a if a.ndim == 0 else a.new_ones(()) for a in each]), each

    def __call__(self, model: nn.Module) -> Tensor:
        """½ ‖θ − m‖²_A / N, differentiable in the model's parameters."""
        named, masks = dict(model.named_parameters()), self.layout.masks
        gaps = []
        for name, (_, mean) in self.terms.items():
            if name not in named:
                raise InvalidValue(f"the model has no parameter {name}, which the prior is over; give the same network")
            theta = named[name][masks[name]] if name in masks else named[name]
            theta = theta.to(torch.promote_types(theta.dtype, torch.float32))
            gaps.append(theta if mean is None else theta - mean)
        return Quadratic.apply(*self.weights, *gaps)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """The mean negative log-likelihood of a batch of outputs f (n, ..., c), plus the penalty."""
        if not isinstance(f, Tensor) or not isinstance(y, Tensor):
            kinds = f"{type(f).__name__} and {type(y).__name__}"
            raise InvalidValue(f"loss takes a batch of outputs and its targets, both tensors; got {kinds}")
        if f.ndim < 2 or y.ndim < 1 or len(f) != len(y):
            raise InvalidValue(
                f"loss takes a batch of outputs (n, ..., c) and its targets, got {tuple(f.shape)} and {tuple(y.shape)}"
            )
        flat, targets = flat_outputs(f), flat_targets(self.likelihood, f, y)
        self.likelihood.validate(flat.detach(), targets)
        return self(self.model) - self.likelihood.log_prob(flat, targets).sum() / len(f)


def begin(
    model: nn.Module, batches: Any, likelihood: Any, prior: Any, fixed: tuple[str, ...], settings: dict[str, Any]
) -> TrainingLoss:
    """The loss at the hyperparameters given, once all is seen to fit together: a mistake must not wait for the first
    update, hours later. settings: the structure, factor, subset and forward of `lw.laplace`."""
    tangent = linearize(model, settings["subset"], forward=settings["forward"])
    bound = arguments.as_prior(prior, tangent.layout, tangent.device)
    known = arguments.as_likelihood(likelihood).to(tangent.device)
    if bound.of_curvature:
        raise Unsupported(
            "the g-prior follows the curvature, so it is no penalty to train under; use a precision, 'layerwise' or "
            "lw.priors.Gaussian, and the g-prior with lw.laplace once training is over"
        )
    if not bound.gaussian:
        raise Unsupported(
            f"training under the evidence needs a Gaussian prior, and {type(bound).__name__} is none; train on "
            "-prior.log_prob(weights) of your own, then fit with lw.laplace and tune there"
        )
    check_independent(bound, "training under the evidence")
    unknown = [name for name in fixed if name not in {**bound.hyperparameters, **known.hyperparameters}]
    if unknown:
        names = [*bound.hyperparameters, *known.hyperparameters]
        raise InvalidValue(f"fixed={unknown} names no hyperparameter; they are {names}")
    try:
        seen = probe(tangent, batches, known)
    except NetworkFailed as error:
        why = error.__cause__
        raise InvalidValue(f"the model does not run on a batch of the data: {why}; give its own data") from error
    factor = arguments.as_factor(settings["factor"], seen, known)
    arguments.as_structure(settings["structure"], seen, BUDGET).resolved(seen, factor)
    return TrainingLoss(model, cast(Gaussian, bound), known, seen.n - dropped(batches))


class Quadratic(torch.autograd.Function):
    """½ Σ_l Σ_i a_li d_li² for tensors d_l and a_l, and its gradient a d: one node, where autograd's would be four a
    tensor, and a step of training pays for each."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, weights: tuple[Tensor, ...], *gaps: Tensor) -> Tensor:
        """shared (L,): the a_l that are one number, 1 for the others."""
        ctx.shared, ctx.weights = shared, weights
        ctx.save_for_backward(*gaps)
        scaled = Quadratic.scaled(weights, gaps)
        dots = [s.reshape(-1).dot(d.reshape(-1)) for s, d in zip(scaled, gaps, strict=True)]
        return torch.stack(dots).dot(shared) / 2

    @staticmethod
    def scaled(weights: tuple[Tensor, ...], gaps: tuple[Tensor, ...]) -> list[Tensor]:
        """a d of each, but for the a_l that are one number."""
        return [d if a.ndim == 0 else a * d for a, d in zip(weights, gaps, strict=True)]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """a d of each tensor d, times the slope."""
        scaled = Quadratic.scaled(ctx.weights, ctx.saved_tensors)
        return None, None, *(a * s for a, s in zip((slope * ctx.shared).unbind(), scaled, strict=True))


def _shared(values: Tensor, dtype: torch.dtype) -> Tensor:
    first = values.reshape(-1)[0]
    return (first if bool((values == first).all()) else values).to(dtype)
