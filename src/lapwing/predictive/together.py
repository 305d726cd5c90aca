"""The density of several targets together, where y given f is not Gaussian: log E_f Π_n p(y_n | f_n), f ~ N(μ, V).

A mean of products over draws of f is ruled by the few draws that all targets agree with. So draws are made about the
mode of the integrand, and weighted (importance sampling by Laplace's method). With f = μ + L z, L Lᵀ = V, z ~ N(0, I):

    ẑ = argmax ψ(z) = Σ_n log p(y_n | f_n) − ½‖z‖²,    B = I + LᵀΛL = C Cᵀ at ẑ,    Λ = −∂²_f log p, positive part
    z_s = ẑ + C⁻ᵀ e_s,    log E ≈ log mean_s exp(ψ(z_s) + ½‖e_s‖²) − log|C|

exact for Gaussian noise, whatever the draws e_s. Shapes: N inputs with their positions, c outputs, d = N·c.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from lapwing.errors import NotConverged, warn
from lapwing.outputs.points import DRAWS, psd_root, quasi_normal

NEWTON_STEPS, HALVINGS = 100, 40
SETTLED = 1e-9  # a Newton step's promise, in nats
FEWEST = 16  # draws' worth of weight below which the estimate is said to be poor


def log_density(log_prob: Callable[[Tensor, Tensor], Tensor], mean: Tensor, cov: Tensor, y: Tensor) -> Tensor:
    """For μ (N, c), V (N·c, N·c) and targets (N, ...); log_prob(f, y) maps rows (N, c) to (N,). In float64, 0-dim."""
    mean, L = mean.double(), psd_root(cov.double())

    def psi(z: Tensor) -> Tensor:
        """(..., d) -> (...)."""
        f = mean + (z @ L.mT).reshape(*z.shape[:-1], *mean.shape)
        return log_prob(f, y.expand(*f.shape[:-2], *y.shape)).sum(-1) - 0.5 * z.square().sum(-1)

    z, C = _mode(psi, log_prob, mean, L, y)
    e = quasi_normal(DRAWS, len(z)).to(z)
    draws = z + torch.linalg.solve_triangular(C.mT, e.mT, upper=True).mT
    log_weight = psi(draws) + 0.5 * e.square().sum(-1)
    worth = float(torch.exp(2 * torch.logsumexp(log_weight, 0) - torch.logsumexp(2 * log_weight, 0)))
    if worth < FEWEST:
        warn(
            f"the joint density of {len(mean)} inputs rests on {worth:.1f} of {DRAWS} draws' worth of weight; it is "
            "rough: ask for fewer inputs together",
        )
    return torch.logsumexp(log_weight, 0) - math.log(DRAWS) - C.diagonal().log().sum()


def _mode(
    psi: Callable[[Tensor], Tensor], log_prob: Callable[[Tensor, Tensor], Tensor], mean: Tensor, L: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """ẑ (d,) by Newton's method with a line search, and C (d, d) there."""
    eye = torch.eye(mean.numel(), dtype=mean.dtype, device=mean.device)

    def one(f: Tensor, y: Tensor) -> Tensor:
        return log_prob(f.unsqueeze(0), y.unsqueeze(0))[0]

    z, value = mean.new_zeros(mean.numel()), psi(mean.new_zeros(mean.numel()))
    for _ in range(NEWTON_STEPS):
        f = mean + (L @ z).reshape(mean.shape)
        slope = L.mT @ vmap(grad(one))(f, y).reshape(-1) - z
        C = torch.linalg.cholesky(eye + L.mT @ _times(_positive(-vmap(jacrev(grad(one)))(f, y)), L))
        step = torch.cholesky_solve(slope.unsqueeze(-1), C).squeeze(-1)
        promise = float(slope @ step)
        if promise < SETTLED:
            return z, C
        for k in range(HALVINGS):
            new = z + step / 2**k
            there = psi(new)
            if bool(there >= value + 1e-4 * promise / 2**k):
                break
        else:  # rounding is all that is left
            return z, C
        z, value = new, there
    raise NotConverged(f"the mode of a joint density was not found in {NEWTON_STEPS} Newton steps")


def _positive(matrix: Tensor) -> Tensor:
    """The positive part of symmetric matrices (N, c, c)."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT


def _times(blocks: Tensor, matrix: Tensor) -> Tensor:
    """Block diagonal (N, c, c) times (N·c, d)."""
    return (blocks @ matrix.reshape(*blocks.shape[:2], -1)).reshape(matrix.shape)
