"""Only some single weights are Bayesian: those at `subnetwork_indices` of the vector of all that require grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.compat.laplace_torch import hyperparameters as hyper
from lapwing.compat.laplace_torch import loading
from lapwing.compat.laplace_torch.diag import DiagLaplace
from lapwing.compat.laplace_torch.full import FullLaplace
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.errors import InvalidValue
from lapwing.tangent import TangentModel, linearize


class SubnetLaplace(ParametricLaplace):
    """Some single weights; the others stay at their trained values."""

    def __init__(
        self,
        model: torch.nn.Module,
        likelihood: Any,
        subnetwork_indices: Tensor,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        backend: Any = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if asdl_fisher_kwargs is not None:
            raise InvalidValue("asdl_fisher_kwargs is not taken for a subnetwork, as in laplace-torch; drop it")
        self.subnetwork_indices = subnetwork_indices
        settings = {"backend": backend, "backend_kwargs": backend_kwargs}
        super().__init__(model, likelihood, sigma_noise, prior_precision, prior_mean, temperature, **settings)

    def _select(self) -> None:
        super()._select()
        index = _checked(self.subnetwork_indices, self.n_params)
        self.n_params_subnet = len(index)
        self._groups = hyper.Groups((self.n_params_subnet,))
        self._chosen = torch.zeros(self.n_params, dtype=torch.bool).index_fill(0, index.cpu(), True).to(self._device)

    def _precision_lengths(self) -> tuple[int, ...]:
        return (self.n_params_subnet,)

    def _linearized(self, inputs: Any) -> TangentModel:
        return linearize(self.model, self._chosen, forward=loading.caller(inputs))

    def _center_of(self, tangent: TangentModel) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    def _center(self) -> Tensor:
        return self.mean_subnet

    @property
    def mean_subnet(self) -> Tensor:
        """θ* of the subnetwork, (k,)."""
        return self.mean[self.subnetwork_indices]

    def assemble_full_samples(self, subnet_samples: Tensor) -> Tensor:
        """Vectors of all weights (s, p) for those of the subnetwork (s, k), the others at their trained values."""
        full = self.mean.repeat(len(subnet_samples), 1)
        full[:, self.subnetwork_indices] = subnet_samples
        return full

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Vectors of all weights, (s, p), of which those of the subnetwork are drawn."""
        return self.assemble_full_samples(super().sample(n_samples, generator))

    def _run(self, tangent: TangentModel, samples: Tensor, x: Any) -> Tensor:
        return super()._run(tangent, samples[:, self.subnetwork_indices], x)


def _checked(index: Any, size: int) -> Tensor:
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim != 1 or not len(index):
        raise InvalidValue(f"subnetwork_indices must be a vector of int64 with at least one entry, got {index!r:.99}")
    if int(index.min()) < 0 or int(index.max()) >= size:
        raise InvalidValue(
            f"subnetwork_indices must lie in 0..{size - 1}, got {int(index.min())} to {int(index.max())}"
        )
    if not bool((index[1:] > index[:-1]).all()):
        raise InvalidValue("subnetwork_indices must rise, each once: give indices.unique()")
    return index


class FullSubnetLaplace(SubnetLaplace, FullLaplace):
    """A subnetwork, with its dense curvature."""

    _key = ("subnetwork", "full")


class DiagSubnetLaplace(SubnetLaplace, DiagLaplace):
    """A subnetwork, with the diagonal of its curvature."""

    _key = ("subnetwork", "diag")
