"""A mixture of posteriors: one of several, k with probability w_k. They may be of different networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue, Unsupported
from lapwing.outputs import Blend
from lapwing.posterior.base import Posterior
from lapwing.posterior.process import Process
from lapwing.tangent import TangentModel


@dataclass(frozen=True, eq=False)
class Mixture:
    """Posteriors with log-weights (k,)."""

    members: tuple[Posterior, ...]
    log_weight: Tensor

    @property
    def tangent(self) -> TangentModel:
        """The first member's network."""
        return self.members[0].tangent

    def outputs(self, x: Any, joint: bool = False) -> Blend:
        """Those of the members, as a mixture."""
        return Blend(tuple(one.outputs(x, joint) for one in self.members), self.log_weight)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n weight vectors, (n, p), each of a member that is drawn by its weight."""
        n, generator = given.whole(n, "the number of draws"), given.generator(generator)
        shapes = [one.tangent.layout.shapes for one in self.members]
        if any(shape != shapes[0] for shape in shapes):
            raise Unsupported("members of this mixture have different weights, which no one vector holds; draw of each")
        if any(isinstance(one, Process) for one in self.members):
            raise Unsupported("a member of this mixture draws functions, not weights; draw of each")
        pick = torch.multinomial(self.log_weight.exp().to(generator.device), n, True, generator=generator).cpu()
        rows = [one.draw(int((pick == k).sum()), generator) for k, one in enumerate(self.members)]
        return torch.cat(rows)[pick.argsort(stable=True).argsort()]

    def __str__(self) -> str:
        return f"a mixture of {len(self.members)}"


def log_weights(weights: Any, k: int) -> Tensor:
    """Log-weights (k,) that sum to one, from "uniform" or k numbers that are not negative."""
    if isinstance(weights, str) and weights == "uniform":
        return torch.full((k,), 1 / k, dtype=torch.float64).log()
    if isinstance(weights, Tensor) or (isinstance(weights, Sequence) and not isinstance(weights, str)):
        w = given.real(weights, "the weights of a mixture")
        if w.shape == (k,) and bool((w >= 0).all()) and bool(torch.isfinite(w).all()) and bool(w.sum() > 0):
            return (w / w.sum()).log()
    raise InvalidValue(
        f"weights must be 'uniform', 'stacked', 'evidence' or {k} numbers that are not negative, got {weights!r}"
    )
