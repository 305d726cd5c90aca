"""Draws of f, each of one network at all inputs: of weights run through the network, or pushed through its tangent.

Var f = Σ_s w_s (f_s − μ)² / (1 − Σ_s w_s²)     about the draws' own mean; without the divisor about a mean that is
                                                 known, and for a single draw
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.errors import Unsupported
from lapwing.outputs import nodes
from lapwing.outputs.base import Outputs, check_finite
from lapwing.outputs.nodes import Nodes

WIDE = 512  # outputs past which a covariance matrix an input is too large


@dataclass(frozen=True, eq=False)
class Draws:
    """`values` (s, n, ..., c)."""

    normal: ClassVar[bool] = False
    smooth: ClassVar[bool] = False
    values: Tensor
    known_mean: Tensor | None = None  # (n, ..., c), where it is not that of the draws
    joint: bool = False
    log_weight: Tensor | None = None  # (s,), summing to one; None where they are equal
    samples: int | None = None

    def __post_init__(self) -> None:
        check_finite(self.mean, "mean outputs", "check the weights and the inputs")

    @cached_property
    def mean(self) -> Tensor:
        """(n, ..., c)."""
        return self._average(self.values) if self.known_mean is None else self.known_mean

    @property
    def variance(self) -> Tensor:
        """(n, ..., c)."""
        return self._average((self.values - self.mean).square()) * self._correction

    @property
    def covariance(self) -> Tensor:
        """(n, ..., c, c), or (n, ..., c, n, ..., c) if joint."""
        return self._covariance(self.joint)

    @property
    def marginal(self) -> Tensor:
        """The covariance of each input's outputs, (n, ..., c, c)."""
        return self._covariance(False)

    @property
    def sources(self) -> int:
        """A likelihood for each draw."""
        return len(self.values)

    @property
    def parts(self) -> tuple[tuple[float, Outputs], ...]:
        """Itself."""
        return ((0.0, self),)

    def size(self, steps: int | None) -> int:
        """Numbers in the draws of one row."""
        return len(self.values) * self.mean.shape[-1]

    def nodes(self, rows: Tensor, steps: int | None) -> Nodes:
        """The draws themselves."""
        values = self.values.reshape(len(self.values), -1, self.mean.shape[-1])[:, rows]
        return replace(nodes.drawn(values.double(), self.log_weight), source=torch.arange(len(values)))

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """n of the draws, with repetition."""
        if self.log_weight is None:
            pick = torch.randint(len(self.values), (n,), generator=generator, device=generator.device)
        else:
            pick = torch.multinomial(self.log_weight.exp().to(generator.device), n, True, generator=generator)
        return self.values[pick.to(self.values.device)], pick

    def scaled(self, t: float) -> Draws:
        """With draws moved towards the mean, or away from it."""
        values = self.mean + t**0.5 * (self.values - self.mean)
        return replace(self, values=values, known_mean=self.mean)

    def moved(self, by: Tensor) -> Draws:
        """With all draws moved."""
        known = None if self.known_mean is None else self.known_mean + by.to(self.values)
        return replace(self, values=self.values + by.to(self.values), known_mean=known)

    def __getitem__(self, index: slice) -> Draws:
        known = None if self.known_mean is None else self.known_mean[index]
        return replace(self, values=self.values[:, index], known_mean=known)

    def followed_by(self, others: Sequence[Draws]) -> Draws:
        """At more inputs, of the same draws of weights."""
        parts = [self, *others]
        known = None if self.known_mean is None else torch.cat([part.mean for part in parts])
        return replace(self, values=torch.cat([part.values for part in parts], 1), known_mean=known)

    def __str__(self) -> str:
        return f"{len(self.values)} draws"

    def _average(self, values: Tensor) -> Tensor:
        if self.log_weight is None:
            return values.mean(0)
        return torch.tensordot(self.log_weight.exp().to(values), values, 1)

    @property
    def _correction(self) -> float:
        squares = 1 / len(self.values) if self.log_weight is None else float((2 * self.log_weight).exp().sum())
        return 1.0 if self.known_mean is not None or squares >= 1 else 1 / (1 - squares)

    def _covariance(self, joint: bool) -> Tensor:
        if self.mean.shape[-1] > WIDE:
            raise Unsupported(
                f"{self.mean.shape[-1]} outputs are too many for a covariance matrix; use f_var, or f_sample(n)"
            )
        w = torch.full_like(self.values[:, :1].flatten(1)[:, 0], 1 / len(self.values))
        w = (w if self.log_weight is None else self.log_weight.exp().to(w)) * self._correction
        away = self.values - self.mean
        if joint:
            flat = away.flatten(1)
            return (flat.mT @ (flat * w[:, None])).reshape(*self.mean.shape, *self.mean.shape)
        return torch.einsum("s,s...a,s...b->...ab", w, away, away)
