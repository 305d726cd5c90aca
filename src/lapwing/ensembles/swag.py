"""SWAG: a Gaussian fitted to the snapshots of one training run (Maddox et al., NeurIPS 2019). Of snapshots θ_t, with
their mean μ (p,), their variances D (p,), and the last k of them about the running mean, R (k, p):

    θ ~ N(μ, ½ diag(D) + RᵀR / (2(k − 1)))        with a low rank, k ≥ 2
    θ ~ N(μ, diag(D))                             without one

Draws of it are run through the network. The statistics of batch norm belong to the weights: they are computed anew for
each draw, by one pass over the data.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lapwing import data as loading
from lapwing import given, tree
from lapwing.arguments import as_likelihood
from lapwing.ensembles.deep import assembled
from lapwing.errors import InvalidValue
from lapwing.operators import linalg
from lapwing.posterior import Particles
from lapwing.shell import Blended, Fitted
from lapwing.subsets import Swag
from lapwing.tangent import TangentModel, linearize


@torch.inference_mode(False)
def swag(
    source: Swag,
    likelihood: Any,
    *,
    samples: int = 32,
    data: Any = None,
    forward: Any = None,
    generator: torch.Generator | None = None,
) -> Fitted | Blended:
    """Draws of the Gaussian that a `lw.subsets.Swag(model, rank=20)` has seen, as equally likely particles.

    data: those of training, which a network with batch norm needs. Its file is loaded with the network as it is now."""
    if not isinstance(source, Swag):
        raise InvalidValue(f"swag reads a lw.subsets.Swag that was updated in training, got {type(source).__name__}")
    theta = drawn(source, given.whole(samples, "samples", 1), given.generator(generator))
    tangent, likelihood = linearize(source.model, forward=forward), as_likelihood(likelihood)
    if not tangent.layout.same_as(source.layout):
        raise InvalidValue("the model has other trainable parameters than when Swag was made; make a new one")
    normed = any(isinstance(m, _BatchNorm) for m in tangent.model.modules())
    if normed and data is None:
        raise InvalidValue(
            "the network has batch norm, whose statistics belong to the weights; pass data= to renew them"
        )
    n, targets = (0, None) if data is None else _counted(data, tangent.device)
    rest = None, n, targets, f"swag of {source.snapshots} snapshots"
    if not normed:
        return Fitted(Particles(tangent, theta), likelihood.to(tangent.device), *rest)
    batches = loading.as_batches(data)
    return assembled([_renewed(tangent, w, batches) for w in theta], likelihood, *rest)


def drawn(source: Swag, n: int, generator: torch.Generator) -> Tensor:
    """n weight vectors of the Gaussian, (n, p)."""
    variance, R = source.variance(), source.deviations()
    z = linalg.standard_normal((n, source.layout.size), generator, source.mean) * variance.sqrt()
    if len(R) < 2:
        return source.mean + z
    low = linalg.standard_normal((n, len(R)), generator, source.mean) @ R / (len(R) - 1) ** 0.5
    return source.mean + (z + low) / 2**0.5


def _renewed(tangent: TangentModel, theta: Tensor, batches: Any) -> TangentModel:
    """The network at a draw, its batch-norm statistics averaged over a pass; all other layers in eval mode."""
    model = copy.deepcopy(tangent.model).eval()
    own = tangent.embed(tangent.layout.unflatten(theta))
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in own:
                p.copy_(own[name])
        for m in norms:
            m.reset_running_stats()
            m.momentum, m.training = None, True
        for x, _ in loading.passes(batches, tangent.device):
            tangent.forward(model, x)
    _settle(norms, tangent.model)
    return linearize(model, forward=tangent.forward)


def _settle(norms: list[_BatchNorm], model: nn.Module) -> None:
    """Back in eval mode, with the momenta that they had."""
    for m, was in zip(norms, (m for m in model.modules() if isinstance(m, _BatchNorm)), strict=True):
        m.momentum, m.training = was.momentum, False


def _counted(data: Any, device: torch.device) -> tuple[int, int]:
    n, targets = 0, 0
    for _, y in loading.passes(loading.as_batches(data), device):
        n, targets = n + len(y), (targets + tree.digest(y)) % 2**64
    return n, targets
