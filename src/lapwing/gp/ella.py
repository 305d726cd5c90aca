"""ELLA, the linearized Laplace approximation by k features ψ(x) = J(x) Vᵀ of the tangent kernel (`features.py`):

    θ = θ* + z V,   z ~ N(−V A (θ* − m), I) before,   G = Σ_n ψ_nᵀ Λ_n ψ_n + I after
    f(x) ~ N(f(x, θ*), ψ G⁻¹ ψᵀ)
    log Z = log p(D | θ*) − ½ ‖V A (θ* − m)‖² − ½ log|G|

With all rows as anchors and their full rank it is the exact linearized Laplace approximation wherever J(x) lies in the
span of the data's rows. What lies outside of it has no variance at all, unlike with structure="lowrank": error bars far
from the data are too small. log Z is at least that of the full curvature at the trained weights: it leaves out what
both the prior and the data ask outside of the span. V belongs to A times any number c: V/√c, and G and log Z follow
without a pass. Source: Deng, Zhou and Zhu 2022, who sum G over a part of the data, chosen by validation; here it is
summed over all. Shapes: n data, p parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import given
from lapwing.api.verbs import LOADERS
from lapwing.arguments import as_budget, as_likelihood, as_prior, as_ranks, as_shard, as_tangent, facts
from lapwing.curvature import accumulate, probe
from lapwing.errors import InvalidValue
from lapwing.gp.features import Span, anchored
from lapwing.gp.fit import SAME, FeatureFit, feature_prior, loaded
from lapwing.operators import linalg
from lapwing.posterior import Process, curvature
from lapwing.predictive import FunctionSamples


@torch.inference_mode(False)
def ella(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    anchors: int = 2_000,
    rank: int = 20,
    prior: Any = 1.0,
    subset: Any = "all",
    forward: Any = None,
    memory_budget: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: Any = None,
) -> Ella:
    """Fit ELLA by two passes over the data: one for its anchors, one for G.

    anchors: how many rows of the Jacobian (an output of an example each) are drawn from the data, without replacement.
    rank: how many features are made of them. The other arguments are those of `lw.laplace`; over a process group,
    anchors are drawn among the data of all ranks, and each rank makes the features of all of them.
    """
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        anchors, rank = given.whole(anchors, "anchors of ella", 1), given.whole(rank, "the rank of ella", 1)
        budget, likelihood = as_budget(memory_budget), as_likelihood(likelihood)
    batches = as_shard(data, ranks)
    ranks, tangent = loading.ranks_of(batches), as_tangent(model, batches, subset, forward)
    with ranks.sharing_errors("reading the prior"):
        bound = feature_prior(as_prior(prior, tangent.layout, tangent.device))
    ranks.agree(
        facts(tangent, likelihood, bound, f"ella, {rank} features, {anchors} anchors", "exact", budget, generator),
        SAME,
    )
    seen = probe(tangent, batches, likelihood)
    generator = given.generator(generator)
    found = anchored(tangent, batches, bound, seen, anchors, rank, budget, generator, progress)
    likelihood = likelihood.to(tangent.device)
    state = accumulate(found, tangent, likelihood, batches, "exact", progress=progress, seen=seen)
    expected = seen.n - ranks.count(loading.dropped(batches), "dropped examples")
    if state.n != expected:
        raise InvalidValue(
            f"the data gave {expected} examples in one pass and {state.n} in another; give a loader that holds the "
            "same examples in every pass"
        )
    return Ella(state, bound, likelihood)


@dataclass(frozen=True, eq=False, repr=False)
class Ella(FeatureFit):
    """A network with a Gaussian process over its outputs, of finite rank. Frozen."""

    @property
    def span(self) -> Span:
        """The features: V of the prior of the fit, and where they are from."""
        return self.features

    @property
    def anchors(self) -> int:
        """How many rows of the Jacobian the features are made of."""
        return self.span.anchors

    @property
    def share(self) -> float:
        """How much of the kernel's trace at the anchors the features have."""
        return self.span.share

    @property
    def directions(self) -> Tensor:
        """V (k, p), orthonormal in the prior's precision: V A Vᵀ = I."""
        return self.span.directions / self.span.scale(self.prior).detach().sqrt()

    def prior_mean(self) -> Tensor:
        """V A (m − θ*), (k,)."""
        theta = self.tangent.theta.to(torch.float64)
        return (self.span.directions * self.span.precision) @ (self.prior.mean_vector() - theta)

    @cached_property
    def posterior(self) -> Process:
        """f(x) with its error bars, by the features of the fit and z ~ N(·, I/c)."""
        with torch.inference_mode(False), torch.no_grad():
            state, prior, likelihood = self._in_span()
            gram = linalg.to_dense(curvature(state, likelihood))
            return Process(self.tangent, self.span.features(self.tangent), gram, prior.precision)

    # -- draws ----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def function_samples(self, n: int = 1, generator: torch.Generator | None = None) -> FunctionSamples:
        """n functions drawn from the process, each the same function at all inputs of all calls: `functions(x)` are
        outputs (n, *f.shape)."""
        z = self.posterior.draw(given.whole(n, "the number of functions", 1), generator)
        return FunctionSamples(self.tangent, z @ self.span.directions)

    def draw(self, n: int = 1, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """n weights θ* + z V in the span of the features, {parameter: (n, *shape)}. A process is one of functions: they
        stand for f(x) + J(x)(θ − θ*), which `function_samples` gives, and not for the network at θ."""
        away = self.function_samples(n, generator).away
        return self._named(away + self.tangent.theta.to(away))

    def __repr__(self) -> str:
        tuned, rank = "" if self.tuning is None else f"; tuned by {self.tuning.method}", len(self.span.directions)
        return (
            f"Ella({self.likelihood.name}; rank {rank} with {100 * self.share:.1f} % of the kernel at "
            f"{self.anchors:,} anchors; {self.state.layout.size:,} parameters, {self.n:,} examples{tuned})"
        )


LOADERS["ella"] = partial(loaded, Ella)
