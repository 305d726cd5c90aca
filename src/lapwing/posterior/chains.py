"""Draws of a sampler's chains: particles that know which chain they are of, and what it told of each.

Particles are in order, all of the first chain, then all of the second. A chain that was stopped is shorter; one that
was stopped before its first draw has the length 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.posterior.base import register
from lapwing.posterior.diagnostics import Diagnostics, inference_data
from lapwing.posterior.particles import Particles


@register
@dataclass(frozen=True, eq=False)
class Chains(Particles):
    """`weights` (s, p) of chains of these `lengths`; `told` {name: (s,)} and `latent` {name: (s, ...)} of each draw."""

    lengths: tuple[int, ...] = ()
    told: dict[str, Tensor] = field(default_factory=dict)  # acceptance, energy, ...; never written to
    latent: dict[str, Tensor] = field(default_factory=dict)  # a noise, scales, sampled with the weights; as above

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [k for k, v in {**self.told, **self.latent}.items() if len(v) != len(self.weights)]
        if sum(self.lengths) != len(self.weights) or min(self.lengths, default=0) < 0 or wrong:
            raise InvalidValue(f"{len(self.weights)} draws of chains of lengths {self.lengths}; not as many: {wrong}")

    def by_chain(self, values: Tensor) -> Tensor:
        """Values of all draws (s, ...) as (k, length, ...), of the chains that ran to the end."""
        longest = max(self.lengths)
        return torch.stack([part for part in values.split(list(self.lengths)) if len(part) == longest])

    @property
    def diagnostics(self) -> Diagnostics:
        """Whether the chains have found the same distribution, and how many draws theirs are worth."""
        return Diagnostics(self)

    def to_arviz(self) -> Any:
        """An arviz.InferenceData of weights by parameter, of what was sampled with them, and of what was told."""
        return inference_data(self)

    def __str__(self) -> str:
        longest = max(self.lengths)
        short = sum(n < longest for n in self.lengths)
        stopped = f", {short} of them stopped early" if short else ""
        return f"{len(self.lengths)} chains of {longest:,} draws{stopped}"
