"""Weighted draws of the weights, each run through the network itself: what samplers and ensembles give.

f(x) is f(x, θ_s) with probability w_s
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.outputs import Draws
from lapwing.posterior.base import check_inputs, register
from lapwing.posterior.gaussian import wide
from lapwing.tangent import TangentModel
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.graph import asked, graph_where_asked, no_checkpoints
from lapwing.tangent.kernels import plain_kernels


@register
@dataclass(frozen=True, eq=False)
class Particles:
    """`weights` (s, p) of the selected parameters; `log_weight` (s,), or None where they are equal."""

    unsaved: ClassVar[tuple[str, ...]] = ("tangent",)  # by a network; not in files
    tangent: TangentModel
    weights: Tensor
    log_weight: Tensor | None = None

    def __post_init__(self) -> None:
        size = self.tangent.layout.size
        if self.weights.ndim != 2 or not len(self.weights) or self.weights.shape[1] != size:
            raise InvalidValue(f"particles are weight vectors (s, {size}), got {tuple(self.weights.shape)}")
        if not bool(torch.isfinite(self.weights).all()):
            raise InvalidValue("particles hold NaN or infinite weights: the chain has diverged; take smaller steps")
        if self.log_weight is not None:
            w = given.real(self.log_weight, "log-weights")
            if w.shape != self.weights.shape[:1] or not bool((w < torch.inf).all()) or bool((w == -torch.inf).all()):
                raise InvalidValue(f"{len(self.weights)} particles need as many log-weights, got {tuple(w.shape)}")
            object.__setattr__(self, "log_weight", torch.log_softmax(w, 0))

    @graph_where_asked
    def outputs(self, x: Any, joint: bool = False) -> Draws:
        """The network's outputs at each particle."""
        check_inputs(x)
        tangent, weights = self.tangent, self.weights.to(self.tangent.dtype)
        with evaluating(tangent.model), plain_kernels(), no_checkpoints() if asked(x) else nullcontext():
            values = torch.stack([wide(tangent.apply(tangent.layout.unflatten(w), x)) for w in weights])
        return Draws(values, joint=joint, log_weight=self.log_weight)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n of the particles, (n, p), with repetition."""
        n, generator = given.whole(n, "the number of draws"), given.generator(generator)
        if not n:  # of a mixture that drew other members
            return self.weights[:0]
        equal = torch.zeros(len(self.weights), dtype=torch.float64)
        w = (equal if self.log_weight is None else self.log_weight).softmax(0).to(generator.device)
        return self.weights[torch.multinomial(w, n, True, generator=generator).to(self.weights.device)]

    def __str__(self) -> str:
        return f"{len(self.weights)} particles"
