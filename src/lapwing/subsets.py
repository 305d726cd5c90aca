"""Subnetworks: k single weights that are Bayesian, the others held at their trained values.

random               k weights, uniformly
largest_magnitude    the k largest |θ_i|
largest_variance     the k largest marginal variances: of a diagonal posterior, or along a training run (`Swag`)

Each returns {parameter: bool mask}, which `subset=` takes. The posterior over a subnetwork S has the precision
H_SS + A_SS, and the other weights have no variance; the larger the variances of S, the less is left out (Daxberger et
al., ICML 2021). Only parameters that require grad are chosen from; of equal weights the first in named_parameters()
order wins. k is a number of weights (an int) or a share of them (a float in (0, 1], rounded, at least one weight).
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from lapwing import given
from lapwing.api import Laplace
from lapwing.errors import InvalidValue, warn
from lapwing.operators import linalg
from lapwing.posterior import prior_precision
from lapwing.tangent.subset import compiled, masks_of, trainable
from lapwing.tree import Layout

__all__ = ["Swag", "largest_magnitude", "largest_variance", "random"]


def random(model: nn.Module, k: int | float, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """k weights drawn without replacement; generator=None means a private one with seed 0."""
    layout = trainable(model)
    generator = given.generator(generator)
    order = torch.randperm(layout.size, generator=generator, device=generator.device).cpu()
    return _first(order, k, layout)


def largest_magnitude(model: nn.Module, k: int | float) -> dict[str, Tensor]:
    """The k weights of largest absolute value."""
    layout = trainable(model)
    return _largest(layout.gather(_weights(model, layout)).abs(), k, layout)


def largest_variance(source: Laplace | Swag, k: int | float) -> dict[str, Tensor]:
    """The k weights of largest marginal variance: that of a posterior fitted with structure="diag" (tuned or not),
    among the weights it is over; or that along a training run, seen by a `Swag`.

    A weight without curvature (a dead unit's) has the variance of its prior, the largest there is under one prior
    precision, and yet no effect at the training inputs. A warning says how many of those were chosen.
    """
    if isinstance(source, Swag):
        return _largest(source.variance(), k, source.layout)
    if not isinstance(source, Laplace):
        raise InvalidValue(f"largest_variance reads a Laplace or a Swag object, got {type(source).__name__}")
    if not source.state.structure.diagonal:
        raise InvalidValue(f"largest_variance reads a fit with structure='diag', got '{source.state.structure}'")
    layout, precision = source.state.layout, linalg.diagonal(source.posterior.precision)
    masks = _largest(1 / precision, k, layout)
    dead = layout.unflatten(precision == prior_precision(source.prior, source.state).dense())
    count = sum(int((dead[n] & _selected(m, layout, n)).sum()) for n, m in masks.items())
    if count:
        warn(
            f"{count} of the {sum(int(m.sum()) for m in masks.values())} weights chosen by variance have no curvature: "
            "the data say nothing of them, so their variance is the prior's; fit with a subset= without dead units, or "
            "choose by magnitude",
        )
    return masks


class Swag:
    """The running mean and variance of each weight over snapshots of a training run: the diagonal of SWAG. With a rank,
    also the last so many snapshots about the mean of those before them, which `lw.ensembles.swag` draws from.

    swag = lw.subsets.Swag(model)
    for epoch in ...:       # late in the run, at a constant rate
        ...                 # train as always
        swag.update()
    """

    def __init__(self, model: nn.Module, rank: int = 0) -> None:
        self.model, self.layout, self.snapshots = model, trainable(model), 0
        self._away: deque[Tensor] = deque(maxlen=given.whole(rank, "the rank"))
        weights = self.layout.gather(_weights(model, self.layout))
        self.mean = torch.zeros_like(weights, dtype=torch.float64)
        self._squares = torch.zeros_like(self.mean)  # Σ (θ − mean)²

    def update(self) -> None:
        """Take in the model's weights as they are now."""
        if not trainable(self.model).same_as(self.layout):
            raise InvalidValue("the model has other trainable parameters than when Swag was made; make a new one")
        theta = self.layout.gather(_weights(self.model, self.layout)).to(self.mean)
        if not bool(torch.isfinite(theta).all()):
            raise InvalidValue("the weights hold NaN or infinite values; the training run has diverged")
        self.snapshots += 1
        away = theta - self.mean
        self.mean += away / self.snapshots  # Welford: E[θ²] − E[θ]² would cancel the digits that matter
        self._squares += away * (theta - self.mean)
        self._away.append(theta - self.mean)

    def variance(self) -> Tensor:
        """Of each weight over the snapshots, (p,), in named_parameters() order."""
        if self.snapshots < 2:
            raise InvalidValue(f"a variance needs at least 2 snapshots, Swag has {self.snapshots}; call update()")
        return self._squares / self.snapshots

    def deviations(self) -> Tensor:
        """Of the last snapshots from the running mean at each of them, (k, p), k at most the rank."""
        return torch.stack([*self._away]) if self._away else self.mean.new_empty(0, self.layout.size)


def _weights(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    named = dict((model._orig_mod if compiled(model) else model).named_parameters())  # type: ignore[union-attr]
    meta = [n for n in layout.names if named[n].is_meta]
    if meta:
        raise InvalidValue(f"parameter {meta[0]} is on the meta device, which holds no values; load the weights first")
    return {n: named[n].detach() for n in layout.names}


def _selected(mask: Tensor, layout: Layout, name: str) -> Tensor:
    """A full-shaped mask as an entry of the layout."""
    return mask[layout.masks[name]] if name in layout.masks else mask


def _largest(scores: Tensor, k: int | float, layout: Layout) -> dict[str, Tensor]:
    if not bool(torch.isfinite(scores).all()):
        raise InvalidValue("weights or their variances are NaN or infinite; there is no largest among them")
    return _first(scores.to(torch.float64).argsort(descending=True, stable=True), k, layout)


def _first(order: Tensor, k: int | float, layout: Layout) -> dict[str, Tensor]:
    chosen = torch.zeros(layout.size, dtype=torch.bool, device=order.device)
    chosen[order[: _count(k, layout.size)]] = True
    return masks_of(chosen, layout)


def _count(k: int | float, size: int) -> int:
    if isinstance(k, bool) or not isinstance(k, (int, float)):
        raise InvalidValue(f"k is a number of weights (int) or a share of them (float in (0, 1]), got {k!r}")
    if isinstance(k, float):
        if not 0 < k <= 1:
            raise InvalidValue(f"k as a float is a share of the weights in (0, 1], got {k}; give a number as an int")
        return max(1, round(k * size))
    if not 1 <= k <= size:
        raise InvalidValue(f"k must be from 1 to {size}, the weights there are to choose from; got {k}")
    return k
