"""Expectations over f at all inputs of a prediction, each input by itself.

The inputs with their positions are rows (N, c). A row's nodes are those of its own μ and V, or of its own draws, so it
does not depend on its company. They are made in float64, for so many rows at a time that they stay in the caches.

A line resolves what is averaged over it. For classes that is p(y | f), in every field. For others p(y | f) may be far
narrower than E[y | f]: then densities take a finer grid, which has the nodes of the coarser; moments do not need it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import LapwingWarning, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.predictive import moments, nodes
from lapwing.predictive.nodes import Nodes

CHUNK = 2**19  # numbers in the nodes of some rows: few enough to stay in caches
STEEP = 0.25  # the most information that a label has about its logit


@dataclass(frozen=True, eq=False)
class Integral:
    likelihood: Likelihood
    mean: Tensor  # μ (n, ..., c)
    cov: Tensor | None  # V (n, ..., c, c); None where there are draws
    draws: Tensor | None = None  # (s, n, ..., c)

    def over(
        self, values: Callable[[Nodes, Tensor], Tensor], by_line: bool | None = None, sharp: bool = True
    ) -> Tensor:
        """values(nodes, rows) of all rows, (n, ..., *); by_line: of each target by itself, if that is an integral over
        one output (None: where it is). sharp: of p(y | f), and not only of its moments."""
        by_line = self.by_line if by_line is None else by_line
        index, found, lost = [], [], 0.0
        for rows, some in self._pieces(by_line, sharp):
            kept, outside = some.inside(self.likelihood)
            lost = max(lost, outside)
            index.append(rows)
            found.append(values(kept, rows))
        if lost:
            warnings.warn(
                f"up to {100 * lost:.2g} % of the draws of f are outside of what {self.likelihood.name} can take and "
                "are left out; link='auto' does not draw",
                LapwingWarning,
                stacklevel=4,
            )
        out = torch.cat(found)[torch.cat(index).argsort()]
        return out.reshape(*self.mean.shape[:-1], *out.shape[1:])

    @property
    def by_line(self) -> bool:
        """Whether a target's distribution is an integral over one output."""
        return self.likelihood.elementwise or self.mean.shape[-1] == 1

    # -- rows ------------------------------------------------------------------------------------------------------

    def _pieces(self, by_line: bool, sharp: bool) -> Iterator[tuple[Tensor, Nodes]]:
        c = self.mean.shape[-1]
        mean, every = self.mean.reshape(-1, c), torch.arange(self.mean[..., 0].numel(), device=self.mean.device)
        if self.draws is not None:
            draws = self.draws.reshape(len(self.draws), -1, c)
            for rows in _cut(every, len(draws) * c):
                yield rows, nodes.drawn(draws[:, rows].double())
            return
        assert self.cov is not None
        cov = self.cov.reshape(-1, c, c)
        if not by_line:
            for rows in _cut(every, nodes.DRAWS * c):
                yield rows, nodes.cloud(mean[rows].double(), cov[rows].double())
            return
        steps = self._steps if sharp or self.likelihood.classes else torch.full_like(every, nodes.LEAST_NODES)
        for count in steps.unique().tolist():
            for rows in _cut(every[steps == count], (2 * nodes.REACH * count + 1) * c):
                var = cov[rows].diagonal(dim1=-2, dim2=-1)
                yield rows, nodes.line(mean[rows].double(), var.double(), count)

    @cached_property
    def _steps(self) -> Tensor:
        """Steps of a row's line in one standard deviation, (N,)."""
        sharpness = self._sharpness.reshape(self.mean[..., 0].numel(), -1).amax(-1)
        return nodes.fine(sharpness)

    @property
    def _sharpness(self) -> Tensor:
        """How much wider the posterior over f is than p(y|f), squared: by variances, or by the information in y where
        they are infinite; without end where the likelihood does not say."""
        if self.likelihood.classes:
            return STEEP * self._var
        try:
            if bool(torch.isfinite(self.likelihood.variance(self.mean.double())).all()):
                return self.over(self._ratio, True, sharp=False)
            return self._var * self.likelihood.hessian_root(self.mean).square().sum(-1)
        except Unsupported:
            return torch.full_like(self.mean, math.inf)

    @property
    def _var(self) -> Tensor:
        assert self.cov is not None
        return self.cov.diagonal(dim1=-2, dim2=-1)

    def _ratio(self, some: Nodes, rows: Tensor) -> Tensor:
        return moments.mean_and_spread(self.likelihood, some)[:, 1] / moments.noise(self.likelihood, some)


def _cut(rows: Tensor, each: int) -> tuple[Tensor, ...]:
    """Rows with so many numbers each, in chunks."""
    return rows.split(max(1, CHUNK // each))
