"""Stochastic gradient descent for K x = b where K is a sum over data that is too long to sum at each step:

    ½ dᵀK d − rᵀd,   gradient K̂ d − r,   K̂ from one minibatch with E K̂ = K,   r = b − K x

A round runs minibatches with momentum, preconditioned by M⁻¹, for the step d from x, and averages the iterates of its
second half; then one true product tells what is left. As d shrinks with r, so does the noise of the minibatches (as in
SVRG), and rounds gain by a factor each; one that gains little halves the length of steps. Source: Lin et al. 2023 (SGD
for posterior samples); Johnson and Zhang 2013.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotPositiveDefinite
from lapwing.solvers.cg import Solution
from lapwing.solvers.product import Anywhere, Product, here, product

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
    anywhere: Anywhere = here,
) -> Solution:
    """Solve K x = b for the rows of b (k, p) to ‖b − K x‖ ≤ tolerance·‖b‖, by minibatch products K̂ v of `minibatches`.

    Like `cg`, it never raises for want of convergence. `products` counts true ones, one a round. Processes that columns
    are spread over take rounds together, each with a length of steps of its own."""
    if not tolerance > 0 or rounds < 1 or round_steps < 2:
        raise InvalidValue(
            f"give tolerance > 0, rounds >= 1, round_steps >= 2; got {tolerance}, {rounds}, {round_steps}"
        )
    precondition = preconditioner or (lambda r: r)
    b = b.to(torch.float64)
    size = b.norm(dim=-1).clamp(min=torch.finfo(b.dtype).tiny)
    x = torch.zeros_like(b) if x0 is None else x0.to(b).clone()
    r, made, steps = b - product(mv, x), 1, 0
    step = 1 / _steepest(minibatches, precondition, b)
    for _ in range(rounds):
        if not anywhere(not bool((r.norm(dim=-1) <= tolerance * size).all())):
            break
        d = _round(minibatches, precondition, r, step, round_steps)
        steps += round_steps
        lost = ~torch.isfinite(d).all(-1)
        d[lost] = 0.0
        now = r - product(mv, d)
        now[lost], made = float("inf"), made + 1
        before, after = r.norm(dim=-1), now.norm(dim=-1)
        better = after < before
        x[better], r[better] = x[better] + d[better], now[better]
        if bool((after > GAIN * before).any()):
            step *= 0.5
    residual = r.norm(dim=-1) / size
    return Solution(x, residual, steps, bool((residual <= tolerance).all()), made)


def _round(minibatches: Iterator[Product], precondition: Product, r: Tensor, step: float, steps: int) -> Tensor:
    """d near K⁻¹ r."""
    d, speed, mean = torch.zeros_like(r), torch.zeros_like(r), torch.zeros_like(r)
    for i in range(steps):
        gradient = next(minibatches)(d + MOMENTUM * speed) - r
        speed = MOMENTUM * speed - step * precondition(gradient)
        d = d + speed
        if i >= steps // 2:
            mean += (d - mean) / (i - steps // 2 + 1)
    return mean


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
    if len(b) and not 0 < top < float("inf"):
        raise NotPositiveDefinite(f"stochastic gradients need a positive definite matrix; its largest value is {top}")
    return 2 * top if len(b) else 1.0
