"""Estimators with a Gaussian over the weights: θ ~ N(θ*, P⁻¹), P = H / (σ² T) + diag(prior precision).

One pass of `lapwing.curvature.accumulate` gives H, which depends on neither prior nor noise; all else are verbs of its
operator. What differs between structures is in `full.py`, `kron.py`, `diag.py` and `lowrank.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.compat.laplace_torch import loading
from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.curvature import Backend
from lapwing.compat.laplace_torch.loading import Batches
from lapwing.compat.laplace_torch.predicting import Predicting
from lapwing.compat.laplace_torch.utils.enums import Likelihood
from lapwing.curvature import State, Structure, accumulate
from lapwing.errors import InvalidValue, warn
from lapwing.operators import linalg
from lapwing.push import At, push
from lapwing.tangent import TangentModel, linearize, proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.facts import Facts
from lapwing.tangent.kernels import plain_kernels
from lapwing.tangent.rows import units

CHUNK = 16  # weight vectors that the network is run at, at once


class ParametricLaplace(Predicting, BaseLaplace):
    """A Gaussian posterior over the selected weights, by one structure of the curvature."""

    _structure: Structure

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._state: State | None = None
        self._held: Any = None  # the precision of the last prior and noise, without gradient
        self._weighted: Any = None  # the temperature, the curvature at it and at the last noise, and the fit
        super().__init__(*args, **kwargs)
        self.mean = self.prior_mean

    def _changed(self, noise: bool) -> None:
        self._held = None
        if noise:
            self._weighted = None

    # -- fitting --------------------------------------------------------------------------------------------------

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Sum the curvature over a loader at the network's weights. override=False adds it to what was summed before,
        at other weights perhaps."""
        self.model.eval()
        state, before = self._summed(train_loader, progress_bar), None if override else self._state
        loss, n = self._loss_of(state.statistics), state.n
        if before is not None:
            state, loss, n = _joined(before, state), self.loss + loss, self.n_data + n
        self._changed(noise=True)
        self._state, self.loss, self.n_data = state, loss, n
        self.mean = self._center_of(state.tangent)

    def _summed(self, loader: Any, progress: bool) -> State:
        batches = Batches(loader, self.dict_key_y)
        given = batches.first()[0]
        tangent = self._linearized(given)
        seen = loading.probed(tangent, tree.moved(given, self._device), batches.count)
        self.n_outputs = seen.outputs
        return accumulate(self._structure, tangent, self._core, batches, self._factor, seen=seen, progress=progress)

    def _linearized(self, inputs: Any) -> TangentModel:
        """The tangent model of the selected weights; `inputs` are some of the data's."""
        return linearize(self.model, list(self._names), forward=loading.caller(inputs))

    def _center_of(self, tangent: TangentModel) -> Tensor:
        """The weights that `mean` shows, (p,)."""
        return tangent.theta.to(self._dtype)

    @property
    def _fitted(self) -> State:
        if self._state is None:
            raise AttributeError("this Laplace is not fitted yet; run fit(train_loader) first")
        return self._state

    # -- the posterior --------------------------------------------------------------------------------------------

    def _operator(self, weight: Tensor | None = None) -> Any:
        """H as an operator, times a weight (one by default)."""
        state = self._fitted
        weight = torch.ones((), dtype=torch.float64, device=self._device) if weight is None else weight.double()
        return state.structure.operator(state, (self._unit * weight).reshape(1))

    @property
    def _unit(self) -> float:
        """What laplace-torch's H is of the sum in a state: twice an empirical Fisher of regression (curvature.py)."""
        return 2.0 if self._factor.kind == "empirical" and self.likelihood == Likelihood.REGRESSION else 1.0

    def _at_noise(self) -> tuple[Any, Tensor]:
        """H / (σ² T) as an operator and log p(D | θ); kept while noise and temperature stay: loops move the prior."""
        if self.sigma_noise.requires_grad:
            return self._operator(self._H_factor), self.log_likelihood
        if self._weighted is None or self._weighted[0] != self.temperature:
            self._weighted = self.temperature, (self._operator(self._H_factor), self.log_likelihood)
        return self._weighted[1]

    def _precision(self) -> Any:
        """P as an operator, with gradients in the hyperparameters."""
        return linalg.shift(self._at_noise()[0], self._prior)

    @property
    def _posterior(self) -> Any:
        """P as an operator without gradients, which keeps its factorizations until a hyperparameter changes."""
        if self._held is None:
            with torch.no_grad():
                self._held = self._precision()
        return self._held

    @property
    def H(self) -> Any:
        """The curvature of the data at unit noise and temperature."""
        return linalg.to_dense(self._operator()).to(self._dtype)

    @property
    def posterior_precision(self) -> Any:
        """P."""
        raise NotImplementedError

    @property
    def scatter(self) -> Tensor:
        """(θ* − m)ᵀ A (θ* − m)."""
        prior, away = self._prior, self._center() - self.prior_mean
        return (prior.sums(away.double().square()) @ prior.values).to(self._dtype)

    def _center(self) -> Tensor:
        """θ* of the selected weights, (p,)."""
        return self.mean

    @property
    def log_det_prior_precision(self) -> Tensor:
        """log|A|."""
        return self._prior.logdet().to(self._dtype)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """log|P|."""
        return self._logdet().to(self._dtype)

    @property
    def log_det_ratio(self) -> Tensor:
        """log|P| − log|A|."""
        return (self._logdet() - self._prior.logdet()).to(self._dtype)

    def _logdet(self) -> Tensor:
        """log|P| in float64, differentiable."""
        return linalg.logdet(self._precision())

    def square_norm(self, value: Tensor) -> Tensor:
        """(θ − θ*)ᵀ P (θ − θ*) for a weight vector (p,)."""
        away = (value - self._center()).double()
        return (away @ linalg.mv(self._posterior, away)).to(self._dtype)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """The log-density of a weight vector (p,) under the posterior, or its part that depends on it."""
        out = -0.5 * self.square_norm(value)
        if not normalized:
            return out
        return out - 0.5 * self._groups.size * math.log(2 * math.pi) + 0.5 * self.log_det_posterior_precision

    def log_marginal_likelihood(self, prior_precision: Any = None, sigma_noise: Any = None) -> Tensor:
        """log p(D), 0-dim, differentiable in both; what is given stays set."""
        self._move(prior_precision, sigma_noise)
        return self._at_noise()[1] - 0.5 * (self.log_det_ratio + self.scatter)

    # -- outputs --------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _glm_predictive_distribution(
        self, x: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        state, x = self._fitted, tree.moved(x, self._device)
        if self.enable_backprop:
            J, f = self.backend.jacobians(x, enable_backprop=True)
            mean, var = f, self.functional_covariance(J) if joint else self.functional_variance(J)
        else:
            with torch.no_grad():
                out = push(self._posterior, At(state.tangent, x, joint, self._structure.memory_budget, state.parts))
            mean, var = out.mean.to(self._dtype), out.covariance.to(self._dtype)
        if joint:
            return mean.reshape(-1), var.reshape(mean.numel(), mean.numel())
        return mean, var.diagonal(dim1=-2, dim2=-1) if diagonal_output else var

    def functional_variance(self, Js: Tensor) -> Tensor:
        """J P⁻¹ Jᵀ of each input for Jacobians (n, c, p), (n, c, c)."""
        self._check_jacobians(Js)
        return self._covariance(Js)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """J P⁻¹ Jᵀ of all inputs together for Jacobians (n, c, p), (n c, n c)."""
        self._check_jacobians(Js)
        return self._covariance(Js.reshape(1, -1, Js.shape[-1]))[0]

    def _covariance(self, rows: Tensor) -> Tensor:
        """J P⁻¹ Jᵀ of rows (n, c, p), (n, c, c)."""
        return linalg.covariance(self._posterior, rows.double()).to(rows.dtype)

    def _check_jacobians(self, Js: Any) -> None:
        if not isinstance(Js, Tensor) or Js.ndim != 3 or Js.shape[-1] != self._groups.size:
            found = tuple(Js.shape) if isinstance(Js, Tensor) else type(Js).__name__
            raise InvalidValue(f"Jacobians must be a tensor (n, c, {self._groups.size}), got {found}")

    @property
    def backend(self) -> Backend:
        """Jacobians of the selected weights: `la.backend.jacobians(x)`."""
        return Backend(self._jacobians)

    def _jacobians(self, x: Any, enable_backprop: bool) -> tuple[Tensor, Tensor]:
        tangent = self._fitted.tangent
        with evaluating(tangent.model), plain_kernels():
            f = tangent.apply(tangent.params, x)
            J = tangent.pulled(x, units(f.detach())).reshape(*f.shape, -1)
        return (J, f) if enable_backprop else (J.detach(), f.detach())

    # -- weights --------------------------------------------------------------------------------------------------

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Weight vectors of the posterior, (s, p)."""
        size, like = self._groups.size, self._like
        noise = torch.randn(n_samples, size, generator=generator, dtype=like.dtype, device=like.device)
        return self._center() + self._colored(noise)

    def _colored(self, noise: Tensor) -> Tensor:
        """R z with R Rᵀ = P⁻¹, for standard normal z (s, p)."""
        raise NotImplementedError

    def _nn_functional_samples(
        self, x: Any, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        samples, tangent = self.sample(n_samples, generator), self._fitted.tangent
        if model_kwargs:
            forward = tangent.forward
            facts = Facts(separable=tangent.facts.separable)
            tangent = replace(tangent, forward=lambda model, x: _with(forward, model, model_kwargs, x), facts=facts)
        with torch.set_grad_enabled(self.enable_backprop), evaluating(tangent.model), plain_kernels():
            return self._run(tangent, samples, tree.moved(x, self._device))

    def _run(self, tangent: TangentModel, samples: Tensor, x: Any) -> Tensor:
        """The network's outputs (s, n, c) at weight vectors (s, p): some at once where that is faster and gives the
        same, else one by one."""

        def at(theta: Tensor) -> Tensor:
            return tangent.apply(tangent.layout.unflatten(theta), x)

        if self._batched(tangent):
            try:
                found = torch.func.vmap(at, chunk_size=CHUNK)(samples)
                right = partial(_close, found, at, samples, 1e3 * tangent.eps)
                if proof.once(tangent, "weights", proof.shapes(x, samples), right):
                    return found
            except RuntimeError:  # a network that vmap cannot follow
                pass
        return torch.stack([at(theta) for theta in samples])

    def _batched(self, tangent: TangentModel) -> bool:
        """Whether to run several weights at once: matrix products gain by it, convolutions lose."""
        return tangent.columns_at_once

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was fitted and set, plain, for torch.save; laplace-torch reads it, and its own is read here."""
        self._fitted  # noqa: B018 - raises where there is nothing to save
        return {
            "mean": self.mean,
            "H": self._packed(),
            "loss": self.loss,
            "prior_mean": self.prior_mean,
            "prior_precision": self.prior_precision,
            "sigma_noise": self.sigma_noise,
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "likelihood": self.likelihood.value,
            "temperature": self.temperature,
            "enable_backprop": self.enable_backprop,
            "cls_name": type(self).__name__,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict()` of the same kind of estimator of the same network, ours or laplace-torch's."""
        _check_kind(self, state_dict)
        for name in ("prior_mean", "prior_precision", "sigma_noise", "temperature", "enable_backprop"):
            setattr(self, name, state_dict[name])
        tangent = self._linearized(None)
        mean = state_dict["mean"].to(self._like)
        if mean.shape != (self.n_params,):
            raise InvalidValue(f"the saved state is of {len(mean)} weights, and this network's are {self.n_params}")
        state = self._unpacked(state_dict["H"], tangent)
        self._changed(noise=True)
        self._state, self.mean = replace(state, n=state_dict["n_data"]), mean
        self.loss, self.n_data, self.n_outputs = (state_dict[name] for name in ("loss", "n_data", "n_outputs"))

    def _packed(self) -> Any:
        """H as it is saved."""
        return self.H

    def _unpacked(self, H: Any, tangent: TangentModel) -> State:
        """A state that holds a saved H."""
        raise NotImplementedError

    def _restored(self, tangent: TangentModel, sums: dict[str, Tensor], parts: Any = ()) -> State:
        """A state of sums that were saved."""
        core, structure = self._core, self._structure
        fingerprints: dict[str, str] = {}
        return State(structure, self._factor, core.kind, 1, tangent, fingerprints, 0, {}, sums, parts=parts)


def _close(found: Tensor, at: Callable[[Tensor], Tensor], samples: Tensor, eps: float) -> bool:
    """Whether outputs (s, n, c) at weight vectors (s, p) are those at the first by itself."""
    return torch.allclose(found[0], at(samples[0]), rtol=eps, atol=eps)


def _with(forward: Any, model: Any, options: dict[str, Any], x: Any) -> Tensor:
    """The network with more keyword arguments."""
    return forward(lambda *args: model(*args, **options), x)


def _joined(old: State, new: State) -> State:
    """The sums of both, at the tangent of the new: of other weights than the old, in continual learning."""
    sums = {key: old.sums[key] + value for key, value in new.sums.items()}
    return replace(new, n=old.n + new.n, sums=sums, memo=type(new.memo)())


def _check_kind(la: ParametricLaplace, found: dict[str, Any]) -> None:
    if found["cls_name"] != type(la).__name__:
        raise InvalidValue(f"the saved state is of a {found['cls_name']}, and this is a {type(la).__name__}")
    if found["likelihood"] != la.likelihood:
        raise InvalidValue(f"the saved state is of {found['likelihood']}, and this is {la.likelihood.value}")
    for name in ("temperature", "enable_backprop"):
        if found[name] != getattr(la, name):
            message = f"{name} of the saved state, {found[name]}, replaces {getattr(la, name)}"
            warn(message)
