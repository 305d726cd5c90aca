"""What a posterior says of a network's outputs f at some inputs, whatever kind of posterior it is:

    Normal   f ~ N(μ, V)             Draws   f one of f_1 … f_s           Blend   one of several of those
    Spread   f ~ N(μ, V), V known by draws f_1 … f_s of it

A prediction asks for nodes of f, which every kind has, and for closed forms where f is normal. Rows are inputs with
their positions, N of them. Shapes: n inputs, c outputs, s draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.outputs.nodes import Nodes


class Outputs(Protocol):
    """A distribution over f at some inputs."""

    @property
    def normal(self) -> bool:
        """Whether f is N(mean, covariance)."""

    @property
    def smooth(self) -> bool:
        """Whether it has a density: a target's distribution is an integral over f, not a mean over draws of it."""

    @property
    def samples(self) -> int | None:
        """How many draws of weights variances are known by; None where they are exact."""

    @property
    def joint(self) -> bool:
        """Whether inputs are predicted together."""

    @property
    def mean(self) -> Tensor:
        """(n, ..., c)."""

    @property
    def variance(self) -> Tensor:
        """(n, ..., c)."""

    @property
    def covariance(self) -> Tensor:
        """(n, ..., c, c), or (n, ..., c, n, ..., c) if joint."""

    @property
    def marginal(self) -> Tensor:
        """The covariance of each input's outputs, (n, ..., c, c)."""

    @property
    def sources(self) -> int:
        """How many likelihoods it can have: one, one a draw, or those of its parts."""

    @property
    def parts(self) -> tuple[tuple[float, Outputs], ...]:
        """Those that it is a mixture of, with log-weights; itself where it is none."""

    def size(self, steps: int | None) -> int:
        """Numbers in the nodes of one row."""

    def nodes(self, rows: Tensor, steps: int | None) -> Nodes:
        """Of some rows, in float64: with steps, so many in a standard deviation for integrals over one output."""

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """n draws of f, (n, *mean.shape), and the source of each, (n,), where there are several."""

    def scaled(self, t: float) -> Outputs:
        """The same about its mean with its variances times t; 0 leaves the mean alone."""

    def moved(self, by: Tensor) -> Outputs:
        """The same with its values moved by (n, ..., c)."""

    def __getitem__(self, index: slice) -> Outputs:
        """At some of the inputs."""

    def followed_by(self, others: Sequence[Any]) -> Outputs:
        """At these inputs and those of others of its kind, one after the other; each input by itself."""


def check_finite(values: Tensor, what: str, do: str) -> None:
    """Raise if numbers that predictions are made of are NaN or infinite."""
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        dtype, wider = str(values.dtype).removeprefix("torch."), values.dtype != torch.float64
        raise InvalidValue(
            f"{bad} of {values.numel()} {what} are NaN or infinite in {dtype}, which ends at "
            f"{torch.finfo(values.dtype).max:.2g}: {do}" + (", or predict with network.double()" if wider else "")
        )
