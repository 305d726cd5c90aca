"""The variances of weights and biases, and the noise, at which the evidence is highest.

    ∂ log Z / ∂η = ½ Σ_c tr[(α_c α_cᵀ − (K + D_c)⁻¹) ∂(K + D_c)/∂η],   α_c = (K + D_c)⁻¹(ỹ_c − m_c)

∂K/∂ log w and ∂K/∂ log b are central differences of the kernel, which serve every activation; the noise's derivative is
exact. L-BFGS with a strong Wolfe search in log space, inside bounds as in `tune/evidence.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, NotConverged
from lapwing.tune.bounds import Box, Tuning, warn_bound

if TYPE_CHECKING:
    from lapwing.gp.infinite.regression import Regression

STEP = 1e-3  # of a central difference, in log space
FACTOR = 1e4  # either way, that a variance may move from where it starts
STEPS = 60
TOLERANCE = 1e-6  # of the gradient, relative to the number of targets


def searched(process: Regression, fixed: tuple[str, ...]) -> tuple[dict[str, Tensor], Tuning]:
    """The hyperparameters that the evidence picks, and how it went."""
    box = bounds(process, fixed)
    u = {k: torch.logit((v - box.low[k]) / (box.high[k] - box.low[k])).requires_grad_() for k, v in box.start.items()}
    trace: list[float] = []
    enough = TOLERANCE * process.n * process.outputs
    optimizer = torch.optim.LBFGS(
        list(u.values()), max_iter=STEPS, tolerance_grad=enough, tolerance_change=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logs = {k: box.low[k] + (box.high[k] - box.low[k]) * torch.sigmoid(v) for k, v in u.items()}
        value, slope = value_and_slope(process.at({k: v.detach().exp() for k, v in logs.items()}), tuple(logs))
        if not math.isfinite(float(value)):
            raise NotConverged(f"the log evidence became {float(value)} while tuning {list(u)}; fix one with fixed=")
        torch.autograd.backward(list(logs.values()), [-slope[k] for k in logs])
        trace.append(float(value))
        return -value

    optimizer.step(closure)
    final = {k: (box.low[k] + (box.high[k] - box.low[k]) * torch.sigmoid(v)).detach() for k, v in u.items()}
    slope = value_and_slope(process.at({k: v.exp() for k, v in final.items()}), tuple(final))[1]
    at_bound = box.at_bound(final)
    steep = max(float(v.abs().max()) for v in slope.values())
    converged = bool(at_bound) or steep <= max(1e-2, 100 * enough)
    warn_bound(at_bound)
    steps = optimizer.state[next(iter(u.values()))]["n_iter"]
    values = {k: v.exp() for k, v in final.items()}
    return values, Tuning("evidence", "", tuple(trace), steps, converged, at_bound, fixed)


def bounds(process: Regression, fixed: tuple[str, ...]) -> Box:
    """Where hyperparameters start and may go, but for the fixed: a variance by a factor either way."""
    kernel, likelihood = process.kernel, process.likelihood
    known = {"weight_variance": kernel.weight_variance, "bias_variance": kernel.bias_variance}
    names = [*known, *likelihood.hyperparameters]
    if unknown := [name for name in fixed if name not in names]:
        raise InvalidValue(f"fixed={unknown} names no hyperparameter; they are {names}")
    logs = {k: torch.tensor(v, dtype=torch.float64).log() for k, v in known.items() if v > 0 and k not in fixed}
    low = {k: v - math.log(FACTOR) for k, v in logs.items()}
    high = {k: v + math.log(FACTOR) for k, v in logs.items()}
    f, y = process.x.new_zeros(process.n, process.outputs), process.y
    limits = likelihood.limits(likelihood.statistics(f, y)) if likelihood.hyperparameters else {}
    for name in likelihood.hyperparameters:
        if name not in fixed:
            low[name], high[name], _ = limits[name]
            inside = likelihood.hyperparameters[name].log().clamp(low[name] + 1, high[name] - 1)
            logs[name] = inside
    if not logs:
        raise InvalidValue(f"all of {names} are fixed, or 0; there is nothing to tune")
    return Box(low, high, logs, {})


def value_and_slope(process: Regression, names: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """log Z, and its derivative in the logarithm of each hyperparameter."""
    weight, traces = _weights(process)
    slope = {name: _along(process, name, weight) for name in names if name != "noise"}
    if "noise" in names:
        noise = process.likelihood.noise
        slope["noise"] = (2 * noise.square().reshape(-1) * traces).reshape(noise.shape)
    return process.log_evidence(), slope


def _weights(process: Regression) -> tuple[Tensor, Tensor]:
    """W = ½ Σ_c (α αᵀ − (K + D)⁻¹), (n, n), and the trace of each term, of outputs that share a noise."""
    total, traces = torch.zeros_like(process.gram), []
    for columns, root in process.roots():
        away = process.observed[0][:, columns] - process.constant[columns]
        alpha, inverse = torch.cholesky_solve(away, root), torch.cholesky_inverse(root)
        traces.append(0.5 * (alpha.square().sum() - away.shape[1] * inverse.diagonal().sum()))
        total.addmm_(alpha, alpha.mT, alpha=0.5).sub_(inverse, alpha=0.5 * away.shape[1])
    return total, torch.stack(traces)


def _along(process: Regression, name: str, weight: Tensor) -> Tensor:
    """Σ W ⊙ ∂K/∂ log η."""
    value = getattr(process.kernel, name)
    up, down = (process.kernel.replace(**{name: value * math.exp(h)})(process.x) for h in (STEP, -STEP))
    return (weight * up.sub_(down)).sum() / (2 * STEP)
