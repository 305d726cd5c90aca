"""What is known of a layer of infinitely many units at two sets of inputs: second moments of one unit.

    K(x₁, x₂)   E[z(x₁) z(x₂)], over units; between positions s and t where units have positions
    Θ(x₁, x₂)   the tangent kernel of all layers so far

    cross    (n₁, n₂, *s), or (n₁, n₂, *s, *t) if all pairs of positions are kept, which pooling needs
    left     (n₁, *s) or (n₁, *s, *t): each input of the first set with itself;  right  those of the second
    means    (n₁, *s), (n₂, *s): E[z], 0 but after an activation

`paired` moments are of the n inputs of the first set each with the same of the second: cross is (n, *s). Where both
sets are the same, what is known of inputs with themselves is copied into `cross`: rounding finds no angle there.
Source: Lee et al. 2018, Jacot et al. 2018; positions as in Novak et al. 2019, Arora et al. 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import InvalidValue

Sides = tuple[Tensor, Tensor]  # of the first set of inputs, and of the second
Map = Callable[[Tensor, int], Tensor]  # of a covariance whose positions start at an axis


@dataclass(frozen=True, eq=False)
class Moments:
    """Of one layer, at two sets of inputs."""

    cross: Tensor
    left: Tensor
    right: Tensor
    means: Sides
    tangent: Tensor | None  # Θ, as cross; None where it is not asked for
    axes: int = 0  # of positions
    full: bool = False  # whether all pairs of positions are kept
    paired: bool = False
    same: bool = False  # whether both sets are one
    channels: int | None = None  # of the inputs themselves; None of a layer, which has infinitely many
    gaussian: bool = False  # whether units are normal, given the inputs: as an activation takes them

    @property
    def lead(self) -> int:
        """The first axis of positions in cross."""
        return 1 if self.paired else 2

    @property
    def variances(self) -> Sides:
        """E[z²] at each position, (n₁, *s) and (n₂, *s)."""
        return self._own(self.left), self._own(self.right)

    def _own(self, side: Tensor) -> Tensor:
        """Of each position with itself."""
        if not self.full or not self.axes:
            return side
        shape = side.shape[1 : 1 + self.axes]
        s = shape.numel()
        return side.reshape(len(side), s, s).diagonal(dim1=1, dim2=2).reshape(-1, *shape)

    def spread(self, first: Tensor, second: Tensor) -> Sides:
        """Numbers (n₁, *s) and (n₂, *s) in shapes that broadcast to cross."""
        if not self.paired:
            first, second = first.unsqueeze(1), second.unsqueeze(0)
        return self._beside(first, second, self.lead)

    def spread_own(self, side: Tensor) -> Sides:
        """Numbers (n, *s) of one set in shapes that broadcast to left or right."""
        return self._beside(side, side, 1)

    def _beside(self, first: Tensor, second: Tensor, lead: int) -> Sides:
        if not self.full:
            return first, second
        ones = (1,) * self.axes
        return first.reshape(*first.shape, *ones), second.reshape(*second.shape[:lead], *ones, *second.shape[lead:])

    def outer(self, first: Sides, second: Sides) -> tuple[Tensor, Tensor, Tensor]:
        """Products of numbers (n₁, *s) and (n₂, *s) of the inputs, in the shapes of cross, left and right."""
        a, b = self.spread(first[0], second[1])
        own = [self._beside(one, two, 1) for one, two in zip(first, second, strict=True)]
        return a * b, own[0][0] * own[0][1], own[1][0] * own[1][1]

    def mapped(self, change: Map, means: Callable[[Tensor], Tensor]) -> Moments:
        """After a linear map without weights of its own."""
        tangent = None if self.tangent is None else change(self.tangent, self.lead)
        return replace(
            self,
            cross=change(self.cross, self.lead),
            left=change(self.left, 1),
            right=change(self.right, 1),
            means=(means(self.means[0]), means(self.means[1])),
            tangent=tangent,
        )

    def weighed(self, weight: float, bias: float) -> Moments:
        """After independent weights and biases of these variances: K ↦ w K + b, Θ ↦ w Θ + K."""
        made = self.mapped(lambda k, _: weight * k + bias, torch.zeros_like)
        tangent = None if self.tangent is None else made.cross + weight * self.tangent
        return replace(made, tangent=tangent, channels=None, gaussian=True)

    def check_axes(self, axes: int, what: str) -> None:
        """Raise unless units have so many axes of positions."""
        if self.axes != axes:
            raise InvalidValue(f"{what} moves along {axes} axes of positions, and units have {self.axes} of them here")

    def check_channels(self, inputs: int | None) -> None:
        """Raise where the network's inputs are not as many as its first layer takes."""
        if self.channels is not None and inputs is not None and self.channels != inputs:
            raise InvalidValue(f"the first layer takes {inputs} inputs and got {self.channels}")

    def settled(self) -> Moments:
        """With inputs and themselves as they are known from one side."""
        if self.same and not self.paired:
            self.cross.diagonal().copy_(self.left.movedim(0, -1))
        elif self.same:
            self.cross.copy_(self.left)
        return self


def of_inputs(first: Tensor, second: Tensor, full: bool, tangent: bool, same: bool, paired: bool) -> Moments:
    """Those of inputs (n, c) or (n, c, *positions), the mean over c: both sets are one where `same`."""
    axes, c = first.ndim - 2, first.shape[1]
    full = full and axes > 0
    across, own = _products(axes, full, paired), _products(axes, full, True)
    cross = across(first, second) / c
    left = own(first, first) / c
    right = left if same else own(second, second) / c
    means = first.mean(1), second.mean(1)
    theta = torch.zeros_like(cross) if tangent else None
    return Moments(cross, left, right, means, theta, axes, full, paired, same, channels=c).settled()


def _products(axes: int, full: bool, paired: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Σ_c of all pairs of inputs, or of each with its own; of all pairs of positions, or of each with itself."""
    s, t = "pqr"[:axes], "uvw"[:axes] if full else "pqr"[:axes]
    n = "n" if paired else "m"
    return lambda a, b: torch.einsum(f"nc{s},{n}c{t}->n{'' if paired else 'm'}{s}{t if full else ''}", a, b)


def check_inputs(x: Tensor, what: str = "the inputs") -> Tensor:
    """Inputs (n, c) or (n, c, *positions) in float64."""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.ndim > 5 or not len(x) or x.is_complex():
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidValue(f"{what} of a kernel are a tensor (n, c) or (n, c, *positions), at least one; got {got}")
    x = x.detach().to(torch.float64)
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise InvalidValue(f"{what} hold {bad} NaN or infinite values; clean them first")
    return x
