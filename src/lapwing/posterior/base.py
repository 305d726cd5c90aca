"""What a posterior must offer, whatever it is made of: the outputs that it predicts at inputs, and draws."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lapwing import registry, tree
from lapwing.data import check_finite
from lapwing.errors import InvalidValue
from lapwing.outputs import Outputs
from lapwing.tangent import TangentModel

P = TypeVar("P")


class Posterior(Protocol):
    """A belief about a network after it has seen data. Where it has an evidence, `log_evidence()` too."""

    @property
    def tangent(self) -> TangentModel:
        """The network as a function of its selected weights."""

    def outputs(self, x: Any, joint: bool = False) -> Outputs:
        """The network's outputs at inputs, each by itself, or all together."""

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n weight vectors (n, p); of a Process, weights of its features (n, k)."""


def register(cls: type[P]) -> type[P]:
    """Let files name a class of posteriors, a dataclass whose class variable `unsaved` names what belongs to a network;
    as a decorator, above @dataclass."""
    registry.enter("posterior", cls)
    return cls


def check_inputs(x: Any) -> None:
    """Raise unless there are inputs to predict at, all finite."""
    check_finite(x, "the inputs")
    if any(t.ndim and not len(t) for t in tree.tensors(x)):
        raise InvalidValue("the inputs hold no example to predict at; give at least one")
