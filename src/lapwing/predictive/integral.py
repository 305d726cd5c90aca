"""Expectations over f at all inputs of a prediction, each input by itself.

The inputs with their positions are rows (N, c). A row's nodes are those of its own outputs, so it does not depend on
its company. They are made in float64, for so many rows at a time that they stay in the caches.

A line resolves what is averaged over it. For classes that is p(y | f), in every field. For others p(y | f) may be far
narrower than E[y | f]: then densities take a finer grid, which has the nodes of the coarser; moments do not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import Unsupported, warn
from lapwing.likelihoods import Likelihood
from lapwing.outputs import Nodes, Outputs
from lapwing.outputs.nodes import LEAST_NODES, fine
from lapwing.predictive import moments

CHUNK = 2**19  # numbers in the nodes of some rows: few enough to stay in caches
STEEP = 0.25  # the most information that a label has about its logit


@dataclass(frozen=True, eq=False)
class Integral:
    """Over outputs f, of what a likelihood says at them."""

    likelihood: Likelihood
    outputs: Outputs

    def over(
        self, values: Callable[[Likelihood, Nodes, Tensor], Tensor], by_line: bool | None = None, sharp: bool = True
    ) -> Tensor:
        """values(likelihood at nodes, nodes, rows) of all rows, (n, ..., *); by_line: of each target by itself, if that
        is an integral over one output (None: where it is). sharp: of p(y | f), and not only of its moments."""
        by_line = self.by_line if by_line is None else by_line
        index, found, lost = [], [], 0.0
        for rows, some in self._pieces(by_line, sharp):
            kept, outside = some.inside(self.likelihood)
            lost = max(lost, outside)
            index.append(rows)
            found.append(values(self.likelihood.at(kept.source), kept, rows))
        if lost:
            warn(
                f"up to {100 * lost:.2g} % of the draws of f are outside of what {self.likelihood.name} can take and "
                "are left out; link='auto' does not draw",
            )
        out = torch.cat(found)[torch.cat(index).argsort()]
        return out.reshape(*self.outputs.mean.shape[:-1], *out.shape[1:])

    @property
    def by_line(self) -> bool:
        """Whether a target's distribution is an integral over one output."""
        return self.likelihood.elementwise or self.outputs.mean.shape[-1] == 1

    # -- rows ------------------------------------------------------------------------------------------------------

    def _pieces(self, by_line: bool, sharp: bool) -> Iterator[tuple[Tensor, Nodes]]:
        mean = self.outputs.mean
        every = torch.arange(mean[..., 0].numel(), device=mean.device)
        if not (by_line and self.outputs.smooth):
            for rows in _cut(every, self.outputs.size(None)):
                yield rows, self.outputs.nodes(rows, None)
            return
        steps = self._steps if sharp or self.likelihood.classes else torch.full_like(every, LEAST_NODES)
        for count in steps.unique().tolist():
            for rows in _cut(every[steps == count], self.outputs.size(count)):
                yield rows, self.outputs.nodes(rows, count)

    @cached_property
    def _steps(self) -> Tensor:
        """Steps of a row's line in one standard deviation, (N,)."""
        each = [_sharpness(one, self.outputs) for one in self.likelihood.distinct]
        sharpness = torch.stack(torch.broadcast_tensors(*each)).amax(0)
        return fine(sharpness.reshape(self.outputs.mean[..., 0].numel(), -1).amax(-1))


def _sharpness(likelihood: Likelihood, outputs: Outputs) -> Tensor:
    """How much wider the posterior over f is than p(y|f), squared: by variances, or by the information in y where they
    are infinite; without end where the likelihood does not say."""
    if likelihood.classes:
        return STEEP * outputs.variance
    try:
        if bool(torch.isfinite(likelihood.variance(outputs.mean.double())).all()):
            return Integral(likelihood, outputs).over(_ratio, True, sharp=False)
        return outputs.variance * likelihood.hessian_root(outputs.mean).square().sum(-1)
    except Unsupported:
        return torch.full_like(outputs.mean, math.inf)


def _ratio(likelihood: Likelihood, some: Nodes, rows: Tensor) -> Tensor:
    return moments.mean_and_spread(likelihood, some)[:, 1] / moments.noise(likelihood, some)


def _cut(rows: Tensor, each: int) -> tuple[Tensor, ...]:
    """Rows with so many numbers each, in chunks."""
    return rows.split(max(1, CHUNK // each))
