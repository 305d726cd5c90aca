"""The density that samplers walk on, of k chains at once, in coordinates q (k, d) without bounds:

    log π(q) = (Σ_n log p(y_n | f(x_n, θ), σ) + log p(θ, scales) + log p(σ)) / T + log|∂(θ, scales, σ)/∂q|

q holds the weights θ (p of them), or what the prior lifts to weights and scales (`Prior.lift`), and log σ of a noise
with a density of its own. T is the temperature. Many chains are one run (routes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from lapwing import given, likelihoods
from lapwing.arguments import as_likelihood
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.errors import InvalidValue, Unsupported
from lapwing.log_joint import LogJoint, log_joint
from lapwing.positive import Positive
from lapwing.priors.base import Lifted
from lapwing.samplers.examples import HeldExamples
from lapwing.samplers.routes import Routes
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, plain_kernels


@dataclass(frozen=True, eq=False)
class Target:
    """q (k, d) ↦ log π (k,), and its gradient."""

    joint: LogJoint
    unknown: dict[str, Positive]  # hyperparameters of the likelihood that are sampled, with their densities
    temperature: float = 1.0

    @cached_property
    def examples(self) -> HeldExamples:
        """The data, in memory."""
        return HeldExamples.of(self.joint)

    @cached_property
    def split(self) -> int:
        """How many coordinates are the prior's; the others are logarithms of unknown hyperparameters."""
        return self.joint.tangent.layout.size + self.joint.prior.scales

    @property
    def size(self) -> int:
        """d."""
        return self.split + len(self.unknown)

    def start(self, weights: Tensor) -> Tensor:
        """Coordinates (k, d) at which the weights are these, (k, p)."""
        lowered = torch.stack([self.joint.prior.lower(w) for w in weights])
        typical = torch.tensor([density.typical for density in self.unknown.values()]).to(lowered)
        return torch.cat([lowered, typical.log().expand(len(weights), -1)], 1)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything below runs in this: the network in eval mode, by kernels that vmap knows."""
        modes = torch.inference_mode(False), torch.no_grad(), plain_kernels(), any_batching_rule()
        with ExitStack() as stack:
            for mode in (*modes, evaluating(self.joint.tangent.model)):
                stack.enter_context(mode)
            yield

    # -- one chain ------------------------------------------------------------------------------------------------

    def lifted(self, q: Tensor) -> tuple[Lifted, dict[str, Tensor]]:
        """What coordinates (d,) stand for: the prior's part, and the hyperparameters."""
        log_values = q[self.split :]
        return self.joint.prior.lift(q[: self.split]), {k: log_values[i].exp() for i, k in enumerate(self.unknown)}

    def _density(self, q: Tensor, x: Any, y: Tensor, share: tuple[float, float]) -> Tensor:
        """A share of what of log π needs no data, and some times what a batch adds to it."""
        found, values = self.lifted(q)
        log_prob, log_jacobian = found.log_prob, found.log_jacobian
        for name, density in self.unknown.items():
            log_prob = log_prob + density.log_prob(values[name])
            log_jacobian = log_jacobian + values[name].log()
        tangent, likelihood = self.joint.tangent, self.joint.likelihood
        likelihood = likelihood.at_values(values) if values else likelihood
        f = tangent.apply(tangent.layout.unflatten(found.weights.to(tangent.dtype)), x)
        fit = likelihood.log_prob(flat_outputs(f).double(), flat_targets(likelihood, f, y)).sum()
        part, times = share
        return (part * log_prob + times * fit) / self.temperature + part * log_jacobian

    # -- k chains -------------------------------------------------------------------------------------------------

    @cached_property
    def routes(self) -> Routes:
        """One chain's density as that of many."""
        return Routes(self._density, self.joint.tangent.eps)

    def value(self, q: Tensor) -> Tensor:
        """log π over all data, (k,)."""
        return self._summed(q, slopes=False)[0]

    def value_and_grad(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """log π and ∇ log π over all data, (k,) and (k, d); batch by batch, so that one batch's graph is held."""
        value, slope = self._summed(q, slopes=True)
        return value, slope

    def noisy_value_and_grad(self, q: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """log π and ∇ log π estimated by the examples index (k, b) of each chain, times n/b: (k,) and (k, d)."""
        x, y = self.examples.some(index)
        value, slope = self.routes(q, x, y, (1.0, self.examples.n / index.shape[1]), own=True, slopes=True)
        return value, slope

    def _summed(self, q: Tensor, slopes: bool) -> list[Tensor]:
        batches = self.examples.batches
        share = (1 / len(batches), 1.0)
        found = [self.routes(q, x, y, share, own=False, slopes=slopes) for x, y in batches]
        return [torch.stack(parts).sum(0) if len(batches) > 1 else parts[0] for parts in zip(*found, strict=True)]

    # -- what was found -------------------------------------------------------------------------------------------

    def named(self, q: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Of draws q (s, d): weights (s, p), the prior's scales, the likelihood's hyperparameters, {name: (s, ...)}."""
        found, values = vmap(self.lifted)(q)
        return found.weights, found.scales, values


@torch.inference_mode(False)
def targeted(
    model: nn.Module, data: Any, likelihood: Any, prior: Any, temperature: float, subset: Any, forward: Any
) -> Target:
    """What samplers walk on, once all is seen to fit together."""
    t = given.real(temperature, "the temperature")
    if t.ndim or not 0 < float(t) < float("inf"):
        raise InvalidValue(f"the temperature is a positive number, 1 for Bayes, got {t.tolist()}")
    unknown = likelihood.unknown if isinstance(likelihood, likelihoods.Likelihood) else {}
    known = likelihood.at_values({k: given.real(v.typical, k) for k, v in unknown.items()}) if unknown else likelihood
    joint = log_joint(model, data, as_likelihood(known), prior, subset=subset, forward=forward)
    if not joint.prior.proper:
        raise Unsupported(
            f"{type(joint.prior).__name__} is improper: its density has no integral, nor may the posterior's have one; "
            "use a proper prior, such as lw.priors.StudentT, or train a MAP with prior.penalty(model)"
        )
    return Target(joint, unknown, float(t))
