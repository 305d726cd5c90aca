"""A mixture of distributions over f: part k with weight w_k.

μ = Σ_k w_k μ_k,   V = Σ_k w_k (V_k + (μ_k − μ)(μ_k − μ)ᵀ)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.outputs import nodes
from lapwing.outputs.base import Outputs
from lapwing.outputs.nodes import Nodes


@dataclass(frozen=True, eq=False)
class Blend:
    """Several distributions at the same inputs, with log-weights (k,)."""

    normal: ClassVar[bool] = False
    samples: ClassVar[int | None] = None
    members: tuple[Outputs, ...]
    log_weight: Tensor

    def __post_init__(self) -> None:
        shapes = {tuple(one.mean.shape) for one in self.members}
        joints = {one.joint for one in self.members}
        if len(shapes) != 1 or len(joints) != 1 or len(self.members) != len(self.log_weight):
            raise InvalidValue(
                f"a mixture is of outputs of one shape, each with a weight; got {len(self.log_weight)} weights for "
                f"outputs of shapes {sorted(shapes)}"
            )

    @property
    def joint(self) -> bool:
        """Whether inputs are predicted together."""
        return self.members[0].joint

    @property
    def smooth(self) -> bool:
        """Where every part is."""
        return all(one.smooth for one in self.members)

    @cached_property
    def mean(self) -> Tensor:
        """(n, ..., c)."""
        return self._average([one.mean for one in self.members])

    @property
    def variance(self) -> Tensor:
        """(n, ..., c)."""
        return self._average([one.variance + (one.mean - self.mean).square() for one in self.members])

    @property
    def covariance(self) -> Tensor:
        """(n, ..., c, c), or (n, ..., c, n, ..., c) if joint."""
        return self._covariance(self.joint)

    @property
    def marginal(self) -> Tensor:
        """The covariance of each input's outputs, (n, ..., c, c)."""
        return self._covariance(False)

    @property
    def sources(self) -> int:
        """Those of its parts."""
        return sum(one.sources for one in self.members)

    @property
    def parts(self) -> tuple[tuple[float, Outputs], ...]:
        """Its parts, those of mixtures among them taken apart too."""
        found = zip(self.log_weight.tolist(), self.members, strict=True)
        return tuple((w + inner, part) for w, one in found for inner, part in one.parts)

    def size(self, steps: int | None) -> int:
        """Numbers in the nodes of one row."""
        return sum(one.size(steps) for one in self.members)

    def nodes(self, rows: Tensor, steps: int | None) -> Nodes:
        """Those of all parts, with the parts' weights."""
        found = [one.nodes(rows, steps) for one in self.members]
        return nodes.joined(found, self.log_weight, [one.sources for one in self.members])

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n draws, each of a part that is drawn by its weight."""
        pick = torch.multinomial(self.log_weight.exp().to(generator.device), n, True, generator=generator).cpu()
        f = self.mean.new_empty(n, *self.mean.shape)
        source, start = torch.zeros(n, dtype=torch.long), 0
        for k, one in enumerate(self.members):
            mine = (pick == k).nonzero().squeeze(-1)
            drawn, inner = one.sample(len(mine), generator) if len(mine) else (f[:0], None)
            f[mine] = drawn
            source[mine] = start if inner is None else start + inner.cpu()
            start += one.sources
        return f, source

    def scaled(self, t: float) -> Blend:
        """About the common mean: parts move towards it as they narrow."""
        away = [(t**0.5 - 1) * (one.mean - self.mean) for one in self.members]
        return self._with(tuple(one.scaled(t).moved(by) for one, by in zip(self.members, away, strict=True)))

    def moved(self, by: Tensor) -> Blend:
        """With all parts moved."""
        return self._with(tuple(one.moved(by) for one in self.members))

    def __getitem__(self, index: slice) -> Blend:
        return self._with(tuple(one[index] for one in self.members))

    def followed_by(self, others: Sequence[Blend]) -> Blend:
        """At more inputs, part by part."""
        members = zip(*(one.members for one in (self, *others)), strict=True)
        return self._with(tuple(first.followed_by(rest) for first, *rest in members))

    def __str__(self) -> str:
        return f"a mixture of {len(self.members)}"

    def _with(self, members: tuple[Outputs, ...]) -> Blend:
        return replace(self, members=members)

    def _average(self, values: list[Tensor]) -> Tensor:
        w = self.log_weight.exp().to(values[0])
        return torch.tensordot(w, torch.stack(values), 1)

    def _covariance(self, joint: bool) -> Tensor:
        away = [one.mean - self.mean for one in self.members]
        outer = [torch.tensordot(a, a, 0) if joint else a.unsqueeze(-1) * a.unsqueeze(-2) for a in away]
        own = [one.covariance if joint else one.marginal for one in self.members]
        return self._average([c + o for c, o in zip(own, outer, strict=True)])
