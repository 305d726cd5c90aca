"""A Gaussian over the selected weights of a tangent model: θ ~ N(v̄, M⁻¹). One class; its structure is its operator's.

    f(x) ~ N(f(x, θ*), J(x) M⁻¹ J(x)ᵀ)            about the network's outputs, or about h(x, v̄) = f + J (v̄ − θ*)

Outputs that are too many for covariances are draws f + J z, one jvp each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing import given, tree
from lapwing.curvature import Part
from lapwing.curvature.capture import Capture
from lapwing.curvature.cover import cover
from lapwing.curvature.memory import physical_memory
from lapwing.distributed import ALONE
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import linalg
from lapwing.outputs import WIDE, Normal, Outputs, Spread
from lapwing.posterior.base import check_inputs
from lapwing.push import At, graphed, push, pushed
from lapwing.tangent import TangentModel
from lapwing.tangent.graph import asked, graph_where_asked
from lapwing.tree import Layout

AT_ONCE = 8  # weight vectors drawn at a time
MOST = 4096  # outputs at all positions past which predictions are draws, unless only a head is Bayesian


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, precision⁻¹) over the selected weights."""

    tangent: TangentModel
    mean: Tensor  # (p,), float64
    precision: Any  # operator, G + A
    parts: tuple[Part, ...] = ()  # of a precision that is cut into parts
    memory_budget: int = 2**30  # bytes, of predictions

    @property
    def layout(self) -> Layout:
        """Of the selected weights."""
        return self.tangent.layout

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n weight vectors, (n, p); without a generator, those that predictions are made from, where some are kept."""
        n = given.whole(n, "the number of draws")
        kept = linalg.kept_draws(self.precision, n) if generator is None else None
        return self.mean + (linalg.draw(self.precision, n, given.generator(generator)) if kept is None else kept)

    def covariance(self, rows: Any) -> Tensor:
        """J Σ Jᵀ for rows (n, c, p) in named_parameters() order, (n, c, c)."""
        rows = rows.to(torch.float64) if isinstance(rows, Tensor) else rows
        return linalg.covariance(self.precision, rows)

    @property
    def jitter(self) -> float:
        """What the factorizations so far had to add to the diagonal (0 unless a warning said so)."""
        return linalg.jitter(self.precision)

    @graph_where_asked
    def outputs(
        self,
        x: Any,
        joint: bool = False,
        *,
        center: Tensor | None = None,
        samples: int = 64,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        """About f(x), or about h(x, v̄) where a center v̄ (p,) is given; samples: draws, of outputs that are many. With a
        graph to inputs that require grad, if gradients are on."""
        samples, budget = given.whole(samples, "samples", 1), given.memory(self.memory_budget)
        ranks = getattr(self.precision, "ranks", ALONE)
        with ranks.sharing_errors("reading the inputs"):
            check_inputs(x)
        if not joint and not linalg.by_samples(self.precision) and _too_many(self.tangent, x):
            out: Outputs = self._drawn(x, samples, generator)
        else:
            way = graphed if asked(x) else push
            out = way(self.precision, At(self.tangent, x, joint, budget, self.parts))
            out = _rounded(out) if isinstance(out, Normal) else out
        return out if center is None else out.moved(self._away(center, x))

    def _away(self, center: Tensor, x: Any) -> Tensor:
        """J(x)(v̄ − θ*)."""
        return pushed(self.tangent, (center - self.tangent.theta.to(center)).unsqueeze(0), x)[1][0]

    def _drawn(self, x: Any, samples: int, generator: torch.Generator | None) -> Spread:
        """f + J z for draws z of the posterior about its mean: one jvp a draw, whatever the number of outputs."""
        if asked(x):
            raise Unsupported(
                "so many outputs are predicted by draws, which keep no graph to the inputs; give inputs that require "
                "no grad, or pick some outputs with forward="
            )
        f = wide(self.tangent(x))
        size, limit = samples * f.numel() * f.element_size(), physical_memory() // 4
        if size > limit:
            raise InvalidValue(
                f"{samples} draws of {tuple(f.shape)} outputs are {size / 1e9:.3g} GB, more than a quarter of the "
                "memory; predict fewer inputs at once, or give samples= fewer"
            )
        generator = generator or torch.Generator().manual_seed(0)
        draws = f.new_empty(samples, *f.shape)
        for start in range(0, samples, AT_ONCE):  # so few weight vectors are held at a time
            some = draws[start : start + AT_ONCE]
            some.copy_(self.tangent.jvps(x, self.draw(len(some), generator) - self.mean)[1])
        return Spread(draws.add_(f), f, samples=samples)


def wide(f: Tensor) -> Tensor:
    """In float32 or better."""
    return f.to(torch.promote_types(f.dtype, torch.float32))


def _rounded(out: Normal) -> Normal:
    """With a covariance in the precision of the outputs, float32 or better."""
    mean = wide(out.mean)
    return replace(out, mean=mean, covariance=out.covariance.to(mean))


def _too_many(tangent: TangentModel, x: Any) -> bool:
    """Whether covariances cost too much: outputs too many, or positions, each of which takes backward passes through
    the whole network. A head's own term takes none."""
    positions, c = tangent.output_shape(x)
    if c > WIDE or positions * c <= MOST:
        return c > WIDE
    live = [part for part in cover(tangent, x) if part.kind != "unused"]
    one = tree.rows_of(x, slice(0, 1)) if tangent.separable(x) else x
    record = Capture(tangent, tuple(live)).run(one)
    return any(part.generic or not record.is_output(part) for part in live)
