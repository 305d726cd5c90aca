"""The two methods: a q of independent weights, and one with a covariance for each layer.

q* = argmax_q E_q[log p(D, θ)] / T + H(q)         T = 1: the q with the least KL(q ‖ p(θ | D))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.ensembles.train import given_rate
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import linalg
from lapwing.posterior.gaussian import Gaussian
from lapwing.samplers.target import Target, targeted
from lapwing.shell import Fitted, Shell
from lapwing.tree import layer_of
from lapwing.variational.climb import Objective, climbed
from lapwing.variational.factors import Approximation, Family, FullLayers, LowRankLayers, MeanField
from lapwing.variational.posterior import Variational

SMALL = 0.01  # the deviation of each weight to start with


def mean_field(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    prior: Any = 1.0,
    steps: int = 2000,
    batch: int = 128,
    lr: float = 1e-2,
    draws: int = 64,
    temperature: float = 1.0,
    kl: str = "auto",
    family: Any = "normal",
    local: bool = True,
    start: Any = "trained",
    subset: Any = "all",
    forward: Any = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Fitted:
    """The nearest q of independent weights, as draws (s, p) that run through the network.

    kl: "closed", for a Gaussian prior and a normal q, "sampled", or "auto", closed where it can be. family: "normal",
    or a pair (inverse CDF, log-density) of a distribution of unit scale, each weight's up to place and scale. local:
    noise in layers rather than in weights, where that is exact: gradients vary less. start: "trained", or a fit of
    the same network to start from: a Laplace's precisions, or the q of another variational fit. The other arguments
    are those of `lw.samplers.sgld`; `post.diagnostics` has the evidence's bound."""
    kind = Family.of(family)
    target = _targeted(model, data, likelihood, prior, temperature, subset, forward)
    generator = given.generator(generator)
    q = MeanField(*_start(start, target), kind)
    closed = _closed(kl, target, q, preferred=True)
    made = "mean-field variational inference"
    return _found(target, q, steps, batch, lr, draws, local, closed, generator, progress, made)


def layerwise(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    rank: int | None = None,
    prior: Any = 1.0,
    steps: int = 2000,
    batch: int = 128,
    lr: float = 1e-2,
    draws: int = 64,
    temperature: float = 1.0,
    kl: str = "auto",
    start: Any = "trained",
    subset: Any = "all",
    forward: Any = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Fitted:
    """The nearest Gaussian q with a covariance for each layer (a module's own parameters), as draws (s, p).

    rank: None keeps it in full; a number k, as a diagonal and k directions. kl: "auto" is sampled, whose slopes have
    less noise near the posterior. The other arguments are `mean_field`'s."""
    rank = None if rank is None else given.whole(rank, "rank", 1)
    target = _targeted(model, data, likelihood, prior, temperature, subset, forward)
    generator = given.generator(generator)
    mean, deviation = _start(start, target)
    layers = _layers(target)
    which = (mean, deviation, layers)
    q: Approximation = FullLayers(*which) if rank is None else LowRankLayers(*which, rank, generator)
    closed = _closed(kl, target, q, preferred=False)
    made = f"layerwise {'full' if rank is None else f'rank-{rank}'} variational inference"
    return _found(target, q, steps, batch, lr, draws, False, closed, generator, progress, made)


def _targeted(*given_: Any) -> Target:
    """What q is to be near to: of a proper, continuous prior and a known noise."""
    target = targeted(*given_)
    if target.joint.prior.discrete:
        raise Unsupported(
            f"the weights of {type(target.joint.prior).__name__} have no gradient, which variational inference "
            "follows; use lw.samplers.metropolis"
        )
    if target.unknown:
        raise Unsupported(
            f"variational inference keeps the likelihood's {', '.join(target.unknown)} fixed; give a number, or sample "
            "it with lw.samplers.hmc"
        )
    return target


def _start(start: Any, target: Target) -> tuple[Tensor, Tensor]:
    """The mean and deviations (p,) to start with."""
    tangent = target.joint.tangent
    theta = tangent.theta.to(torch.float64)
    if isinstance(start, str) and start == "trained":
        return theta, torch.full_like(theta, SMALL)
    posterior = start.posterior if isinstance(start, Shell) else None
    if not isinstance(posterior, (Gaussian, Variational)):
        raise InvalidValue(f"start is 'trained', a Laplace or a variational fit; got {start!r}")
    if not posterior.tangent.layout.same_as(tangent.layout):
        raise InvalidValue("start is a fit of other parameters; fit it to the same network and subset=")
    if isinstance(posterior, Variational):
        return posterior.mean.to(theta), posterior.deviation.to(theta)
    precision = linalg.diagonal(posterior.precision).to(theta)  # the best q of independent weights has its diagonal
    return posterior.tangent.theta.to(theta), (target.temperature / precision).sqrt()


def _closed(kl: Any, target: Target, q: Approximation, preferred: bool) -> bool:
    """Whether to take the KL in closed form."""
    if kl not in ("auto", "closed", "sampled"):
        raise InvalidValue(f"kl is 'auto', 'closed' or 'sampled', got {kl!r}")
    prior = target.joint.prior
    can = prior.gaussian and q.normal and (prior.independent or isinstance(q, MeanField))
    if kl == "closed" and not can:
        raise Unsupported(
            f"the KL to {prior.kind} is closed for a Gaussian prior and a normal q, of which one at least has "
            "independent weights; use kl='sampled'"
        )
    return kl == "closed" or (kl == "auto" and preferred and can)


def _layers(target: Target) -> dict[str, Tensor]:
    """The indices of each layer's weights, {module: (m,)}."""
    device, found = target.joint.tangent.device, dict[str, list[Tensor]]()
    for name, s in target.joint.tangent.layout.slices().items():
        found.setdefault(layer_of(name), []).append(torch.arange(s.start, s.stop, device=device))
    return {name: torch.cat(parts) for name, parts in found.items()}


@torch.inference_mode(False)
@torch.enable_grad()
def _found(
    target: Target,
    q: Approximation,
    steps: int,
    batch: int,
    lr: float,
    draws: int,
    local: bool,
    closed: bool,
    generator: torch.Generator,
    progress: bool,
    made: str,
) -> Fitted:
    """Climb, then draw."""
    steps, batch, draws = given.whole(steps, "steps", 1), given.whole(batch, "batch", 1), given.whole(draws, "draws", 2)
    trace = climbed(Objective.of(target, q, batch, local, closed), steps, given_rate(lr), generator, progress)
    with torch.no_grad():
        theta = q.draw(draws, generator)
        terms = torch.stack([target.joint(w) for w in theta]) - q.log_q(theta)
    moments = q.mean.detach(), q.variance().detach().sqrt()
    posterior = Variational(target.joint.tangent, theta, None, *moments, terms, trace.double())
    cold = "" if target.temperature == 1 else f" at temperature {target.temperature:g}"
    return target.joint.fitted(posterior, f"{made}{cold}")
