"""Predict with a Gaussian over the weights: its outputs at new inputs, and what they say of y.

via="tangent"   by the tangent model, for which it is exact
via="network"   weights are drawn and run through the network itself; known to underfit, offered for comparison
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing.data import network_inputs
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Gaussian, Particles
from lapwing.predictive.prediction import Prediction
from lapwing.tangent.graph import graph_where_asked


@graph_where_asked
def predict(
    posterior: Gaussian,
    likelihood: Likelihood,
    x: Any,
    link: str = "auto",
    *,
    center: Tensor | None = None,
    joint: bool = False,
    via: str = "tangent",
    samples: int = 64,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
) -> Prediction:
    """Predict at x, about f(x), or about h(x, v̄) = f(x) + J(x)(v̄ − θ*) where a center v̄ (p,) is given."""
    likelihood, x = likelihood.predictive, network_inputs(x, posterior.tangent.device)
    if memory_budget is not None:
        posterior = replace(posterior, memory_budget=memory_budget)
    if via == "tangent":
        made = posterior.outputs(x, joint, center=center, samples=samples, generator=generator)
        return Prediction(likelihood, made, link)
    if via != "network":
        raise InvalidValue(f"via must be 'tangent' or 'network', got {via!r}")
    if samples < 2:
        raise InvalidValue(f"via='network' takes the variance over weight samples: give at least 2, got {samples}")
    drawn = Particles(posterior.tangent, posterior.draw(samples, generator))
    return Prediction(likelihood, drawn.outputs(x, joint), link)
