"""What fits by features of the tangent kernel share: a state, the prior of the features times c, a likelihood.

    f(x) = f(x, θ*) + ψ(x) z,   z ~ N(·, I/c) before,   G = Σ_n ψ_nᵀ Λ_n ψ_n + c I after

Their evidence is that of a k-dimensional model of z, so `evidence.py` and `tune/` serve it as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing import data as loading
from lapwing import io, tune
from lapwing.api.object import check_served
from lapwing.api.verbs import linearized
from lapwing.arguments import as_likelihood, as_prior
from lapwing.curvature import BUDGET, State
from lapwing.errors import BrokenFile, Unsupported
from lapwing.evidence import Evidence, decompose, effective_dimension
from lapwing.likelihoods import Likelihood
from lapwing.packing import sound
from lapwing.priors import Gaussian, Prior, check_independent
from lapwing.shell import Shell
from lapwing.tangent import TangentModel
from lapwing.tree import Layout


@dataclass(frozen=True, eq=False, repr=False)
class FeatureFit(Shell):
    """A network with a Gaussian process over its outputs, by features. Frozen."""

    center: ClassVar[str] = "map"
    state: State  # Σ ψᵀΛψ at unit noise, of features under the prior of the fit
    prior: Gaussian  # that of the fit times c
    likelihood: Likelihood
    tuning: tune.Tuning | None = None

    def __post_init__(self) -> None:
        self.features.scale(self.prior)  # raises where the features are another prior's

    @property
    def features(self) -> Any:
        """The structure that makes the features: `scale(prior)`, and where they are from."""
        return self.state.structure

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

    def prior_mean(self) -> Tensor:
        """Of z, (k,): the weights' prior mean as the features see it from θ*."""
        raise NotImplementedError

    def _in_span(self) -> tuple[State, Gaussian, Likelihood]:
        """The model of z alone, as the evidence takes it: a state at z = 0, a prior and the likelihood."""
        mean = self.prior_mean()
        layout = Layout({"z": mean.shape}, {})
        here: Any = SimpleNamespace(layout=layout, theta=torch.zeros_like(mean), device=mean.device, dtype=mean.dtype)
        prior = Gaussian(self.features.scale(self.prior), mean={"z": mean}).bind(layout, mean.device)
        return replace(self.state, tangent=here), prior, self.likelihood

    def log_evidence(self) -> Tensor:
        """log p(D), 0-dim float64, at the trained weights; differentiable in the prior's scale and the noise."""
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
    def tuned(self, fixed: str | tuple[str, ...] = ()) -> Any:
        """A new object with the scale of the prior and the noise that the evidence picks; reads no data.

        The features stay, so groups of the prior keep their ratios. fixed: hyperparameters to hold."""
        state, prior, likelihood = self._in_span()
        held = (fixed,) if isinstance(fixed, str) else tuple(fixed)
        found, likelihood, tuning = tune.evidence(state, prior, likelihood, held)
        c = float((found.hyperparameters["precision"] / prior.precision).detach())
        return replace(self, prior=self.prior.scaled(c), likelihood=likelihood, tuning=tuning)

    def replace(self, prior: Any = None, likelihood: Any = None) -> Any:
        """The same features under another noise, or a prior that is this one times a number: no pass."""
        device = self.tangent.device
        new = self.prior if prior is None else feature_prior(as_prior(prior, self.state.layout, device))
        noise = self.likelihood if likelihood is None else as_likelihood(likelihood).to(device)
        return replace(self, prior=new, likelihood=check_served(self.state, noise), tuning=None)

    def packed(self, path: Any) -> io.Content:
        """What goes into a file: tensors and a header, which are seen to be such as could be read again."""
        tensors, header = io.pack_state(self.state)
        more, objects = io.pack_objects(self.prior, self.likelihood, self.tuning)
        extra = {
            "schema": io.SCHEMA,
            "kind": self.features.shell,
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


def feature_prior(prior: Prior) -> Gaussian:
    """The prior, if features of its kernel can be made before the curvature is known."""
    if not isinstance(prior, Gaussian):
        raise Unsupported(
            f"features of a kernel need a Gaussian prior, and {type(prior).__name__} is none; use a precision"
        )
    check_independent(prior, "a process by features of the tangent kernel")
    if prior.of_curvature:
        raise Unsupported(
            "the prior of features cannot look at the curvature; use a precision or 'layerwise', not 'gprior'"
        )
    return prior


SAME = "Give every rank the same network (load one file, or broadcast the weights) and the same arguments"


def gathered(batches: Any, tangent: TangentModel, otherwise: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the data of all ranks; otherwise: the error where inputs are no tensors."""
    ranks = loading.ranks_of(batches)
    with ranks.sharing_errors("reading the data"):
        parts = list(loading.passes(batches, tangent.device))
        if not all(isinstance(v, Tensor) for part in parts for v in part):
            raise Unsupported(otherwise)
    x, y = (torch.cat(some) for some in zip(*ranks.joined(parts, "the data of all ranks"), strict=True))
    return x, y


def loaded(
    cls: type[FeatureFit], tensors: dict[str, Tensor], header: dict[str, Any], model: nn.Module, forward: Any, path: Any
) -> Any:
    """A fit of this class from a file's content."""
    saved = io.checked(tensors, header, path)
    if saved.center != cls.center or saved.temperature != 1:
        raise BrokenFile(f"it is of features, centered at {saved.center!r} with a temperature of {saved.temperature}")
    tangent = linearized(saved, model, forward, path)
    state, device = saved.attached(tangent), tangent.device
    state = replace(state, structure=state.structure.to(device))  # type: ignore[attr-defined]
    with sound("its prior"):
        prior = feature_prior(saved.prior.bind(tangent.layout, device))
        return cls(state, prior, saved.likelihood.to(device), saved.tuning)
