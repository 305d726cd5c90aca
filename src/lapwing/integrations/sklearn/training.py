"""A network trained and chosen by the evidence alone: no example is held out.

    weights         Adam on −(1/b) Σ_batch log p(y | f(x, θ)) + ½ θᵀAθ/N
    weight decay    the prior precision A, one number a layer, and the noise: `lw.OnlineEvidence`, every EVERY steps
    stopping        at the weights of the highest evidence, once PATIENCE updates in a row were below it
    architecture    the network of the highest evidence of its tangent model, by `lw.compare`
log p(y)        of numbers the same; of labels that of the network itself, at its weights

The tangent model of a trained classifier has features that saw the labels, and a precision of its own for each layer:
its evidence ranks networks, and is far too high for one with two layers.
x (n, d); y (n,) labels or (n, c) numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.api import Laplace, laplace
from lapwing.arguments import SMALL
from lapwing.errors import LapwingWarning
from lapwing.selection import Comparison, compare
from lapwing.training import OnlineEvidence

EVERY, PATIENCE = 100, 2  # steps an update of the hyperparameters; updates without a higher evidence
LIKELIHOODS = {"classification": "categorical", "regression": "gaussian"}
PRIORS: dict[str, Any] = {"classification": "layerwise", "regression": 1.0}  # of the evidence that is compared
CENTERS = {"classification": "map", "regression": "tangent"}  # of the evidence that is told
BATCH, RATE = 512, 0.01  # examples a step; Adam's learning rate to start with, which falls to 0


@dataclass(frozen=True)
class Chosen:
    """The network of the highest evidence, with a posterior by the default call."""

    fit: Laplace
    log_evidence: float
    comparison: Comparison
    steps: int  # of its training


def chosen(networks: Mapping[str, nn.Module], x: Tensor, y: Tensor, task: str, steps: int, seed: int) -> Chosen:
    """Train each of the named networks, in place, and take that of the highest evidence of y."""
    structure = affordable([*networks.values()], y.numel() * (1 if task == "regression" else 1 + int(y.max())))
    with warnings.catch_warnings():  # of precisions at a bound, in networks that are perhaps not taken
        warnings.simplefilter("ignore", LapwingWarning)
        online = {name: trained(net, x, y, LIKELIHOODS[task], steps, seed) for name, net in networks.items()}
        comparison = compare({name: judged(one, PRIORS[task], structure) for name, one in online.items()})
        best = online[comparison.best.name]
        evidence = float(judged(best, PRIORS[task], structure, CENTERS[task]).log_evidence())
    return Chosen(laplace(best.model, (x, y), task).tuned(), evidence, comparison, steps_of(best, steps))


@torch.inference_mode(False)
@torch.enable_grad()
def trained(net: nn.Module, x: Tensor, y: Tensor, likelihood: str, steps: int, seed: int) -> OnlineEvidence:
    """Train in place, up to so many steps, and go back to the weights of the highest evidence. Layers that drop follow
    the seed, and torch's global stream is given back."""
    online = OnlineEvidence(net, (x, y), likelihood, every=1, burn_in=1)
    x = x.to(next(net.parameters()))
    y = y.to(x.device)
    optimizer = torch.optim.Adam((p for p in net.parameters() if p.requires_grad), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net.train()
        for step in range(1, steps + 1):
            rows = slice(None) if len(x) <= BATCH else torch.randint(len(x), (BATCH,))
            optimizer.zero_grad()
            online.loss(net(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
            if (step % EVERY == 0 or step == steps) and finished(online):
                break
    net.eval()
    online.restore()
    return online


def finished(online: OnlineEvidence) -> bool:
    """Update the hyperparameters, and tell whether the evidence has been falling."""
    online.step()
    return online.best is not None and online.epoch - online.best.epoch >= PATIENCE


def steps_of(online: OnlineEvidence, most: int) -> int:
    """How many steps led to the weights of the highest evidence."""
    return min(most, EVERY * online.restore().epoch)


def judged(online: OnlineEvidence, prior: Any, structure: str, center: str = "tangent") -> Laplace:
    """The fit whose evidence is asked: with the exact curvature where that is affordable. That of the training has
    Kronecker factors, which favor small networks."""
    return laplace(online.model, online.data, online.likelihood, prior=prior, structure=structure).tuned(center=center)


def affordable(networks: Sequence[nn.Module], outputs: int) -> str:
    """The structure of all, by the largest network, so that evidences are of one kind. outputs: of all examples."""
    weights = max(sum(p.numel() for p in net.parameters()) for net in networks)
    return "full" if min(weights, outputs) <= SMALL else "kron"
