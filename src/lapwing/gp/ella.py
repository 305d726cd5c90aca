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

from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import given, io, tune
from lapwing.api.object import check_served
from lapwing.api.verbs import LOADERS, linearized
from lapwing.arguments import as_budget, as_likelihood, as_prior, as_ranks, as_shard, as_tangent, facts
from lapwing.curvature import BUDGET, State, accumulate, probe
from lapwing.errors import BrokenFile, InvalidValue, Unsupported
from lapwing.evidence import Evidence, decompose, effective_dimension
from lapwing.gp.features import Span, anchored
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.packing import sound
from lapwing.posterior import Process, curvature
from lapwing.predictive import FunctionSamples
from lapwing.priors import Gaussian, Prior
from lapwing.push import pushed
from lapwing.shell import Shell
from lapwing.tangent import TangentModel
from lapwing.tree import Layout


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
        bound = _gaussian(as_prior(prior, tangent.layout, tangent.device))
    ranks.agree(
        facts(tangent, likelihood, bound, f"ella, {rank} features, {anchors} anchors", "exact", budget, generator),
        "Give every rank the same network (load one file, or broadcast the weights) and the same arguments",
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
class Ella(Shell):
    """A network with a Gaussian process over its outputs, of finite rank. Frozen."""

    center: ClassVar[str] = "map"
    state: State  # Σ ψᵀΛψ at unit noise, of features under the prior of the fit
    prior: Gaussian  # that of the fit times c
    likelihood: Likelihood
    tuning: tune.Tuning | None = None

    def __post_init__(self) -> None:
        self.span.scale(self.prior)  # raises where the features are another prior's

    @property
    def span(self) -> Span:
        """The features: V of the prior of the fit, and where they are from."""
        return self.state.structure  # type: ignore[return-value]

    @property
    def n(self) -> int:  # type: ignore[override]
        """Examples that were fitted."""
        return self.state.n

    @property
    def targets(self) -> int | None:  # type: ignore[override]
        """A digest of their targets."""
        return self.state.targets

    @property
    def tangent(self) -> TangentModel:
        """The network as a function of its selected weights."""
        return self.state.tangent

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

    @cached_property
    def posterior(self) -> Process:
        """f(x) with its error bars, by the features of the fit and z ~ N(·, I/c)."""
        with torch.inference_mode(False), torch.no_grad():
            state, prior, likelihood = self._in_span()
            features = partial(pushed, self.tangent, self.span.directions)
            return Process(self.tangent, features, linalg.to_dense(curvature(state, likelihood)), prior.precision)

    def _in_span(self) -> tuple[State, Gaussian, Likelihood]:
        """The model of z alone, as the evidence takes it: a state at z = 0, a prior and the likelihood."""
        found, theta = self.span, self.tangent.theta.to(torch.float64)
        mean = (found.directions * found.precision) @ (self.prior.mean_vector() - theta)
        layout = Layout({"z": mean.shape}, {})
        here: Any = SimpleNamespace(layout=layout, theta=torch.zeros_like(mean), device=mean.device, dtype=mean.dtype)
        prior = Gaussian(found.scale(self.prior), mean={"z": mean}).bind(layout, mean.device)
        return replace(self.state, tangent=here), prior, self.likelihood

    # -- evidence -------------------------------------------------------------------------------------------------

    def log_evidence(self) -> Tensor:
        """log p(D) of the weights in the span, 0-dim float64; differentiable in the prior's scale and the noise."""
        return self.decompose().log_evidence

    @torch.inference_mode(False)
    def decompose(self) -> Evidence:
        """The log evidence by its terms, fit − quadratic − occam."""
        return decompose(*self._in_span())

    @torch.inference_mode(False)
    def effective_dimension(self) -> Tensor:
        """How many of the features the data determine, (1,)."""
        return effective_dimension(*self._in_span())

    @torch.inference_mode(False)
    def tuned(self, fixed: str | tuple[str, ...] = (), *, progress: bool = False) -> Ella:
        """A new object with the scale of the prior and the noise that the evidence picks; reads no data.

        The features stay, so groups of the prior keep their ratios. fixed: hyperparameters to hold."""
        state, prior, likelihood = self._in_span()
        held = (fixed,) if isinstance(fixed, str) else tuple(fixed)
        found, likelihood, tuning = tune.evidence(state, prior, likelihood, held, progress=progress)
        c = float((found.hyperparameters["precision"] / prior.precision).detach())
        return replace(self, prior=self.prior.scaled(c), likelihood=likelihood, tuning=tuning)

    def replace(self, prior: Any = None, likelihood: Any = None) -> Ella:
        """The same features under another noise, or a prior that is this one times a number: no pass."""
        device = self.tangent.device
        new = self.prior if prior is None else _gaussian(as_prior(prior, self.state.layout, device))
        noise = self.likelihood if likelihood is None else as_likelihood(likelihood).to(device)
        return replace(self, prior=new, likelihood=check_served(self.state, noise), tuning=None)

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

    def packed(self, path: Any) -> io.Content:
        """What goes into a file: tensors and a header, which are seen to be such as could be read again."""
        tensors, header = io.pack_state(self.state)
        more, objects = io.pack_objects(self.prior, self.likelihood, self.tuning)
        extra = {
            "schema": io.SCHEMA,
            "kind": "ella",
            "center": self.center,
            "center_map": None,
            "process_map": None,
            "calibration": None,
            "mean": "network",
            "memory_budget": BUDGET,
            "forward_hook": self.tangent.custom_forward,
            "temperature": 1.0,
        }
        tensors, header = tensors | more, header | objects | extra
        io.check_writable(tensors, header, path)
        return tensors, header

    def __repr__(self) -> str:
        tuned, rank = "" if self.tuning is None else f"; tuned by {self.tuning.method}", len(self.span.directions)
        return (
            f"Ella({self.likelihood.name}; rank {rank} with {100 * self.share:.1f} % of the kernel at "
            f"{self.anchors:,} anchors; {self.state.layout.size:,} parameters, {self.n:,} examples{tuned})"
        )


def _gaussian(prior: Prior) -> Gaussian:
    """The prior, if features of its kernel can be made before the curvature is known."""
    if not isinstance(prior, Gaussian):
        raise Unsupported(f"ella's features need a Gaussian prior, and {type(prior).__name__} is none; use a precision")
    if hasattr(prior, "at"):
        raise Unsupported("ella's prior cannot look at the curvature; use a precision or 'layerwise', not 'gprior'")
    return prior


def _loaded(tensors: dict[str, Tensor], header: dict[str, Any], model: nn.Module, forward: Any, path: Any) -> Ella:
    saved = io.checked(tensors, header, path)
    if saved.center != Ella.center or saved.temperature != 1:
        raise BrokenFile(f"it is ella's, centered at {saved.center!r} with a temperature of {saved.temperature}")
    tangent = linearized(saved, model, forward, path)
    state, device = saved.attached(tangent), tangent.device
    state = replace(state, structure=state.structure.to(device))  # type: ignore[attr-defined]
    with sound("its prior"):
        prior = _gaussian(saved.prior.bind(tangent.layout, device))
        return Ella(state, prior, saved.likelihood.to(device), saved.tuning)


LOADERS["ella"] = _loaded
