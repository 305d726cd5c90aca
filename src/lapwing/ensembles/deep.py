"""A deep ensemble: m trained networks of one architecture, each as likely as another.

    p(y | x) = (1/m) Σ_k p(y | f(x, θ_k))

(Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017). Members that differ in their trainable weights alone are particles
θ (m, p) of one network. Where buffers or frozen weights differ too (the statistics of batch norm, say), each member is
a particle of its own network, and the ensemble a mixture of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.arguments import as_likelihood, as_prior
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Particles
from lapwing.posterior.mixture import log_weights
from lapwing.priors import Prior
from lapwing.shell import Blended, Fitted
from lapwing.tangent import TangentModel, linearize

PLAIN = bool, int, float, str, tuple, type(None)


def deep(models: Sequence[nn.Module], likelihood: Any, *, forward: Any = None) -> Fitted | Blended:
    """Trained networks of one architecture as one fit, each with the same weight.

    likelihood, forward: as in `lw.laplace`. The fit has no prior and knows of no data. Its file is loaded with the
    first network; that of a mixture with any of the architecture."""
    if not isinstance(models, Sequence) or not models:
        raise InvalidValue(f"deep takes a list of trained networks, at least one; got {models!r}")
    tangents = [linearize(model, forward=forward) for model in models]
    return assembled(tangents, as_likelihood(likelihood), None, 0, None, "a deep ensemble")


def assembled(
    tangents: Sequence[TangentModel],
    likelihood: Likelihood,
    prior: Prior | None,
    n: int,
    targets: int | None,
    made: str,
) -> Fitted | Blended:
    """Networks as particles of the first, or as a mixture where more than the trainable weights differ."""
    first = tangents[0]
    for k, other in enumerate(tangents[1:], 1):
        check_alike(first, other, k)
    bound = None if prior is None else as_prior(prior, first.layout, first.device)
    theta = torch.stack([t.theta.to(first.device, torch.float64) for t in tangents])  # (m, p)
    rest = likelihood.to(first.device), bound, n, targets, made
    if all(same_constants(first, other) for other in tangents[1:]):
        return Fitted(Particles(first, theta), *rest)
    alone = (Particles(t, w.unsqueeze(0)) for t, w in zip(tangents, theta, strict=True))
    return Blended(tuple(Fitted(one, *rest) for one in alone), log_weights("uniform", len(tangents)))


def same_constants(a: TangentModel, b: TangentModel) -> bool:
    """Whether two networks agree in all that is not trainable, buffers and frozen weights."""
    return all(torch.equal(value, b.constants[name].to(value.device)) for name, value in a.constants.items())


def check_alike(a: TangentModel, b: TangentModel, k: int) -> None:
    """Raise unless member k has the architecture of member 0: modules, their settings, and shapes of tensors."""
    for what, mine, theirs in [
        ("layers", _modules(a.model), _modules(b.model)),
        ("trainable parameters", dict(a.layout.shapes), dict(b.layout.shapes)),
        ("other tensors", _shapes(a.constants), _shapes(b.constants)),
    ]:
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            if mine.get(name) != theirs.get(name):
                raise InvalidValue(
                    f"members 0 and {k} are of different architectures: among their {what}, {name or 'the network'!r} "
                    f"is {mine.get(name, 'missing')} and {theirs.get(name, 'missing')}; blend unlike networks by "
                    "lw.mixture([lw.ensembles.deep([a], ...), lw.ensembles.deep([b], ...)])"
                )


def _shapes(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: t.shape for name, t in tensors.items()}


def _modules(model: nn.Module) -> dict[str, Any]:
    """The class of each module, and those of its settings that are plain values or functions."""
    return {name: (type(m).__qualname__, _settings(m)) for name, m in model.named_modules()}


def _settings(module: nn.Module) -> dict[str, Any]:
    named = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    plain = {k: v for k, v in named.items() if isinstance(v, PLAIN)}
    return plain | {k: v.__qualname__ for k, v in named.items() if callable(v) and hasattr(v, "__qualname__")}
