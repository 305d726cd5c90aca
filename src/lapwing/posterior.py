"""The Gaussian posterior over the selected weights: θ ~ N(v̄, (G + A)⁻¹). One class; its structure is its operator's.

covariance of the tangent model at rows J:  J (G + A)⁻¹ Jᵀ
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.curvature import Part, State
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.operators import linalg
from lapwing.tree import Layout


@dataclass(frozen=True, eq=False)
class Gaussian:
    mean: Tensor  # (p,), float64
    precision: Any  # operator, G + A
    layout: Layout
    parts: tuple[Part, ...] = ()  # of a precision that is cut into parts

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


def curvature(state: State, likelihood: Any) -> Any:
    """G = Σ_g w_g G_g as an operator; one weight (one noise for all outputs) serves every G_g."""
    weights = likelihood.curvature_weights(state.factor.kind).to(state.tangent.device)
    return state.structure.operator(state, weights.expand(state.weights) if len(weights) == 1 else weights)


def placed(prior: Any, state: State) -> Any:
    """The prior at this state: one that looks at the curvature (the g-prior) sees it, at unit noise; others stay."""
    if not hasattr(prior, "at"):
        return prior
    with torch.no_grad():
        eps = torch.finfo(torch.promote_types(state.tangent.dtype, torch.float32)).eps
        out = prior.at(state.structure.operator(state, state.unit_weights), state.tangent.theta, eps)
    dropped = out.counts_dropped()
    if dropped and not state.memo.said_dropped:
        state.memo.said_dropped = True
        warnings.warn(
            f"the g-prior drops {sum(dropped.values())} of {state.layout.size} weights, on which no output depends "
            "over these data; they stay at their trained values without variance "
            f"(see la.coverage of {', '.join(dropped)})",
            LapwingWarning,
            stacklevel=4,
        )
    return out


def prior_precision(prior: Any, state: State, center: Tensor | None = None) -> Any:
    """A, that of the prior's local Gaussian at the trained weights, or at a center (p,)."""
    a = prior.quadratic(state.tangent.theta.to(torch.float64) if center is None else center)[0]
    if prior.gaussian:
        return a
    sound = torch.isfinite(a.dense()) & (a.dense() > 0)
    if not bool(sound.all()):
        first = next(name for name, s in state.layout.slices().items() if not bool(sound[s].all()))
        raise InvalidValue(
            f"{type(prior).__name__} has no finite, positive precision at {int((~sound).sum())} of "
            f"{state.layout.size} weights, the first in {first}: a density with a peak at 0 has an infinite one for a "
            "weight that is exactly 0; leave such weights out with subset=, or use a smooth prior"
        )
    return a


def condition(
    state: State, prior: Any, likelihood: Any, center: Tensor | None = None, temperature: float = 1.0
) -> Gaussian:
    """The posterior of the tangent model, centered at the trained weights unless told otherwise; its covariance times
    the temperature."""
    mean = state.tangent.theta.to(torch.float64) if center is None else center
    precision = linalg.shift(curvature(state, likelihood), prior_precision(prior, state, mean))
    if temperature != 1.0:
        precision = linalg.scale(precision, torch.tensor(1 / temperature, dtype=torch.float64, device=mean.device))
    return Gaussian(mean, precision, state.layout, state.parts)
