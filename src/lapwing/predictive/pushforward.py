"""From the posterior over weights to the outputs at new inputs: f(x) ~ N(f(x, θ*), J(x) Σ J(x)ᵀ) (Eq. 4).

via="tangent"   the Gaussian above, exact for the tangent model
via="network"   weights are drawn and run through the network itself; known to underfit, offered for comparison
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.data import check_finite
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import RootPlusDiagonal
from lapwing.posterior import Gaussian
from lapwing.predictive.prediction import Prediction
from lapwing.tangent import StreamedRows, TangentModel, pieces_of
from lapwing.tangent.kernels import plain_kernels
from lapwing.tangent.linearize import evaluating


def predict(
    tangent: TangentModel,
    posterior: Gaussian,
    likelihood: Likelihood,
    x: Any,
    link: str = "auto",
    *,
    joint: bool = False,
    via: str = "tangent",
    samples: int = 64,
    generator: torch.Generator | None = None,
    memory_budget: int = 2**30,
) -> Prediction:
    check_finite(x, "the inputs")
    with torch.no_grad():
        if via == "network":
            return _through_network(tangent, posterior, likelihood, x, link, joint, samples, generator)
        if via != "tangent":
            raise InvalidValue(f"via must be 'tangent' or 'network', got {via!r}")
        f = tangent(x)
        if len(f) == 0:
            raise InvalidValue("the inputs hold no example to predict at; give at least one")
        cov = covariance(tangent, posterior, x, f, joint, memory_budget)
        return Prediction(likelihood, _float(f), cov.to(_float(f)), link, joint)


def covariance(tangent: TangentModel, posterior: Gaussian, x: Any, f: Tensor, joint: bool, budget: int) -> Tensor:
    """J Σ Jᵀ: (n, ..., c, c), or (n, c, n, c) if joint."""
    n, c = f.shape[0], f.shape[-1]
    outputs = f[0].numel()  # q·c an example
    if joint and f.ndim != 2:
        raise InvalidValue(f"joint=True needs outputs (n, c), got {tuple(f.shape)}")
    eye = torch.eye(outputs, dtype=f.dtype, device=f.device).reshape(outputs, *f.shape[1:])
    u = eye.expand(n, *eye.shape)
    block = n * c if joint else c
    if isinstance(posterior.precision, RootPlusDiagonal):
        blocks = posterior.covariance((StreamedRows(tangent, ((x, u),), budget), block))
    elif joint:
        blocks = posterior.covariance(tangent.pulled(x, u).reshape(1, block, -1))
    else:
        each = outputs * tangent.layout.size * 24  # float32 rows, and float64 rows twice
        pieces = pieces_of(x, u, each, budget // 2)
        blocks = torch.cat(
            [posterior.covariance(tangent.pulled(*p).reshape(-1, c, tangent.layout.size)) for p in pieces]
        )
    return blocks.reshape(n, c, n, c) if joint else blocks.reshape(*f.shape, c)


def _through_network(
    tangent: TangentModel,
    posterior: Gaussian,
    likelihood: Likelihood,
    x: Any,
    link: str,
    joint: bool,
    samples: int,
    generator: torch.Generator | None,
) -> Prediction:
    if link not in ("auto", "monte_carlo"):
        raise InvalidValue(f"via='network' averages over weight samples, so link={link!r} cannot apply; use 'auto'")
    if samples < 2:
        raise InvalidValue(f"via='network' takes the variance over weight samples: give at least 2, got {samples}")
    weights = posterior.draw(samples, generator).to(tangent.dtype)
    with evaluating(tangent.model), plain_kernels():
        outputs = torch.stack([_float(tangent.apply(tangent.layout.unflatten(w), x)) for w in weights])
    mean = outputs.mean(0)
    away = outputs - mean
    if joint:
        flat = away.reshape(samples, -1)
        cov = (flat.mT @ flat / (samples - 1)).reshape(*mean.shape, *mean.shape)
    else:
        cov = torch.einsum("s...a,s...b->...ab", away, away) / (samples - 1)
    return Prediction(likelihood, mean, cov, "monte_carlo", joint, outputs)


def _float(f: Tensor) -> Tensor:
    return f.to(torch.promote_types(f.dtype, torch.float32))
