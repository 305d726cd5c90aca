"""The bound, and the climb on it by Adam. At the temperature T, with b of n examples and one draw θ ~ q a step:

    L = (n/b) Σ_batch log p(y | f(x, θ)) / T − KL                                         T = 1: log p(D) ≥ E[L]
    KL closed     −E_q[log p(θ)] / T − H(q),   E_q[log p(θ)] = log p(μ) − ½ Σ A_i Σ_ii       a Gaussian prior and q
    KL sampled    log q(θ) − log p(θ) / T                                                    at the same draw

(Graves 2011; Blundell et al. 2015). Sampled, slopes of a normal q pass through θ alone, not through the parameters in
log q: what is left out has the mean 0, and at a q that is the posterior itself no noise is left (Roeder et al. 2017).
Another family has H(q) in closed form. The step size falls to 0 as a cosine. q is the mean of the last quarter's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.errors import NotConverged
from lapwing.operators import linalg
from lapwing.samplers.target import Target
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels
from lapwing.tree import map_tensors
from lapwing.variational.factors import Approximation, MeanField, held
from lapwing.variational.noise import adding, hooked, noisy_layers

AVERAGED = 0.25  # of the steps, the last


@dataclass(frozen=True)
class Objective:
    """L of a q, by noise in layers where `layers` has them."""

    target: Target
    q: Approximation
    batch: int
    layers: dict[str, Any]
    closed: bool  # the KL in closed form

    @staticmethod
    def of(target: Target, q: Approximation, batch: int, local: bool, closed: bool) -> Objective:
        """With noise in layers, if asked for and q allows it."""
        examples, tangent = target.examples, target.joint.tangent
        layers = {}
        if local and isinstance(q, MeanField) and q.normal:
            with evaluating(tangent.model), plain_kernels():
                layers = noisy_layers(tangent, examples.batches[0][0])
        return Objective(target, q, min(batch, examples.n), layers, closed)

    def value(self, generator: torch.Generator) -> Tensor:
        """One noisy L, 0-dim."""
        theta = self.q.draw(1, generator)[0]
        return self.fit(theta, generator) / self.target.temperature - self.kl(theta)

    def fit(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """E log p(D | θ), estimated by some examples."""
        tangent, likelihood = self.target.joint.tangent, self.target.joint.likelihood
        layout, (x, y) = tangent.layout, self.some(generator)
        weights, means = layout.unflatten(theta), layout.unflatten(self.q.mean)
        deviation = layout.unflatten(self.q.variance().sqrt()) if self.layers else {}
        noisy = {f"{name}.{key}" if name else key for name, m in self.layers.items() for key, _ in m.named_parameters()}
        params = {k: (means[k] if k in noisy else w).to(tangent.dtype) for k, w in weights.items()}
        with hooked(self.layers, adding(deviation, generator)):
            f = tangent.apply(params, x)
        log_prob = likelihood.log_prob(flat_outputs(f).double(), flat_targets(likelihood, f, y)).sum()
        return log_prob * (self.target.examples.n / len(y))

    def some(self, generator: torch.Generator) -> tuple[Any, Tensor]:
        """A batch; all examples where that is as many."""
        examples = self.target.examples
        if self.batch == examples.n and len(examples.batches) == 1:
            return examples.batches[0]
        index = torch.randint(examples.n, (1, self.batch), generator=generator, device=generator.device)
        x, y = examples.some(index.to(self.target.joint.tangent.device))
        return map_tensors(lambda t: t[0], x), y[0]

    def kl(self, theta: Tensor) -> Tensor:
        """KL(q ‖ p^{1/T}) up to a constant, in closed form or at a draw."""
        prior, t = self.target.joint.prior, self.target.temperature
        if self.closed:
            a = linalg.diagonal(prior.quadratic(self.q.mean.detach())[0]).detach()
            expected = prior.log_density(self.q.mean) - 0.5 * (a * self.q.variance()).sum()
            return -expected / t - self.q.entropy()
        log_q = held(self.q).log_q(theta.unsqueeze(0))[0] if self.q.normal else -self.q.entropy()
        return log_q - prior.log_density(theta) / t


def climbed(objective: Objective, steps: int, lr: float, generator: torch.Generator, progress: bool) -> Tensor:
    """Move q up the bound; the value at each step, (steps,)."""
    parameters = objective.q.parameters
    adam = torch.optim.Adam(parameters, lr=lr)
    first, trace = steps - max(1, int(AVERAGED * steps)), []
    sums = [torch.zeros_like(p) for p in parameters]
    tangent = objective.target.joint.tangent
    with evaluating(tangent.model), plain_kernels():
        for t in tqdm(range(steps), "variational", disable=not progress, leave=False):
            for group in adam.param_groups:
                group["lr"] = 0.5 * lr * (1 + math.cos(math.pi * t / steps))
            adam.zero_grad()
            value = objective.value(generator)
            (-value).backward()
            if not all(
                bool(torch.isfinite(p).all()) for p in (value, *(p.grad for p in parameters if p.grad is not None))
            ):
                raise NotConverged(
                    f"variational inference diverged at step {t + 1} of {steps}: the bound is "
                    f"{float(value.detach()):.3g}, or its slope is not finite; give lr= smaller, or scale the data"
                )
            adam.step()
            trace.append(value.detach())
            if t >= first:
                for total, p in zip(sums, parameters, strict=True):
                    total += p.detach()
    with torch.no_grad():
        for total, p in zip(sums, parameters, strict=True):
            p.copy_(total / (steps - first))
    return torch.stack(trace)
