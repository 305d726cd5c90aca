"""Whether predictions at several inputs are right together (Osband et al. 2022).

κ inputs are anchors; τ times one of them is drawn with repetition, n_i times anchor i, and all τ labels are predicted
together. Over S draws of the network,

    log (1/S) Σ_s Π_i p_s(y_i)^{n_i} = logsumexp_s Σ_i n_i log p_s(y_i) − log S

One draw (a network without a posterior) gives Σ n_i log p(y_i). Published values have τ = 1 for κ = 1, where it is
minus the NLL, and τ = 10(κ − 1) beyond. The logarithm of a mean over few draws is low on average: compare at equal S.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.metrics.inputs import DRAWS, class_probs, of_arrays, tensor
from lapwing.metrics.scores import mean_or_each
from lapwing.outputs import Normal
from lapwing.predictive import Prediction


@of_arrays
def dyadic(log_probs: Tensor, kappa: int, tau: int | None = None, generator: torch.Generator | None = None) -> Tensor:
    """The joint log-likelihood of each set of κ anchors, from log p_s(y_i), (s, n), of S draws of one network.

    Inputs are shuffled and cut into ⌈n/κ⌉ sets; the last is filled up from the first. The same generator state gives
    the same sets, so that two models can be paired; None is a private one with seed 0.
    """
    given = tensor(log_probs, "log-probabilities")
    if given.ndim != 2:
        raise InvalidValue(f"log-probabilities must be (s, n), one row a draw, got {tuple(given.shape)}")
    if bool((given.isnan() | (given == math.inf)).any()):
        raise InvalidValue("log-probabilities hold NaN or +inf; give finite ones, or -inf for a probability of 0")
    equal = torch.full((len(given), 1), -math.log(len(given)), dtype=torch.float64, device=given.device)
    return together(given, equal, *sets_of(given.shape[1], kappa, tau, generator))


@overload
def joint_log_likelihood(
    predicted: Prediction | Tensor,
    y: Tensor,
    kappa: int = 2,
    tau: int | None = None,
    *,
    draws: int | None = None,
    generator: torch.Generator | None = None,
    each: Literal[False] = False,
) -> float: ...
@overload
def joint_log_likelihood(
    predicted: Prediction | Tensor,
    y: Tensor,
    kappa: int = 2,
    tau: int | None = None,
    *,
    draws: int | None = None,
    generator: torch.Generator | None = None,
    each: Literal[True],
) -> Tensor: ...
@of_arrays
def joint_log_likelihood(
    predicted: Prediction | Tensor,
    y: Tensor,
    kappa: int = 2,
    tau: int | None = None,
    *,
    draws: int | None = None,
    generator: torch.Generator | None = None,
    each: bool = False,
) -> float | Tensor:
    """The mean over sets of κ anchors of the log-likelihood of τ labels together.

    predicted: class probabilities (s, n, c) of s draws of one network, each the same network at all inputs; or a
    Prediction with joint=True (of which `draws` are made, 1,024 if None; for Gaussian noise it is exact) or with draws
    of its own.
    """
    exact = isinstance(predicted, Prediction) and predicted.gaussian
    drawn = not isinstance(predicted, Prediction) or predicted.drawn
    if draws is not None and (drawn or exact or draws < 1):
        why = "it comes as draws" if drawn else "it is exact" if exact else "at least one is needed"
        raise InvalidValue(f"draws={draws} cannot be made of this prediction: {why}; leave draws out")
    if not isinstance(predicted, Prediction):
        if tensor(predicted, "the probabilities").ndim != 3 or predicted.shape[1:-1] != tensor(y, "the labels").shape:
            raise InvalidValue(
                "probabilities must be (s, n, c), one table a draw, and labels (n,); "
                f"got {tuple(predicted.shape)} and {tuple(y.shape)}"
            )
        p, labels = class_probs(predicted, y.expand(len(predicted), *y.shape))
        return mean_or_each(dyadic(p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log(), kappa, tau, generator), each)
    if predicted.f_mean.ndim != 2:
        raise InvalidValue(f"a joint log-likelihood needs outputs (n, c), got {tuple(predicted.f_mean.shape)}")
    if not drawn and not predicted.joint:
        raise InvalidValue("predictions were made input by input; predict with joint=True for a joint log-likelihood")
    y = tensor(y, "the targets").to(predicted.f_mean.device)
    predicted.likelihood.validate(predicted.f_mean, y)
    generator = generator or torch.Generator().manual_seed(0)
    anchors, counts = sets_of(len(y), kappa, tau, generator)  # before draws of f, so that all models get the same sets
    if exact:
        return mean_or_each(_exact(predicted, y, anchors, counts), each)
    return mean_or_each(together(*log_probs_of(predicted, y, draws or DRAWS, generator), anchors, counts), each)


def log_probs_of(predicted: Prediction, y: Tensor, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """log p(y_n | f_s(x_n)) of the draws that a prediction is known by, or of so many of them, (s, n), and their
    log-weights (s, 1)."""
    if predicted.drawn:
        some = predicted.outputs.nodes(torch.arange(len(y), device=y.device), None)
        f, source, log_weight = some.f, some.source, some.log_weight[:, :1]
    else:
        f, source = predicted.outputs.sample(draws, generator)
        log_weight = f.new_full((len(f), 1), -math.log(len(f)), dtype=torch.float64)
    return predicted.likelihood.at(source).log_prob(f.double(), y.expand(len(f), *y.shape)), log_weight


def sets_of(n: int, kappa: int, tau: int | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Anchors and how often each is drawn, both (sets, κ)."""
    if not isinstance(kappa, int) or not 1 <= kappa <= n:
        raise InvalidValue(f"kappa, the number of anchors, must be from 1 to the {n} inputs, got {kappa}")
    tau = tau if tau is not None else max(1, 10 * (kappa - 1))
    if tau < 1:
        raise InvalidValue(f"tau, the number of labels, must be at least 1, got {tau}")
    generator = generator or torch.Generator().manual_seed(0)
    sets = -(-n // kappa)
    order = torch.randperm(n, generator=generator, device=generator.device).cpu()
    drawn = torch.randint(kappa, (sets, tau), generator=generator, device=generator.device).cpu()
    counts = torch.zeros(sets, kappa, dtype=torch.long).scatter_add_(1, drawn, torch.ones_like(drawn))
    return torch.cat([order, order[: sets * kappa - n]]).reshape(sets, kappa), counts


def together(log_probs: Tensor, log_weight: Tensor, anchors: Tensor, counts: Tensor) -> Tensor:
    """logsumexp_s (log w_s + Σ_i n_i log p_s(y_i)) of each set, for log-weights (s, 1)."""
    counts = counts.to(log_probs.device)
    chosen = log_probs.double()[:, anchors.to(log_probs.device)]  # (s, sets, κ)
    terms = torch.where(counts > 0, counts * chosen, 0.0)  # an anchor that was not drawn does not count, even at -inf
    return torch.logsumexp(terms.sum(-1) + log_weight, 0)


def _exact(predicted: Prediction, y: Tensor, anchors: Tensor, counts: Tensor) -> Tensor:
    """Gaussian noise: the τ targets of a set are jointly Gaussian."""
    out = []
    for set_anchors, times in zip(anchors, counts, strict=True):
        i = set_anchors.repeat_interleave(times).to(y.device)
        cov = predicted.covariance[i][:, :, i]
        out.append(Prediction(predicted.likelihood, Normal(predicted.f_mean[i], cov, joint=True)).log_prob(y[i]))
    return torch.stack(out)
