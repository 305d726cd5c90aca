"""Training under the evidence (Immer et al., ICML 2021): weights by their penalized loss, hyperparameters by log p(D).

    loss  = mean loss + ½ Σ δ θ² / (N c),    c = T / (2 σ²) for MSELoss, T for CrossEntropyLoss

After each `marglik_frequency` epochs a Laplace approximation is fitted, and log δ and log σ take `n_hypersteps` steps
of Adam on its evidence; the weights and hyperparameters of the best evidence come back. As in laplace-torch, a fit
leaves the network in eval mode, in which training goes on.
"""

from __future__ import annotations

import logging
import math
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam
from tqdm.auto import trange

from lapwing import tree
from lapwing.compat.laplace_torch import hyperparameters as hyper
from lapwing.compat.laplace_torch.curvature import AsdlGGN
from lapwing.compat.laplace_torch.laplace import Laplace
from lapwing.compat.laplace_torch.loading import Batches
from lapwing.compat.laplace_torch.utils.enums import HessianStructure, Likelihood, PriorStructure
from lapwing.errors import InvalidValue, warn

log = logging.getLogger(__name__)


def marglik_training(
    model: nn.Module,
    train_loader: Any,
    likelihood: Likelihood | str = Likelihood.CLASSIFICATION,
    hessian_structure: HessianStructure | str = HessianStructure.KRON,
    backend: Any = AsdlGGN,
    optimizer_cls: Any = Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: Any = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 1e-1,
    prior_structure: PriorStructure | str = PriorStructure.LAYERWISE,
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float = 1.0,
    sigma_noise_init: float = 1.0,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
) -> tuple[Any, nn.Module, list[float], list[float]]:
    """Train a network and its prior and noise together: the fitted Laplace of the best evidence, the network at its
    weights, the negative log evidence after each hyperparameter step and the training loss of each epoch."""
    settings = dict(optimizer_kwargs or {})
    if "weight_decay" in settings:
        warn("weight_decay is set to 0: the prior takes its place")
        settings["weight_decay"] = 0.0
    kept = {"backend": backend, "temperature": temperature, "dict_key_x": dict_key_x, "dict_key_y": dict_key_y}
    run = _Run(
        model, train_loader, Likelihood(likelihood), temperature, None if fix_sigma_noise else sigma_noise_init, kept
    )
    run.noise = sigma_noise_init if run.likelihood == Likelihood.REGRESSION else 1.0
    run.begin(math.log(temperature * prior_prec_init), PriorStructure(prior_structure))
    optimizer = optimizer_cls(model.parameters(), **settings)
    scheduler = None if scheduler_cls is None else scheduler_cls(optimizer, **(scheduler_kwargs or {}))
    climber = Adam(run.moving, lr=lr_hyp)
    for epoch in trange(1, n_epochs + 1, disable=not progress_bar, desc="training", leave=False):
        run.losses.append(run.epoch(optimizer, scheduler))
        if epoch % marglik_frequency == 0 and epoch >= n_epochs_burnin:
            run.climb(climber, n_hypersteps, HessianStructure(hessian_structure))
        log.info("epoch %d: loss %.3f, evidence %s", epoch, run.losses[-1], run.margliks[-1:])
    la = run.finished(HessianStructure(hessian_structure), enable_backprop)
    return la, model, run.margliks, run.losses


@dataclass(eq=False)
class _Run:
    """A training run: what moves, and what it has seen."""

    model: nn.Module
    loader: Any
    likelihood: Likelihood
    temperature: float
    noise_start: float | None  # None: the noise is held
    settings: dict[str, Any]
    noise: float = 1.0
    margliks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: tuple[float, dict[str, Tensor], Tensor, Any] | None = None

    def begin(self, start: float, structure: PriorStructure) -> None:
        """The logarithms that are climbed, from their starts."""
        if self.likelihood == Likelihood.REWARD_MODELING:
            raise InvalidValue("marglik_training takes 'classification' or 'regression', as laplace-torch's does")
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.groups, like = hyper.Groups(tuple(p.numel() for p in params)), params[0].detach()
        sizes = {PriorStructure.SCALAR: 1, PriorStructure.LAYERWISE: len(params), PriorStructure.DIAG: self.groups.size}
        self.log_precision = torch.full(
            (sizes[structure],), start, dtype=like.dtype, device=like.device
        ).requires_grad_()
        self.moving, self.log_noise = [self.log_precision], None
        if self.likelihood == Likelihood.REGRESSION and self.noise_start is not None:
            self.log_noise = torch.full(
                (1,), math.log(self.noise_start), dtype=like.dtype, device=like.device
            ).requires_grad_()
            self.moving.append(self.log_noise)
        regression = self.likelihood == Likelihood.REGRESSION
        self.criterion: Any = nn.MSELoss() if regression else nn.CrossEntropyLoss()
        self.batches = Batches(self.loader, self.settings["dict_key_y"])

    @property
    def sigma(self) -> Any:
        """The noise now, with its gradient where it moves."""
        return self.noise if self.log_noise is None else self.log_noise.exp()

    def penalty(self) -> Tensor:
        """½ Σ δ θ² / (N c)."""
        theta = torch.cat([p.reshape(-1) for p in self.model.parameters() if p.requires_grad])
        delta = self.groups.operator(self.log_precision.detach().exp()).dense().to(theta)
        sigma = torch.as_tensor(self.sigma).detach()
        scale = self.temperature / (2 * sigma**2) if self.likelihood == Likelihood.REGRESSION else self.temperature
        return 0.5 * (delta * theta) @ theta / self.batches.count / scale

    def epoch(self, optimizer: Any, scheduler: Any) -> float:
        """Train for an epoch; its mean loss."""
        total, device = 0.0, next(self.model.parameters()).device
        for x, y in self.batches:
            optimizer.zero_grad()
            y = y.to(device)
            loss = self.criterion(self.model(tree.moved(x, device) if isinstance(x, Tensor) else x), y) + self.penalty()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(y)
            if scheduler is not None:
                scheduler.step()
        return total / self.batches.count

    def fitted(self, structure: HessianStructure, precision: Tensor, sigma: Any, **more: Any) -> Any:
        """A Laplace approximation at the weights as they are."""
        la = Laplace(
            self.model,
            self.likelihood,
            "all",
            structure,
            prior_precision=precision,
            sigma_noise=sigma,
            **self.settings,
            **more,
        )
        la.fit(self.loader)
        return la

    def climb(self, climber: Any, steps: int, structure: HessianStructure) -> None:
        """Fit, take some steps of the hyperparameters, and keep what has the best evidence so far."""
        la = self.fitted(structure, self.log_precision.detach().exp(), _detached(self.sigma))
        for _ in range(steps):
            climber.zero_grad()
            precision, sigma = self.log_precision.exp(), self.sigma
            loss = -la.log_marginal_likelihood(precision, None if self.log_noise is None else sigma)
            loss.backward()
            climber.step()
            self.margliks.append(loss.item())
        if self.best is None or self.margliks[-1] < self.best[0]:
            state = deepcopy(self.model.state_dict())
            self.best = self.margliks[-1], state, precision.detach().clone(), _detached(sigma)

    def finished(self, structure: HessianStructure, enable_backprop: bool) -> Any:
        """The Laplace approximation of the best evidence, with the network at its weights."""
        precision, sigma = self.log_precision.detach().exp(), _detached(self.sigma)
        if self.best is not None:
            _, state, precision, sigma = self.best
            self.model.load_state_dict(state)
        return self.fitted(structure, precision, sigma, enable_backprop=enable_backprop)


def _detached(sigma: Any) -> Any:
    return sigma.detach().clone() if isinstance(sigma, Tensor) else sigma
