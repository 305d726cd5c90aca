"""One likelihood for each of several draws of the weights, alike but for their hyperparameters: a noise that was
sampled with the weights, or the noises of several posteriors.

    p(y) = Σ_s w_s p(y | f_s, σ_s)

It says what its first member says of what they have in common; `at(source)` evaluates each node of f under its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.reweighted import FACTS, answer_by_base


@dataclass(frozen=True)
class Several(Likelihood):
    """`base` with hyperparameters (s, ...), {name: one value a draw}."""

    base: Likelihood
    drawn: dict[str, Tensor]

    def __post_init__(self) -> None:
        known, counts = self.base.hyperparameters, {len(value) for value in self.drawn.values()}
        if not set(self.drawn) <= set(known) or len(counts) != 1:
            raise InvalidValue(
                f"{self.base.name} has the hyperparameters {list(known)}, each with as many values as there are draws; "
                f"got { {name: tuple(value.shape) for name, value in self.drawn.items()} }"
            )

    @staticmethod
    def of(members: Sequence[Likelihood], counts: Sequence[int]) -> Likelihood:
        """Those of several posteriors, of so many sources each; the first where they are the same."""
        kinds = {one.kind for one in members}
        if len(kinds) != 1:
            raise InvalidValue(f"their likelihoods differ: {sorted(kinds)}; fit them alike")
        each = [one.spread(count) for one, count in zip(members, counts, strict=True)]
        shapes = {k: torch.broadcast_shapes(*(one[k].shape[1:] for one in each)) for k in each[0]}
        drawn = {k: torch.cat([one[k].expand(-1, *shape) for one in each]).detach() for k, shape in shapes.items()}
        same = all(bool((value == value[0]).all()) for value in drawn.values())
        return members[0].some(0, 1) if same else Several(members[0].some(0, 1), drawn)

    def spread(self, count: int) -> dict[str, Tensor]:
        """The hyperparameters of each of so many sources: there must be as many draws."""
        fixed = {k: v.expand(len(self), *v.shape) for k, v in self.base.hyperparameters.items() if k not in self.drawn}
        return {k: self.drawn[k] if k in self.drawn else fixed[k] for k in self.base.hyperparameters}

    def __len__(self) -> int:
        return len(next(iter(self.drawn.values())))

    def member(self, i: int) -> Likelihood:
        """The likelihood of draw i."""
        return self.base.replace(**{name: value[i] for name, value in self.drawn.items()})

    def at(self, source: Tensor | None) -> Likelihood:
        """For nodes (s, ...) of these sources."""
        assert source is not None
        return PerNode(self.base, self.drawn, source)

    def some(self, start: int, stop: int) -> Likelihood:
        """Of some of the draws; of one, its own."""
        if stop - start == 1:
            return self.member(start)
        return replace(self, drawn={name: value[start:stop] for name, value in self.drawn.items()})

    @property
    def sources(self) -> int:
        """As many as draws."""
        return len(self)

    @property
    def distinct(self) -> tuple[Likelihood, ...]:
        """Its members."""
        return tuple(self.member(i) for i in range(len(self)))

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """The members', at their means over draws."""
        return {**self.base.hyperparameters, **{name: value.mean(0) for name, value in self.drawn.items()}}

    @property
    def plain(self) -> Likelihood:
        """The likelihood of new targets."""
        return replace(self, base=self.base.plain)

    def to(self, device: torch.device) -> Any:
        """The same with its tensors on a device."""
        return Several(self.base.to(device), {name: value.to(device) for name, value in self.drawn.items()})

    def cdf(self, f: Tensor, y: Tensor) -> Tensor | None:
        """That of the first member: whether there is one is all that can be asked without a source."""
        return self.member(0).cdf(f, y)


answer_by_base(Several, "outcome", *FACTS, "name", "kind", "validate", "inside", "class_probs", "class_log_prob")


@dataclass(frozen=True)
class PerNode(Several):
    """`Several` at nodes of f, whose first axis (s, ...) is theirs: node i is that of the member source[i]."""

    source: Tensor

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Of each node at its targets, y (s, n, ...)."""
        return self._each(lambda one, some: one.log_prob(f[some], y[some]))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """One y for each row of each node."""
        return self._each(lambda one, some: one.sample(f[some], generator))

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f] at each node."""
        return self._each(lambda one, some: one.mean(f[some]))

    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f] at each node."""
        return self._each(lambda one, some: one.variance(f[some]))

    def cdf(self, f: Tensor, y: Tensor) -> Tensor | None:
        """P(target ≤ y) at each node, for targets that all nodes share."""
        if self.member(0).cdf(f[:1], y) is None:
            return None
        return self._each(lambda one, some: one.cdf(f[some], y))

    def pmf(self, f: Tensor, y: Tensor) -> Tensor:
        """P(target = y) at each node, for targets that all nodes share."""
        return self._each(lambda one, some: one.pmf(f[some], y))

    def _each(self, of: Callable[[Likelihood, slice], Any]) -> Tensor:
        """Over runs of nodes of one source."""
        sources, lengths = self.source.unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0).tolist()
        found = zip(sources.tolist(), [0, *stops], stops, strict=False)
        return torch.cat([of(self.member(i), slice(start, stop)) for i, start, stop in found])
