"""f ~ N(μ, V): each input by itself, or all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.outputs import nodes
from lapwing.outputs.base import Outputs, check_finite
from lapwing.outputs.nodes import Nodes
from lapwing.outputs.points import DRAWS, psd_root, quasi_normal


@dataclass(frozen=True, eq=False)
class Normal:
    """`mean` (n, ..., c) and `covariance` (n, ..., c, c), or (n, ..., c, n, ..., c) if joint."""

    normal: ClassVar[bool] = True
    smooth: ClassVar[bool] = True
    sources: ClassVar[int] = 1
    mean: Tensor
    covariance: Tensor
    joint: bool = False
    samples: int | None = None

    def __post_init__(self) -> None:
        check_finite(self.mean, "mean outputs", "check the weights and the inputs")
        check_finite(self.covariance, "variances and covariances of the outputs", "raise the prior precision")

    @cached_property
    def marginal(self) -> Tensor:
        """The covariance of each input's outputs, (n, ..., c, c)."""
        if not self.joint:
            return self.covariance
        c, rows = self.mean.shape[-1], self.mean.shape[:-1].numel()
        blocks = self.covariance.reshape(rows, c, rows, c).diagonal(dim1=0, dim2=2)  # (c, c, N)
        return blocks.permute(2, 0, 1).reshape(*self.mean.shape, c)

    @property
    def variance(self) -> Tensor:
        """(n, ..., c)."""
        return self.marginal.diagonal(dim1=-2, dim2=-1)

    @property
    def parts(self) -> tuple[tuple[float, Outputs], ...]:
        """Itself."""
        return ((0.0, self),)

    def size(self, steps: int | None) -> int:
        """Numbers in the nodes of one row."""
        return (DRAWS if steps is None else 2 * nodes.REACH * steps + 1) * self.mean.shape[-1]

    def nodes(self, rows: Tensor, steps: int | None) -> Nodes:
        """Points with the full covariance, or a line for each output."""
        c = self.mean.shape[-1]
        mean, cov = self.mean.reshape(-1, c)[rows].double(), self.marginal.reshape(-1, c, c)[rows]
        if steps is None:
            return nodes.cloud(mean, cov.double())
        return nodes.line(mean, cov.diagonal(dim1=-2, dim2=-1).double(), steps)

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, None]:
        """n draws, (n, *mean.shape); over all inputs together if joint."""
        shape, dims = self._blocks
        noise = torch.randn((n, *shape, dims), generator=generator, dtype=torch.float64, device=generator.device)
        return self._colored(noise.to(self.mean.device)), None

    def points(self) -> Tensor:
        """Quasi-random points of all inputs together, (s, *mean.shape)."""
        return self._colored(quasi_normal(DRAWS, self._blocks[1]).to(self.mean.device))

    def scaled(self, t: float) -> Normal:
        """With its covariance times t."""
        return replace(self, covariance=t * self.covariance)

    def moved(self, by: Tensor) -> Normal:
        """About another mean."""
        return replace(self, mean=self.mean + by.to(self.mean))

    def __getitem__(self, index: slice) -> Normal:
        cov, axis = self.covariance[index], self.mean.ndim
        cov = cov.movedim(axis, 0)[index].movedim(0, axis) if self.joint else cov
        return replace(self, mean=self.mean[index], covariance=cov)

    def followed_by(self, others: Sequence[Normal]) -> Normal:
        """At more inputs, of as many samples; not joint."""
        parts = [self, *others]
        mean, cov = (torch.cat(found) for found in ([p.mean for p in parts], [p.covariance for p in parts]))
        return replace(self, mean=mean, covariance=cov)

    def __str__(self) -> str:
        return ""

    @property
    def _blocks(self) -> tuple[tuple[int, ...], int]:
        """Independent blocks of f: their batch shape and size."""
        return ((), self.mean.numel()) if self.joint else (tuple(self.mean.shape[:-1]), self.mean.shape[-1])

    def _colored(self, noise: Tensor) -> Tensor:
        """Standard normal (s, *shape, dims) turned into draws of f."""
        shape, dims = self._blocks
        root = psd_root(self.covariance.to(torch.float64).reshape(*shape, dims, dims))
        draws = torch.einsum("...ab,s...b->s...a", root, noise)  # one product, not one a draw
        return self.mean + draws.reshape(len(noise), *self.mean.shape).to(self.mean)
