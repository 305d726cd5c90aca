"""How each layer changes the moments of an infinitely wide network; w and b are the variances of weights and biases.

    Affine       K ↦ w K + b                             Θ ↦ K' + w Θ
    Act          K ↦ E[φφ]                               Θ ↦ Θ ⊙ E[φ'φ']
    LayerNorm    K ↦ (K − m mᵀ)/√((v₁ + ε)(v₂ + ε))       Θ ↦ Θ/√((v₁ + ε)(v₂ + ε)), v over units and positions
    BranchSum    K ↦ K_a + K_b + m_a m_bᵀ + m_b m_aᵀ      Θ ↦ Θ_a + Θ_b, of two branches with weights of their own

A layer norm takes mean and variance over infinitely many units, so they are no longer random, and its scale is 1.
Weights are N(0, w / fan_in). An activation needs units that are normal: those of Affine or Conv, or what pools,
normalizes or adds those. Convolutions and pools are in `positions.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.gp.infinite.activations import Activation
from lapwing.gp.infinite.moments import Moments


class Layer(Protocol):
    """What a kernel asks of a layer."""

    @property
    def pools(self) -> bool:
        """Whether it needs all pairs of positions."""

    @property
    def weighs(self) -> bool:
        """Whether it has weights."""

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """The moments after it."""


@dataclass(frozen=True)
class Affine:
    """A linear layer; `inputs`, where known, is what the first one must be given."""

    pools: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    inputs: int | None = None
    bias: bool = True

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """K ↦ w K + b."""
        if moments.axes:
            raise Unsupported(
                f"a linear layer takes units without positions, and these have {moments.axes} axes of them; flatten or "
                "pool first"
            )
        moments.check_channels(self.inputs)
        return moments.weighed(w, b * self.bias)


@dataclass(frozen=True)
class Act:
    """An activation φ of each unit."""

    pools: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    phi: Activation

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """K ↦ E[φφ], Θ ↦ Θ ⊙ E[φ'φ']."""
        if not moments.gaussian:
            raise Unsupported(
                "an activation has a rule for units that are normal, as those of a linear layer or a convolution are; "
                "put one before it, and Flatten after it"
            )
        q = moments.variances
        both = moments.spread(*q)
        theta = moments.tangent
        left, right = (
            self.phi.second(*moments.spread_own(v), side)
            for v, side in zip(q, (moments.left, moments.right), strict=True)
        )
        return replace(
            moments,
            cross=self.phi.second(*both, moments.cross),
            left=left,
            right=right,
            means=(self.phi.mean(q[0]), self.phi.mean(q[1])),
            tangent=None if theta is None else theta * self.phi.slope(*both, moments.cross),
            gaussian=False,
        )


@dataclass(frozen=True)
class LayerNorm:
    """Units at all positions of an input shifted to mean 0 and scaled to variance 1; `axes` of them, where known."""

    pools: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    eps: float = 1e-5
    axes: int | None = None

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """K ↦ (K − m mᵀ)/√((v₁ + ε)(v₂ + ε)), and with positions + (m − m̄)(m − m̄)ᵀ, m̄ the mean of m over them."""
        if self.axes is not None:
            moments.check_axes(self.axes, "this layer norm")
        (m1, s1), (m2, s2) = (self._side(m, q) for m, q in zip(moments.means, moments.variances, strict=True))
        squares, moved = moments.outer(moments.means, moments.means), moments.outer((m1, m2), (m1, m2))
        scales, known = moments.outer((s1, s2), (s1, s2)), (moments.cross, moments.left, moments.right)
        made = [(k - mm + dd) * s for k, mm, dd, s in zip(known, squares, moved, scales, strict=True)]
        return replace(
            moments,
            cross=made[0],
            left=made[1],
            right=made[2],
            means=(m1 * s1, m2 * s2),
            tangent=None if moments.tangent is None else moments.tangent * scales[0],
        )

    def _side(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """m − m̄ (n, *s) and 1/√(v + ε) (n, 1, ...)."""
        shape = (-1, *(1,) * (mean.ndim - 1))
        center, second = (side.reshape(len(side), -1).mean(1) for side in (mean, variance))
        return mean - center.reshape(shape), (second - center.square() + self.eps).rsqrt().reshape(shape)


@dataclass(frozen=True)
class BranchSum:
    """The sum of a branch and a shortcut, independent as the branch has weights; no shortcut is the identity."""

    branch: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        if not self.weighs:
            raise Unsupported(
                "the branch of a residual block has no weights, so it depends on what it is added to, and their sum "
                "has no rule; give it a linear layer or a convolution"
            )

    @property
    def pools(self) -> bool:
        """Whether a layer inside does."""
        return any(layer.pools for layer in (*self.branch, *self.shortcut))

    @property
    def weighs(self) -> bool:
        """Whether a layer of the branch does."""
        return any(layer.weighs for layer in self.branch)

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """K ↦ K_a + K_b + m_a m_bᵀ + m_b m_aᵀ."""
        one, two = run(self.shortcut, moments, w, b), run(self.branch, moments, w, b)
        if one.channels is not None:
            raise Unsupported(
                f"a residual block adds its {one.channels} inputs themselves to infinitely many units; put a linear "
                "layer or a convolution before it"
            )
        if one.cross.shape != two.cross.shape:
            shapes = tuple(one.cross.shape[one.lead :]), tuple(two.cross.shape[two.lead :])
            raise InvalidValue(f"a residual block adds positions {shapes[1]} to {shapes[0]}; give a shortcut that fits")
        mixed = zip(one.outer(one.means, two.means), one.outer(two.means, one.means), strict=True)
        cross, left, right = (a + b for a, b in mixed)
        return replace(
            one,
            cross=one.cross + two.cross + cross,
            left=one.left + two.left + left,
            right=one.right + two.right + right,
            means=(one.means[0] + two.means[0], one.means[1] + two.means[1]),
            tangent=None if one.tangent is None or two.tangent is None else one.tangent + two.tangent,
            gaussian=one.gaussian and two.gaussian,
        )


def run(layers: Sequence[Layer], moments: Moments, w: float, b: float) -> Moments:
    """The moments after all layers."""
    for layer in layers:
        moments = layer(moments, w, b).settled()
    return moments
