"""The exponential integral that the horseshoe's density is made of, which PyTorch lacks, for z > 0:

    F(z) = eᶻ E₁(z) = ∫_0^∞ e^{−zt}/(1 + t) dt,        F′ = F − 1/z

    z ≤ 2:  E₁ = −γ − log z − Σ_k (−z)ᵏ/(k·k!)
    z > 2:  F = 1/(z + 1 − 1²/(z + 3 − 2²/(z + 5 − …)))        Numerical Recipes, 6.3

Both to 1e-13 relatively in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

SERIES, FRACTION, SMALL = 30, 80, 2.0  # terms of each, and the z up to which the series serves


def scaled_e1(z: Tensor) -> Tensor:
    """eᶻ E₁(z), elementwise, for z > 0 in float64; differentiable as often as one likes, and by vmap."""
    return _ScaledE1.apply(z)


class _ScaledE1(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return torch.where(z <= SMALL, _series(z.clamp(max=SMALL)), _fraction(z.clamp(min=SMALL)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return slope * (scaled_e1(z) - 1 / z)


def _series(z: Tensor) -> Tensor:
    total, term = -np.euler_gamma - z.log(), torch.ones_like(z)
    for k in range(1, SERIES):
        term = term * (-z / k)
        total = total - term / k
    return z.exp() * total


def _fraction(z: Tensor) -> Tensor:
    """From its last term to the first."""
    tail = z + (2 * FRACTION + 1)
    for k in range(FRACTION, 0, -1):
        tail = z + (2 * k - 1) - k**2 / tail
    return 1 / tail
