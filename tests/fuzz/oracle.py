"""The tangent model by dense matrices in plain torch, in float64: nothing here comes from the library.

J      one call of torch.autograd.grad for each output of each example            (m, c, p), m rows
G      Σ Jᵀ Λ J over the rows, or Σ_n g gᵀ of the gradients of log p (empirical)  (p, p)
log Z  log p(D) − ½ (θ − μ)ᵀA(θ − μ) − ½ (log|G + A| − log|A|)
f ~ N(f, J (G + A)⁻¹ Jᵀ)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from blocks import unchecked
from generator import outputs
from observations import Observation
from torch import Tensor, nn
from torch.utils import _pytree


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in float64 and eval mode, every parameter of which has a gradient; nothing is run twice."""
    out = unchecked(model).double().eval().requires_grad_(True)
    for module in out.modules():
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            module.register_forward_hook(_ordered)
    return out


def _ordered(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Gradients in torch's own order: of one example with channels last, instance norm's backward pass is wrong."""
    if out.requires_grad:
        out.register_hook(lambda g: g.contiguous())
    return out


def cast(inputs: Any, dtype: torch.dtype = torch.float64) -> Any:
    return _pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def jacobian(model: nn.Module, inputs: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """f (n, ..., c) and its derivative by all parameters, (n, ..., c, p), in a dtype that the model is put to."""
    params = list(model.to(dtype).parameters())
    f = outputs(model, cast(inputs, dtype))
    rows = []
    for one in f.reshape(-1):
        grads = torch.autograd.grad(one, params, retain_graph=True, allow_unused=True, materialize_grads=False)
        flat = [
            torch.zeros(p.numel()) if g is None else g.to_dense().reshape(-1)
            for p, g in zip(params, grads, strict=True)
        ]
        rows.append(torch.cat([g.double() for g in flat]))
    return f.detach(), torch.stack(rows).reshape(*f.shape, -1)


@dataclass(frozen=True)
class Dense:
    """Curvature over data: of the weights at `chosen` places of the whole network's vector."""

    f: Tensor  # (n, ..., c)
    J: Tensor  # (n, ..., c, p), chosen weights only
    y: Tensor
    theta: Tensor  # (p,)
    observation: Observation
    empirical: bool = False

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """f (m, c), J (m, c, p) and y (m, ...) with positions as rows."""
        c = self.f.shape[-1]
        y = self.y.double() if self.y.is_floating_point() else self.y
        return (
            self.f.reshape(-1, c),
            self.J.reshape(-1, c, self.J.shape[-1]),
            y.reshape(-1, *y.shape[self.f.ndim - 1 :]),
        )

    def _sum(self, curvature: Any) -> Tensor:
        total = torch.zeros(self.J.shape[-1], self.J.shape[-1], dtype=torch.float64)
        for f, J, y in zip(*self.rows, strict=True):
            total += J.mT @ curvature(f, y) @ J
        return total

    @cached_property
    def G(self) -> Tensor:
        if not self.empirical:
            return self._sum(self.observation.curvature)
        f, J, y = self.rows
        slopes = torch.stack([J[i].mT @ self.observation.score(f[i], y[i]) for i in range(len(f))])
        each = slopes.reshape(len(self.f), -1, J.shape[-1]).sum(
            1
        )  # positions of an example add before they are squared
        return each.mT @ each

    @cached_property
    def unit_G(self) -> Tensor:
        return self._sum(self.observation.unit_curvature)

    @cached_property
    def log_likelihood(self) -> Tensor:
        f, _, y = self.rows
        return torch.stack([self.observation.log_prob(a, b) for a, b in zip(f, y, strict=True)]).sum()

    def evidence(self, G: Tensor, a: Tensor, mean: Tensor, fit: Tensor | None = None) -> Tensor:
        """log Z at the trained weights, for a prior N(mean, diag(a)⁻¹)."""
        occam = torch.linalg.slogdet(G + torch.diag(a))[1] - a.log().sum()
        fit = self.log_likelihood if fit is None else fit
        return fit - 0.5 * (a * (self.theta - mean) ** 2).sum() - 0.5 * occam

    def objective(self, v: Tensor, a: Tensor, mean: Tensor) -> Tensor:
        """The log joint density of the tangent model at weights v."""
        f, J, y = self.rows
        h = f + J @ (v - self.theta)
        fit = torch.stack([self.observation.log_prob(one, target) for one, target in zip(h, y, strict=True)]).sum()
        return fit - 0.5 * (a * (v - mean) ** 2).sum()


def covariance(J: Tensor, precision: Tensor, joint: bool) -> Tensor:
    """J P⁻¹ Jᵀ for J (n, ..., c, p): (n, ..., c, c), or (n, ..., c, n, ..., c)."""
    if not joint:
        return J @ torch.linalg.solve(precision, J.mT)
    flat = J.reshape(-1, J.shape[-1])
    return (flat @ torch.linalg.solve(precision, flat.mT)).reshape(*J.shape[:-1], *J.shape[:-1])
