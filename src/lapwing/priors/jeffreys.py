"""Jeffreys' prior of a scale, p(w) ∝ 1/|w|: it does not know the unit of a weight, and shrinks small ones to zero.

    log p(w) = −½ log(w² + f²),        E[1/s | w] = 1/(w² + f²)

At w = 0 both are infinite without the floor f, a number in the unit of the weights; `repr` tells it. The density has no
integral: there is a MAP and a local Gaussian, and no draws, no evidence and no posterior to sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue, Unsupported
from lapwing.priors.base import Prior
from lapwing.priors.elementwise import Elementwise


@dataclass(frozen=True, eq=False)
class Jeffreys(Elementwise):
    """p(w) ∝ 1/√(w² + f²), for MAP training (`penalty`) and, by its local Gaussian, for `lw.laplace`."""

    settings: ClassVar[tuple[str, ...]] = (*Prior.settings, "floor")
    proper: ClassVar[bool] = False
    floor: float = 1e-6  # f
    per: Any = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        floor = given.real(self.floor, "floor")
        if floor.ndim or not 0 < float(floor) < math.inf:
            raise InvalidValue(
                f"floor is one positive number, in the unit of the weights, got {floor.tolist()}; without one a weight "
                "of 0 has an infinite precision"
            )
        object.__setattr__(self, "floor", float(floor))

    def each_log_prob(self, w: Tensor) -> Tensor:
        """−½ log(w² + f²): a density but for a constant that there is not."""
        return -0.5 * (w.square() + self.floor**2).log()

    def each_precision(self, w: Tensor) -> Tensor:
        return 1 / (w.square() + self.floor**2)

    def price(self, v: Tensor) -> Tensor:
        """None: an improper prior has no evidence."""
        raise Unsupported(
            "Jeffreys is improper: its density has no integral, so there is no evidence to tune or compare by; use "
            "lw.priors.StudentT, which is near it for small df, or compare on held-out data"
        )

    @property
    def kind(self) -> str:
        """With its floor."""
        return f"Jeffreys with the floor {self.floor:g}"
