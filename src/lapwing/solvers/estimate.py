"""What random probes say of a number: its estimate, standard error and 90 % interval.

    mean_of(s)      s̄,      se = sd(s)/√k,                        s̄ ± t se
    ratio_of(a, b)  r = ā/b̄,  se = sd(a − r b)/(b̄ √k)  (delta method),   r exp(± t se/r)
    variance_of     v̂ = Σ z²/k, z ~ N(0, v):  k v̂/v ~ χ²_k,       k v̂/χ²_k(.95) to k v̂/χ²_k(.05): exact for any k

t is Student's quantile at k − 1 degrees of freedom. Means of positive numbers err more upward than downward; on the
logarithmic scale, on which a ratio's interval is made, that skewness is mostly gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.errors import InvalidValue

LEVEL = 0.9  # of intervals
FEWEST = 4  # probes from which a standard error is told


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number from random probes, with its standard error and 90 % interval."""

    value: float
    standard_error: float
    interval: tuple[float, float]  # 90 %
    samples: Tensor = field(repr=False)  # (k,), one a probe; empty where nothing is random

    def __sub__(self, constant: float) -> Estimate:
        low, high = self.interval
        return Estimate(self.value - constant, self.standard_error, (low - constant, high - constant), self.samples)

    def wider(self, low: float, high: float) -> Estimate:
        """With an interval that also holds all from low to high."""
        ends = min(low, self.interval[0]), max(high, self.interval[1])
        return Estimate(self.value, self.standard_error, ends, self.samples)


def exactly(value: float) -> Estimate:
    """A number that took no probes."""
    return Estimate(value, 0.0, (value, value), torch.empty(0, dtype=torch.float64))


def mean_of(samples: Tensor) -> Estimate:
    """The mean of samples (k,), with Student's interval."""
    value, error = float(samples.mean()), _standard_error(samples)
    away = student_t(LEVEL, len(samples) - 1) * error
    return Estimate(value, error, (value - away, value + away), samples)


def ratio_of(top: Tensor, bottom: Tensor) -> Estimate:
    """mean(top) / mean(bottom) of positive numbers, probe by probe in pairs."""
    ratio = float(top.mean() / bottom.mean())
    error = _standard_error((top - ratio * bottom) / bottom.mean())
    factor = math.exp(student_t(LEVEL, len(top) - 1) * error / ratio)
    return Estimate(ratio, error, (ratio / factor, ratio * factor), top / bottom)


def variance_of(mean_square: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The ends of the interval of a variance, from the mean square of normal draws of mean zero."""
    low, high = (samples / chi_square(0.5 + sign * LEVEL / 2, samples) for sign in (1, -1))
    return low * mean_square, high * mean_square


def _standard_error(samples: Tensor) -> float:
    if len(samples) < FEWEST:
        raise InvalidValue(f"a standard error needs at least {FEWEST} probes, got {len(samples)}")
    return float(samples.std()) / len(samples) ** 0.5


def student_t(level: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = level, by Cornish and Fisher's expansion in 1/freedom (Abramowitz and Stegun 26.7.5)."""
    z = float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64)))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def chi_square(level: float, freedom: int) -> float:
    """The x with P(χ² ≤ x) = level, by bisection of the incomplete gamma function."""
    half, low, high = torch.tensor(freedom / 2, dtype=torch.float64), 0.0, 2.0 * freedom + 100
    for _ in range(100):
        x = (low + high) / 2
        below = float(torch.special.gammainc(half, torch.full_like(half, x / 2))) < level
        low, high = (x, high) if below else (low, x)
    return x
