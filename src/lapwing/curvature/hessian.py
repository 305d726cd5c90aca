"""The true Hessian of the negative log-likelihood, −Σ_n ∂²_θ log p(y_n | f(x_n, θ)), (p, p).

It adds Σ_n score_n · ∂²_θ f to the Gauss-Newton matrix and can be indefinite away from a minimum; conditioning
then fails with its least eigenvalue. Forward over reverse; reverse over reverse where a kernel lacks forward mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import forward_mode_missing, plain_kernels

CHUNK = 256  # columns of the Hessian made at a time


class HessianSum:
    mutable = ("gram",)

    def __init__(self, tangent: TangentModel, likelihood: Likelihood, groups: int) -> None:
        p = tangent.layout.size
        self.tangent, self.likelihood, self.groups = tangent, likelihood, groups
        self.gram = torch.zeros(groups, p, p, dtype=torch.float64, device=tangent.device)

    def forward(self, x: Any) -> Tensor:
        return self.tangent(x)

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        targets = self.likelihood.rows(y, f[..., 0].numel())
        for g in range(self.groups):

            def loss(theta: Tensor, g: int = g) -> Tensor:
                out = self.tangent.apply(self.tangent.layout.unflatten(theta), x)
                return -self.likelihood.unit_log_prob(out.reshape(-1, out.shape[-1]), targets)[:, g].sum()

            hessian = _hessian(self.tangent, loss)
            self.gram[g] += 0.5 * (hessian + hessian.mT)

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        return {"gram": self.gram}, ()


def _hessian(tangent: TangentModel, loss: Any) -> Tensor:
    theta = tangent.theta
    with evaluating(tangent.model):
        try:
            with plain_kernels():
                return torch.cat([_columns(loss, theta, part) for part in _units(theta).split(CHUNK)])
        except (RuntimeError, NotImplementedError) as error:
            if not forward_mode_missing(error):
                raise
            with plain_kernels(onednn=False):
                return jacrev(grad(loss), chunk_size=CHUNK)(theta).to(torch.float64)


def _columns(loss: Any, theta: Tensor, units: Tensor) -> Tensor:
    return vmap(lambda v: jvp(grad(loss), (theta,), (v,))[1])(units).to(torch.float64)


def _units(theta: Tensor) -> Tensor:
    return torch.eye(theta.numel(), dtype=theta.dtype, device=theta.device)
