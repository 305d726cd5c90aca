"""The true Hessian of the negative log-likelihood, −Σ_n ∂²_θ log p(y_n | f(x_n, θ)), (p, p).

It adds Σ_n score_n · ∂²_θ f to the Gauss-Newton matrix and can be indefinite away from a minimum; conditioning
then fails with its least eigenvalue. Forward over reverse, all columns at once; where torch has no rule for that, or a
wrong one (H w of a random w is held to plain autograd), two plain reverse passes a column.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from lapwing.curvature.structure import Accumulator
from lapwing.errors import Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel, proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, out_of_memory, plain_kernels

CHUNK = 256  # columns of the Hessian made at a time


class HessianSum(Accumulator):
    """Σ_n of the Hessian of −log p by the parameters, (h, p, p)."""

    mutable = ("gram",)

    def __init__(self, tangent: TangentModel, likelihood: Likelihood, terms: int) -> None:
        p = tangent.layout.size
        self.tangent, self.likelihood, self.terms = tangent, likelihood, terms
        self.gram = torch.zeros(terms, p, p, dtype=torch.float64, device=tangent.device)

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add a batch: inputs x, targets y, outputs f (n, ..., c), cotangents u (n, K, ..., c) and the output of
        each column."""
        targets = self.likelihood.rows(y, f[..., 0].numel())
        for h in range(self.terms):

            def loss(theta: Tensor, h: int = h) -> Tensor:
                out = self.tangent.apply(self.tangent.layout.unflatten(theta), x)
                return -self.likelihood.unit_log_prob(out.reshape(-1, out.shape[-1]), targets)[:, h].sum()

            hessian = _hessian(self.tangent, loss, proof.shapes(x))
            self.gram[h] += 0.5 * (hessian + hessian.mT)

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        """The sums by their names, and the batches that are kept."""
        return {"gram": self.gram}, ()


def _hessian(tangent: TangentModel, loss: Any, key: Any) -> Tensor:
    theta = tangent.theta
    with evaluating(tangent.model):
        right = partial(_proved, tangent, loss, theta)
        found = proof.attempt(tangent, "hessian", key, partial(_batched, loss, theta), right)
        return _plain(tangent, loss, theta, _units(theta)) if found is None else found


def _batched(loss: Any, theta: Tensor) -> Tensor:
    columns = vmap(lambda v: jvp(grad(loss), (theta,), (v,))[1])
    with plain_kernels(), any_batching_rule():
        return torch.cat([columns(part).to(torch.float64) for part in _units(theta).split(CHUNK)])


def _proved(tangent: TangentModel, loss: Any, theta: Tensor, found: Tensor) -> bool:
    w = proof.mixture(_units(theta), 1)
    want = _plain(tangent, loss, theta, w.unsqueeze(0))[0]
    return proof.agree({"": found}, {"": want}, w.to(found), tangent.eps)


def _plain(tangent: TangentModel, loss: Any, theta: Tensor, vectors: Tensor) -> Tensor:
    """H v for vectors (k, p) by two reverse passes each, (k, p)."""
    with plain_kernels(onednn=False), torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        params = tangent.layout.unflatten(leaf)

        def pull() -> Tensor:
            value = loss(leaf)
            (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
            if not slope.requires_grad:  # a loss that is linear in every weight
                return torch.zeros_like(vectors)
            each = [torch.autograd.grad(slope, leaf, v, retain_graph=True, allow_unused=True)[0] for v in vectors]
            return torch.stack([torch.zeros_like(leaf) if g is None else g for g in each])

        try:
            return tangent.backward(params, pull).to(torch.float64)
        except (RuntimeError, NotImplementedError) as error:
            if out_of_memory(error):
                raise
            raise Unsupported(
                f"factor='hessian' needs second derivatives, which torch cannot take of this network: "
                f"{str(error).splitlines()[0][:200]}; use factor='exact'"
            ) from error


def _units(theta: Tensor) -> Tensor:
    return torch.eye(theta.numel(), dtype=theta.dtype, device=theta.device)
