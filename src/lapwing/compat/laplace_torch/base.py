"""What every estimator of laplace-torch has: its arguments, its hyperparameters, the likelihood of its data.

    log p(D | θ) = −L / (σ² T) − N C log(σ √2π)      regression, L = ½ Σ ‖y − f‖², T the temperature
                 = −L / T                            classes, L the summed cross-entropy

The temperature is that of the likelihood: the curvature is H / (σ² T). Lapwing's own is one of the covariance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import likelihoods
from lapwing.compat.laplace_torch import hyperparameters as hyper
from lapwing.compat.laplace_torch import tuning
from lapwing.compat.laplace_torch.curvature import CurvlinopsGGN, factor_of
from lapwing.compat.laplace_torch.utils.enums import Likelihood, LinkApprox, PredType, PriorStructure, TuningMethod
from lapwing.errors import InvalidValue, warn
from lapwing.operators import Diagonal


class BaseLaplace:
    """The arguments of all estimators, and what follows from them alone."""

    mean: Any
    loss: Any
    n_outputs: int
    n_data: int
    n_params: Any  # None while the last layer is not known, as of the next
    n_layers: Any
    _prior_precision: Any
    _prior_mean: Any

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Any = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
    ) -> None:
        try:
            self.likelihood = Likelihood(likelihood)
        except ValueError as error:
            known = ", ".join(repr(one.value) for one in Likelihood)
            raise InvalidValue(f"likelihood must be one of {known}; got {likelihood!r}") from error
        self.model = model
        self.temperature, self.enable_backprop = temperature, enable_backprop
        self.dict_key_x, self.dict_key_y = dict_key_x, dict_key_y
        self._backend_cls = CurvlinopsGGN if backend is None else backend
        self._backend_kwargs = dict(backend_kwargs or {})
        self._asdl_fisher_kwargs = dict(asdl_fisher_kwargs or {})
        self._factor = factor_of(self._backend_cls, self._backend_kwargs)
        self.loss, self.n_outputs, self.n_data = 0.0, 0, 0
        self._select()
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.sigma_noise = sigma_noise
        if self.likelihood != Likelihood.REGRESSION and float(self.sigma_noise.detach()) != 1:
            raise InvalidValue(f"sigma_noise belongs to regression; {self.likelihood.value} takes 1, got {sigma_noise}")

    # -- the weights that are Bayesian ----------------------------------------------------------------------------

    def _select(self) -> None:
        """Every parameter that requires grad."""
        self._set_parameters({n: p for n, p in self.model.named_parameters() if p.requires_grad})

    def _set_parameters(self, named: dict[str, Tensor]) -> None:
        self._names, self.params = tuple(named), list(named.values())
        self._groups = hyper.Groups(tuple(p.numel() for p in self.params))
        self.n_params, self.n_layers = self._groups.size, len(self.params)

    @property
    def is_subset_params(self) -> bool:
        """Whether some parameters are left out because they require no grad."""
        return any(not p.requires_grad for p in self.model.parameters())

    @property
    def _like(self) -> Tensor:
        return self.params[0] if self.params else next(self.model.parameters())

    @property
    def _device(self) -> torch.device:
        return self._like.device

    @property
    def _dtype(self) -> torch.dtype:
        return self._like.dtype

    # -- hyperparameters ------------------------------------------------------------------------------------------

    def _changed(self, noise: bool) -> None:
        """Forget what was made with another prior, or with another noise too."""

    def _precision_lengths(self) -> tuple[int, ...]:
        return self.n_layers, self.n_params

    @property
    def prior_precision(self) -> Tensor:
        """The prior precision as it was given, (1,), (layers,) or (p,)."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._changed(noise=False)
        self._prior_precision = hyper.as_precision(value, self._precision_lengths(), self._like)

    @property
    def prior_precision_diag(self) -> Tensor:
        """The prior precision of each weight, (p,)."""
        return self._prior.dense().to(self._dtype)

    @property
    def _prior(self) -> Diagonal:
        """A as an operator, with its gradient."""
        return self._groups.operator(self.prior_precision)

    @property
    def prior_mean(self) -> Tensor:
        """The prior mean, () or (p,)."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._prior_mean = hyper.as_mean(value, self._groups.size, self._like)

    @property
    def sigma_noise(self) -> Tensor:
        """The noise's standard deviation, 0-dim."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._changed(noise=True)
        self._sigma_noise = hyper.as_noise(value, self._like)

    @property
    def _H_factor(self) -> Tensor:
        """1 / (σ² T), the weight of the curvature."""
        return 1 / (self.sigma_noise.square() * self.temperature)

    # -- the data's likelihood ------------------------------------------------------------------------------------

    @property
    def _core(self) -> likelihoods.Likelihood:
        """The likelihood of a fit, at unit noise."""
        return likelihoods.Gaussian(1.0) if self.likelihood == Likelihood.REGRESSION else likelihoods.Categorical()

    def _loss_of(self, statistics: dict[str, Tensor]) -> Tensor:
        """L, from the sums of a pass."""
        if self.likelihood == Likelihood.REGRESSION:
            return (0.5 * statistics["sse"].sum()).to(self._dtype)
        return -statistics["log_lik"].to(self._dtype)

    @property
    def log_likelihood(self) -> Tensor:
        """log p(D | θ) at the trained weights, 0-dim, differentiable in sigma_noise."""
        fit = -self._H_factor * self.loss
        if self.likelihood != Likelihood.REGRESSION:
            return fit
        return fit - self.n_data * self.n_outputs * torch.log(self.sigma_noise * math.sqrt(2 * math.pi))

    def fit(self, train_loader: Any) -> None:
        """Fit to the data of a loader."""
        raise NotImplementedError

    def log_marginal_likelihood(self, prior_precision: Any = None, sigma_noise: Any = None) -> Tensor:
        """log p(D), 0-dim, differentiable in both; what is given stays set."""
        raise NotImplementedError

    def _move(self, prior_precision: Any, sigma_noise: Any) -> None:
        """Set the hyperparameters that are given."""
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            if self.likelihood != Likelihood.REGRESSION:
                raise InvalidValue(f"sigma_noise belongs to regression, and this is {self.likelihood.value}")
            self.sigma_noise = sigma_noise

    # -- tuning ---------------------------------------------------------------------------------------------------

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: PriorStructure | str = PriorStructure.SCALAR,
        val_loader: Any = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Set the prior precision that the evidence picks ("marglik": Adam on its logarithm), or that of a grid that
        predicts a validation set best ("gridsearch")."""
        if method == TuningMethod.MARGLIK:
            if val_loader is not None:
                message = "val_loader is not read by method='marglik'; for held-out data use method='gridsearch'"
                warn(message)
            tuning.marglik(self, n_steps, lr, init_prior_prec, PriorStructure(prior_structure), progress_bar)
        elif method == TuningMethod.GRIDSEARCH:
            grid = torch.logspace(log_prior_prec_min, log_prior_prec_max, grid_size, base=log_prior_prec_base)
            how = {"pred_type": pred_type, "link_approx": link_approx, "n_samples": n_samples}
            tuning.gridsearch(self, grid, val_loader, loss, how, progress_bar)
        else:
            raise InvalidValue(f"method must be 'marglik' or 'gridsearch', got {method!r}")
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")
