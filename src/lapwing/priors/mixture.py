"""Spike and slab, a mixture of two normals about zero:  p(w) = (1 − π) N(w; 0, s₀²) + π N(w; 0, s₁²).

    E[1/s | w] = r₀(w)/s₀² + r₁(w)/s₁²,        r_k(w) the probability that w is of component k

A narrow spike s₀ makes a weight all but zero, the slab s₁ leaves it alone (George & McCulloch 1993; Blundell et al.
2015).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.errors import InvalidValue
from lapwing.priors.elementwise import Elementwise, standard_normal, uniform


@dataclass(frozen=True, eq=False)
class Mixture(Elementwise):
    """Standard deviations of spike and slab and the share of the slab, for all weights or for each group."""

    spike: Any = 0.01  # s₀
    slab: Any = 1.0  # s₁
    share: Any = 0.5  # π, of the slab
    per: Any = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool((self.share < 1).all()):
            raise InvalidValue(f"share is the slab's probability, between 0 and 1, got {self.share.tolist()}")

    def _each_component(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """log π_k N(w; 0, s_k²) of both components and their 1/s_k², (2, p)."""
        share = self.each(self.share)
        s = torch.stack([self.each(self.spike), self.each(self.slab)])
        log_share = torch.stack([torch.log1p(-share), share.log()])
        return log_share - s.log() - 0.5 * ((w / s).square() + math.log(2 * math.pi)), s**-2

    def each_log_prob(self, w: Tensor) -> Tensor:
        return torch.logsumexp(self._each_component(w)[0], 0)

    def each_precision(self, w: Tensor) -> Tensor:
        log_joint, precision = self._each_component(w)
        return (log_joint.softmax(0) * precision).sum(0)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        spike, slab, share = (self.each(value).detach() for value in (self.spike, self.slab, self.share))
        wide = uniform((n, len(share)), generator, share) < share
        return torch.where(wide, slab, spike) * standard_normal((n, len(share)), generator, share)

    def coordinates(self) -> dict[str, Tensor]:
        """Logarithms, and the logit of the share."""
        return {**super().coordinates(), "share": self.share.detach().reshape(-1).logit()}

    def moved(self, coordinates: Mapping[str, Tensor]) -> Mixture:
        own = {"share": logsigmoid(coordinates["share"])} if "share" in coordinates else {}
        return super().moved({**coordinates, **own})

    def scaled(self, c: float) -> Mixture:
        return self.replace(spike=self.spike.detach() / c**0.5, slab=self.slab.detach() / c**0.5)
