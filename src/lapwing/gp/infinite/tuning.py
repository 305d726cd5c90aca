"""The variances of weights and biases, and the noise, at which the evidence is highest.

    ∂ log Z / ∂η = ½ Σ_c tr[(α_c α_cᵀ − (K + D_c)⁻¹) ∂(K + D_c)/∂η],   α_c = (K + D_c)⁻¹(ỹ_c − m_c)

∂K/∂ log w and ∂K/∂ log b are central differences of the kernel, which serve every activation; the noise's derivative is
exact.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.gp.climb import climbed
from lapwing.tune.bounds import Box, Tuning

if TYPE_CHECKING:
    from lapwing.gp.infinite.regression import Regression

STEP = 1e-3  # of a central difference, in log space
FACTOR = 1e4  # either way, that a variance may move from where it starts


def searched(process: Regression, fixed: tuple[str, ...]) -> tuple[dict[str, Tensor], Tuning]:
    """The hyperparameters that the evidence picks, and how it went."""
    evidence = lambda values: value_and_slope(process.at(values), tuple(values))  # noqa: E731
    return climbed(bounds(process, fixed), evidence, process.n * process.outputs, fixed, center="")


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
