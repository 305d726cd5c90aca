"""Stochastic gradient descent for K x = b where K is a sum over data that is too long to sum at each step:

    ½ xᵀK x − bᵀx,   gradient K̂ x − b,   K̂ from one minibatch with E K̂ = K

With momentum, preconditioned by M⁻¹, and with the iterates of the second half of each round averaged, which removes
most of the noise that a constant step leaves. A round is a number of minibatches, then one true product tells the
residual; where a round gained little, the next halves its step. Source: Lin et al. 2023 (SGD for posterior samples).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotPositiveDefinite
from lapwing.solvers.cg import Solution
from lapwing.solvers.product import Product, product

MOMENTUM = 0.9
POWER = 8  # minibatches from which the largest step is told
GAIN = 0.7  # of a residual: a round that leaves more than that halves the step


@torch.no_grad()
def sgd(
    mv: Product,
    minibatches: Iterator[Product],
    b: Tensor,
    round_steps: int,
    preconditioner: Product | None = None,
    x0: Tensor | None = None,
    tolerance: float = 1e-2,
    rounds: int = 100,
) -> Solution:
    """Solve K x = b for the rows of b (k, p) to ‖b − K x‖ ≤ tolerance·‖b‖, by minibatch products K̂ v of `minibatches`.

    Like `cg`, it never raises for want of convergence. `products` counts true ones, one a round."""
    if not tolerance > 0 or rounds < 1 or round_steps < 2:
        raise InvalidValue(
            f"give tolerance > 0, rounds >= 1, round_steps >= 2; got {tolerance}, {rounds}, {round_steps}"
        )
    precondition = preconditioner or (lambda r: r)
    b = b.to(torch.float64)
    size = b.norm(dim=-1).clamp(min=torch.finfo(b.dtype).tiny)
    x = torch.zeros_like(b) if x0 is None else x0.to(b).clone()
    step = 1 / _steepest(minibatches, precondition, b)
    best, least, made = x.clone(), (b - product(mv, x)).norm(dim=-1) / size, 1
    steps = 0
    for _ in range(rounds):
        if bool((least <= tolerance).all()):
            break
        x, speed, mean = best.clone(), torch.zeros_like(b), torch.zeros_like(b)
        for i in range(round_steps):
            ahead = x + MOMENTUM * speed
            gradient = product(next(minibatches), ahead) - b
            speed = MOMENTUM * speed - step * precondition(gradient)
            x = x + speed
            if i >= round_steps // 2:
                mean += (x - mean) / (i - round_steps // 2 + 1)
        steps += round_steps
        if torch.isfinite(mean).all():
            residual, made = (b - product(mv, mean)).norm(dim=-1) / size, made + 1
            better = residual < least
            slow = bool((residual > GAIN * least).any())
            best[better], least = mean[better], torch.where(better, residual, least)
        else:
            slow = True  # the step was too long
        step = 0.5 * step if slow else step
    return Solution(best, least, steps, bool((least <= tolerance).all()), made)


def _steepest(minibatches: Iterator[Product], precondition: Product, b: Tensor) -> float:
    """The largest eigenvalue of M⁻¹K̂ over some minibatches, by power iteration on one vector, twice over: a minibatch
    seen later may have a larger one. Momentum would let a step be longer; the noise of minibatches would not."""
    v, top = precondition(b[:1]), 0.0
    for _ in range(POWER):
        mv = next(minibatches)
        for _ in range(3):
            v = v / v.norm()
            v = precondition(product(mv, v))
        top = max(top, float(v.norm()))
    if not 0 < top < float("inf"):
        raise NotPositiveDefinite(f"stochastic gradients need a positive definite matrix; its largest value is {top}")
    return 2 * top
