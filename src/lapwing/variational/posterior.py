"""Draws of a variational q, each run through the network itself, with the bound that q reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lapwing.posterior import Particles, register


class Bound(NamedTuple):
    """The evidence's lower bound E_q[log p(D, θ) − log q(θ)], its standard error over draws, and the climb's values."""

    elbo: Tensor  # 0-dim
    error: Tensor  # 0-dim
    trace: Tensor  # (steps,): each step's noisy value, tempered and up to a constant


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@register
@dataclass(frozen=True, eq=False)
class Variational(Particles):
    """`weights` (s, p) drawn from q, whose `mean` and `deviation` are (p,), of another family its place and scale;
    `terms` (s,): log p(D, θ) − log q(θ)."""

    mean: Tensor = field(default_factory=_nothing)
    deviation: Tensor = field(default_factory=_nothing)
    terms: Tensor = field(default_factory=_nothing)
    trace: Tensor = field(default_factory=_nothing)

    @property
    def diagnostics(self) -> Bound:
        """The bound, with its standard error."""
        return Bound(self.terms.mean(), self.terms.std() / len(self.terms) ** 0.5, self.trace)

    def __str__(self) -> str:
        return f"{len(self.weights)} draws"
