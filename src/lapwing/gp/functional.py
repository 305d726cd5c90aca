"""Functional Laplace: the tangent model of a trained network as a Gaussian process f ~ GP(f(x, θ*), J A⁻¹ Jᵀ), given
the data's curvature Λ.

    inducing=None      exact, by the kernel of all data: `lw.laplace` with structure "full" in its dual form
    inducing=m or Z    by inducing inputs (`inducing.py`): N(f(x, θ*), ψ G⁻¹ ψᵀ + c⁻¹(k − ψ ψᵀ)), G = Σ ψᵀΛψ + c I
    independent=True   by one kernel (n, n) for each output (`independent.py`)

What inducing inputs do not see keeps the prior's variance: error bars far from them are not too small. With all data as
inducing inputs it is the exact process. The evidence is that of the features, with all of ½‖θ* − m‖²_A: an upper
bound of the exact one at the trained weights, and equal to it with all data.
Sources: Khan et al. 2019, Immer et al. 2021 (the process), Quiñonero-Candela and Rasmussen 2005 (DTC).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import given, tree
from lapwing.api.verbs import LOADERS, laplace
from lapwing.arguments import as_likelihood, as_prior, as_ranks, as_shard, as_tangent, facts
from lapwing.curvature import BUDGET, Full, accumulate, probe
from lapwing.errors import InvalidValue, Unsupported
from lapwing.gp.choice import CHOICES, by_evidence, farthest
from lapwing.gp.fit import SAME, FeatureFit, feature_prior, gathered, loaded
from lapwing.gp.independent import independent as one_each
from lapwing.gp.inducing import Inducing, induced
from lapwing.operators import linalg
from lapwing.posterior import Process, curvature
from lapwing.posterior.base import check_inputs


@torch.inference_mode(False)
def functional(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    inducing: Any = None,
    choice: str = "farthest",
    independent: bool = False,
    prior: Any = 1.0,
    process_group: Any = None,
) -> Any:
    """The tangent model of a trained network as a Gaussian process, fitted to data.

    inducing: None for the exact process of all data, a `Laplace`; a number of inputs that are chosen among the data; or
    inputs, as the network takes them. choice: of a number of them, each the "farthest" from those before it, or that at
    which the "evidence" is off by most. independent: one kernel (n, n) for each output, a process of its own, of all
    data. data, likelihood, prior and process_group as in `lw.laplace`; over a process group, inputs are chosen among
    the data of all ranks, and independent=True keeps the data of all on each."""
    if independent and inducing is not None:
        raise Unsupported("independent=True is the process of all data, and takes no inducing inputs; drop one of them")
    if choice not in CHOICES:
        raise InvalidValue(f"choice must be one of {CHOICES}, got {choice!r}")
    if independent:
        return one_each(model, data, likelihood, prior, process_group)
    if inducing is None:
        return laplace(model, data, likelihood, structure=Full("dual"), prior=prior, process_group=process_group)
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        likelihood = as_likelihood(likelihood)
        count = given.whole(inducing, "the number of inducing inputs", 1) if isinstance(inducing, Integral) else 0
    batches = as_shard(data, ranks)
    ranks, tangent = loading.ranks_of(batches), as_tangent(model, batches, "all", None)
    with ranks.sharing_errors("reading the prior and the inducing inputs"):
        bound = feature_prior(as_prior(prior, tangent.layout, tangent.device))
        if not count:
            check_inputs(inducing)
    what = f"functional, {count} inducing inputs by {choice}"
    about = facts(tangent, likelihood, bound, what, "exact", BUDGET, None)
    ranks.agree(about, SAME)
    seen, likelihood = probe(tangent, batches, likelihood), likelihood.to(tangent.device)
    points = tree.moved(inducing, tangent.device)
    if count:
        x, y = gathered(batches, tangent, "inducing points are chosen among inputs that are tensors; give others as "
                        "inducing=inputs")  # fmt: skip
        by_bound = choice == "evidence"
        points = by_evidence(tangent, x, y, likelihood, bound, count) if by_bound else farthest(x, count)
    with torch.no_grad():
        made = induced(tangent, points, bound, ranks)
    return Functional(accumulate(made, tangent, likelihood, batches, "exact", seen=seen), bound, likelihood)


@dataclass(frozen=True, eq=False, repr=False)
class Functional(FeatureFit):
    """A network with a Gaussian process over its outputs, by inducing inputs. Frozen. Its file holds those inputs."""

    @property
    def inducing(self) -> Inducing:
        """The inducing inputs, and the features that are made of them."""
        return self.features

    def prior_mean(self) -> Tensor:
        """V A (m − θ*), and what no feature sees of it, (k,)."""
        with torch.no_grad():
            away = self.prior.mean_vector() - self.tangent.theta.to(torch.float64)
            return self.inducing.seen(self.tangent, away)

    @cached_property
    def posterior(self) -> Process:
        """f(x) with its error bars: those of the features, and the prior's outside of them."""
        with torch.inference_mode(False), torch.no_grad():
            state, prior, likelihood = self._in_span()
            gram = linalg.to_dense(curvature(state, likelihood))
            outside = partial(self.inducing.outside, self.tangent)
            return Process(self.tangent, self.inducing.features(self.tangent), gram, prior.precision, outside)

    def draw(self, n: int = 1, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """A process of inducing inputs draws functions, not weights: an error that says how."""
        raise Unsupported(
            "a process of inducing inputs has draws of functions, and none of weights; use "
            "predict(x, joint=True).f_sample(n)"
        )

    def __repr__(self) -> str:
        tuned, points = "" if self.tuning is None else f"; tuned by {self.tuning.method}", self.inducing.points
        return (
            f"Functional({self.likelihood.name}; {self.inducing.basis.shape[1]:,} features of "
            f"{tree.batch_size(points):,} inducing inputs; {self.state.layout.size:,} parameters, {self.n:,} "
            f"examples{tuned})"
        )


LOADERS["functional"] = partial(loaded, Functional)
