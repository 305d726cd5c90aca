"""A loader as laplace-torch reads it: batches (X, y), or mappings that the network is given whole, their targets too.

The network is called as `model(x)`, on a mapping of the class that the loader gave (a UserDict, a BatchEncoding). What
the loader gives is taken as it is: random augmentation is not refused, as it is by `lapwing.laplace`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lapwing import tree
from lapwing.curvature.accumulate import PROBE_EXAMPLES
from lapwing.curvature.structure import Probe
from lapwing.data import ReadAsTheyCome
from lapwing.errors import InvalidValue
from lapwing.tangent import TangentModel


@dataclass(eq=False)
class Batches(ReadAsTheyCome):
    """Pairs (inputs, targets) of a loader."""

    loader: Any
    target_key: str
    begun: Iterator[Any] | None = None  # a pass of which the first batch was looked at

    def first(self) -> tuple[Any, Any]:
        """The first batch, which the next pass gives again without another read."""
        rest = iter(self.loader)
        batch = next(rest, None)
        if batch is None:
            raise InvalidValue("the data hold no batch; give at least one example")
        self.begun = itertools.chain([batch], rest)
        return self.split(batch)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        batches, self.begun = self.begun or self.loader, None
        return (self.split(batch) for batch in batches)

    def __len__(self) -> int:
        return len(self.loader)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The inputs of a batch, whole, and its targets."""
        if isinstance(batch, Mapping):
            return batch, batch[self.target_key]
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InvalidValue(
                f"a batch must be (X, y) or a mapping with {self.target_key!r}; got {type(batch).__name__}"
            )
        return batch[0], batch[1]

    @property
    def count(self) -> int:
        """The number of examples, as the loader's dataset says."""
        dataset = getattr(self.loader, "dataset", None)
        if not isinstance(dataset, Sized):
            raise InvalidValue(
                "the loader has no dataset that tells its length; give a DataLoader over a map-style dataset"
            )
        return len(dataset)


def caller(inputs: Any) -> Callable[[nn.Module, Any], Tensor] | None:
    """How the network is called on a mapping: with one of the class that the inputs have; None for other inputs."""
    if not isinstance(inputs, Mapping):
        return None
    kind: Any = type(inputs)
    return lambda model, x: model(x if isinstance(x, kind) else kind(x))


def probed(tangent: TangentModel, x: Any, n: int) -> Probe:
    """What a pass needs to know of a problem, from the inputs of its first batch."""
    some = tree.rows_of(x, slice(0, PROBE_EXAMPLES)) if tangent.separable(x) else x
    return Probe(n, *tangent.output_shape(some), tangent.layout.size, some)
