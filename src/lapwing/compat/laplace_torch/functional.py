"""`hessian_structure="gp"`: the same model as a Gaussian process of its tangent kernel, on a subset of the data.

    f ~ N(f(x), k** − K*ₘ (Kₘₘ + L⁻¹)⁻¹ Kₘ*),    K = (M/N) J Jᵀ / λ,    L = diag Λ / (σ² T) at the M examples

which is the dual form of a posterior over the weights with the prior precision λ N / M (`operators/root.py`). Of Λ only
the diagonal is taken. `independent_outputs` drops the kernel between outputs: one such process for each. Evidence:

    log p(D | f) − ½ (log|K + σ²I| + rᵀ(K + σ²I)⁻¹r),     r = y − f − J(m − θ*)                      regression
    log p(D | f) − ½ (log|I + L^½ K L^½| + rᵀ(K + εI)⁻¹r),  r = −J(m − θ*),  ε = 1e-5               classes
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lapwing import tree
from lapwing.compat.laplace_torch import hyperparameters as hyper
from lapwing.compat.laplace_torch import loading
from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.curvature import BackPackGGN
from lapwing.compat.laplace_torch.loading import Batches
from lapwing.compat.laplace_torch.predicting import Predicting
from lapwing.compat.laplace_torch.utils.enums import Likelihood, PredType, PriorStructure
from lapwing.curvature.rows import StreamedRows
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import Diagonal, RootPlusDiagonal, linalg
from lapwing.tangent import TangentModel, linearize
from lapwing.tangent.rows import units

JITTER = 1e-5  # of the kernel in the evidence of classes
BUDGET = 2**30  # bytes of rows that are held


class BaseFunctionalLaplace(Predicting, BaseLaplace):
    """What estimators over functions share: predictions of type "gp"."""

    def __call__(self, x: Any, pred_type: PredType | str = PredType.GP, *args: Any, **kwargs: Any) -> Any:
        """Probabilities (n, c) of classes, or mean and variance of regression, at inputs."""
        if pred_type != PredType.GP:
            raise InvalidValue(f"a process predicts with pred_type='gp', got {pred_type!r}")
        return super().__call__(x, PredType.GLM, *args, **kwargs)

    def predictive_moments(self, x: Any, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """The mean (n, c) and covariance (n, c, c) of the outputs; joint: (n c,) and (n c, n c)."""
        return self._glm_predictive_distribution(x, joint=joint)

    def _nn_functional_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        raise InvalidValue("a process draws functions, not weights: use pred_type='glm'")

    def optimize_prior_precision(self, pred_type: PredType | str = PredType.GP, *args: Any, **kwargs: Any) -> None:
        """As that of other estimators, for one prior precision."""
        structure = kwargs.get("prior_structure", args[4] if len(args) > 4 else PriorStructure.SCALAR)
        if PriorStructure(structure) != PriorStructure.SCALAR:
            raise InvalidValue(f"a process has one prior precision, got prior_structure={structure!r}")
        super().optimize_prior_precision(pred_type, *args, **kwargs)


class FunctionalLaplace(BaseFunctionalLaplace):
    """All weights, as a process on a subset of the data."""

    _key = ("all", "gp")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        n_subset: int,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Any = BackPackGGN,
        backend_kwargs: dict[str, Any] | None = None,
        independent_outputs: bool = False,
        seed: int = 0,
    ) -> None:
        if enable_backprop:
            raise Unsupported(
                "enable_backprop=True is not carried over to hessian_structure='gp'; use 'full' or 'kron'"
            )
        if Likelihood(likelihood) == Likelihood.REWARD_MODELING:
            raise Unsupported(
                "hessian_structure='gp' has no reward modeling, as in laplace-torch; use 'kron' or 'diag'"
            )
        self.n_subset, self.independent_outputs, self.seed = n_subset, independent_outputs, seed
        self._tangent: TangentModel | None = None
        keys = {
            "dict_key_x": dict_key_x,
            "dict_key_y": dict_key_y,
            "backend": backend,
            "backend_kwargs": backend_kwargs,
        }
        super().__init__(model, likelihood, sigma_noise, prior_precision, prior_mean, temperature, **keys)

    def _precision_lengths(self) -> tuple[int, ...]:
        return (1,)

    def _linearized(self, inputs: Any) -> TangentModel:
        return linearize(self.model, list(self._names), forward=loading.caller(inputs))

    # -- fitting --------------------------------------------------------------------------------------------------

    def fit(self, train_loader: Any, progress_bar: bool = False) -> None:
        """Take `n_subset` examples of the loader's dataset, drawn by `seed`, and their kernel."""
        self.model.eval()
        batches = Batches(self._subset(train_loader), self.dict_key_y)
        pairs = [(tree.moved(x, self._device), y.to(self._device)) for x, y in batches]
        tangent = self._tangent = self._linearized(batches.split(next(iter(batches.loader)))[0])
        self.mean, theta = tangent.theta.to(self._dtype), tangent.theta
        away = tangent.layout.unflatten((self.prior_mean - theta).expand(len(theta)).to(tangent.dtype))
        self.loss, kept, targets, middles = 0.0, [], [], []
        for x, y in pairs:
            f = tangent(x)
            self._core.validate(f, y)
            self.n_outputs = f.shape[-1]
            self.loss = self.loss + self._loss_of(self._core.statistics(f, y))
            root = self._core.curvature_root(f, y)
            middles.append(root.double().square().sum(-1))  # diag Λ, (n, c)
            shift = tangent.jvp(x, away).detach()
            targets.append((y - f - shift if self.likelihood == Likelihood.REGRESSION else -shift).double())
            kept.append((x, units(f)))
        self.mu, self._middle = torch.cat(targets), torch.cat(middles)
        self._kernels = [self._rows(tangent, tuple(kept), group) for group in self._outputs()]
        self._spectra = [self._decomposed(op, group) for op, group in zip(self._kernels, self._outputs(), strict=True)]

    def _subset(self, loader: Any) -> DataLoader:
        self.n_data = Batches(loader, self.dict_key_y).count
        if not 0 < self.n_subset <= self.n_data:
            raise InvalidValue(f"n_subset must be from 1 to {self.n_data}, the number of examples; got {self.n_subset}")
        chosen = np.random.default_rng(self.seed).choice(list(range(self.n_data)), self.n_subset, replace=False)
        size = getattr(loader, "batch_size", None) or self.n_subset
        return DataLoader(loader.dataset, batch_size=size, sampler=chosen.tolist(), collate_fn=loader.collate_fn)

    def _outputs(self) -> list[slice]:
        """The outputs that one process has together: all, or each alone."""
        each = [slice(c, c + 1) for c in range(self.n_outputs)]
        return each if self.independent_outputs else [slice(0, self.n_outputs)]

    @staticmethod
    def _rows(tangent: TangentModel, batches: Any, outputs: slice) -> RootPlusDiagonal:
        rows = StreamedRows(tangent, tuple((x, u[:, outputs]) for x, u in batches), BUDGET)
        return RootPlusDiagonal(
            rows, Diagonal(torch.ones(1, dtype=torch.float64, device=tangent.device), rows.shape[0])
        )

    def _decomposed(self, op: RootPlusDiagonal, outputs: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues of J Jᵀ, (r's coordinates)², and eigenvalues of Λ^½ J Jᵀ Λ^½."""
        K = op.group_grams(Diagonal(torch.ones_like(op.weights.values), op.size))[0]
        values, vectors = torch.linalg.eigh(K)
        root = self._middle[:, outputs].reshape(-1).sqrt()
        inner = torch.linalg.eigvalsh(root[:, None] * K * root)
        return values.clamp(min=0), (self.mu[:, outputs].reshape(-1) @ vectors).square(), inner.clamp(min=0)

    # -- evidence -------------------------------------------------------------------------------------------------

    @property
    def gp_kernel_prior_variance(self) -> Tensor:
        """(M/N) / λ, (1,)."""
        return self.n_subset / self.n_data / self.prior_precision

    @property
    def log_det_ratio(self) -> Tensor:
        """log|K + σ²I| of regression, log|I + L^½ K L^½| of classes."""
        scale, noise = self.gp_kernel_prior_variance.double(), self.sigma_noise.double().square()
        if self.likelihood == Likelihood.REGRESSION:
            terms = [(scale * values + noise).log().sum() for values, _, _ in self._spectra]
        else:
            terms = [(1 + scale * self._H_factor.double() * inner).log().sum() for _, _, inner in self._spectra]
        return torch.stack(terms).sum().to(self._dtype)

    @property
    def scatter(self) -> Tensor:
        """rᵀ(K + σ²I)⁻¹r."""
        scale, regression = self.gp_kernel_prior_variance.double(), self.likelihood == Likelihood.REGRESSION
        noise = self.sigma_noise.double().square() if regression else JITTER
        return torch.stack([(r / (scale * l + noise)).sum() for l, r, _ in self._spectra]).sum().to(self._dtype)

    def log_marginal_likelihood(self, prior_precision: Any = None, sigma_noise: Any = None) -> Tensor:
        """log p(D), 0-dim, differentiable in both; what is given stays set."""
        self._move(prior_precision, sigma_noise)
        return self.log_likelihood - 0.5 * (self.log_det_ratio + self.scatter)

    # -- predictions ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def _glm_predictive_distribution(self, x: Any, joint: bool = False) -> tuple[Tensor, Tensor]:
        if self._tangent is None:
            raise AttributeError("this Laplace is not fitted yet; run fit(train_loader) first")
        x = tree.moved(x, self._device)
        f = self._tangent(x)
        n, c = f.shape
        out = f.new_zeros(*((n, c, n, c) if joint else (n, c, c)), dtype=torch.float64)
        for op, group in zip(self._kernels, self._outputs(), strict=True):
            rows, own = StreamedRows(self._tangent, ((x, units(f)[:, group]),), BUDGET), group.stop - group.start
            found = linalg.covariance(self._weighed(op, group), (rows, n * own if joint else own))
            if joint:
                out[:, group, :, group] = found.reshape(n, own, n, own)
            else:
                out[:, group, group] = found
        var = out.reshape(n * c, n * c) if joint else out
        return f.reshape(-1) if joint else f, var.to(self._dtype)

    def _weighed(self, op: RootPlusDiagonal, outputs: slice) -> RootPlusDiagonal:
        """The posterior of one process: W = L, and the prior precision λ N / M."""
        weights = self._H_factor.double() * self._middle[:, outputs].reshape(-1)
        prior = hyper.Groups((op.size,)).operator(1 / self.gp_kernel_prior_variance)
        return linalg.shift(RootPlusDiagonal(op.rows, Diagonal(weights, op.m), memo=op.memo), prior)

    def state_dict(self) -> dict[str, Any]:
        """Not carried over."""
        raise Unsupported(
            "state_dict() of hessian_structure='gp' holds the data's loader, and is not carried over; fit again"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not carried over."""
        raise Unsupported("load_state_dict() of hessian_structure='gp' is not carried over; fit again")
