"""The density that every method starts from, of the selected weights θ (p,) with the data D:

    log p(D, θ) = Σ_n log p(y_n | f(x_n, θ)) + log p(θ)

f is the network itself, not its tangent. A sampler walks on it, and hands what it found to `fitted`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import tree
from lapwing.arguments import as_likelihood, as_prior, as_tangent
from lapwing.curvature.accumulate import check_targets, flat_outputs, flat_targets
from lapwing.errors import Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Posterior
from lapwing.priors import Prior
from lapwing.shell import Fitted
from lapwing.tangent import TangentModel
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels


@dataclass(frozen=True, eq=False)
class LogJoint:
    """θ ↦ log p(D, θ), 0-dim float64; differentiable in θ."""

    tangent: TangentModel
    likelihood: Likelihood
    prior: Prior
    batches: Any
    n: int
    targets: int  # a digest of them

    @property
    def start(self) -> Tensor:
        """The trained weights, (p,), float64."""
        return self.tangent.theta.to(torch.float64)

    def __call__(self, theta: Tensor) -> Tensor:
        weights = self.tangent.layout.unflatten(theta)
        total = self.prior.log_prob(weights)
        with evaluating(self.tangent.model), plain_kernels():
            for x, y in loading.passes(self.batches, self.tangent.device):
                f = self.tangent.apply({name: w.to(self.tangent.dtype) for name, w in weights.items()}, x)
                targets = flat_targets(self.likelihood, f, y)
                total = total + self.likelihood.log_prob(flat_outputs(f).double(), targets).sum()
        return total

    def fitted(self, posterior: Posterior, made: str, likelihood: Likelihood | None = None) -> Fitted:
        """The network with a posterior that was found, and by what. likelihood: one for each particle, if its noise was
        sampled too (`lw.likelihoods.Several`)."""
        return Fitted(posterior, likelihood or self.likelihood, self.prior, self.n, self.targets, made)


@torch.inference_mode(False)
def log_joint(
    model: nn.Module, data: Any, likelihood: Any, prior: Any = 1.0, *, subset: Any = "all", forward: Any = None
) -> LogJoint:
    """The log-density of weights and data together, by one pass that reads the data; arguments as in `lw.laplace`."""
    likelihood, batches = as_likelihood(likelihood), loading.as_batches(data)
    tangent = as_tangent(model, batches, subset, forward)
    bound = as_prior(prior, tangent.layout, tangent.device)
    if bound.of_curvature:
        raise Unsupported("the g-prior is made of the curvature, which this density does not have; use a precision")
    n, targets, likelihood = 0, 0, likelihood.to(tangent.device)
    for x, y in loading.passes(batches, tangent.device):
        loading.check_finite(x, "the inputs")
        f = tangent(x)
        check_targets(likelihood, f, y)
        n, targets = n + len(y), (targets + tree.digest(y)) % 2**64
    return LogJoint(tangent, likelihood, bound, batches, n, targets)
