"""The kernel of an infinitely wide network, and the Gaussian process that it is before data.

    nngp   f ~ GP(0, K): the network with random weights (Neal 1996; Lee et al. 2018)
    ntk    Θ = J Jᵀ of its start, the kernel that gradient descent moves along (Jacot et al. 2018)

each over weights N(0, w / fan_in) and biases N(0, b), in the parameters in which those are N(0, 1). Blocks of inputs
are run through the layers one pair at a time; where both sets are one, each pair once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue, Unsupported
from lapwing.gp.infinite.activations import CLOSED, Activation
from lapwing.gp.infinite.layers import Act, Affine, Layer, run
from lapwing.gp.infinite.moments import Moments, check_inputs, of_inputs
from lapwing.gp.infinite.quadrature import integrated
from lapwing.operators.linalg import standard_normal
from lapwing.outputs.points import psd_root

ENTRIES = 2**20  # of a covariance, that are made at once
KINDS = "nngp", "ntk"


@dataclass(frozen=True)
class Kernel:
    """k(x₁, x₂) of one output; outputs are independent, and alike. Frozen."""

    layers: tuple[Layer, ...]
    kind: str = "nngp"
    weight_variance: float = 2.0  # w
    bias_variance: float = 0.0  # b

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidValue(f"kind must be one of {KINDS}, got {self.kind!r}")
        for name, least in (("weight_variance", "above"), ("bias_variance", "at or above")):
            value = given.real(getattr(self, name), name)
            if value.ndim or not math.isfinite(value) or value < 0 or (least == "above" and value == 0):
                raise InvalidValue(f"{name} is one finite number {least} 0, got {value.tolist()}")
            object.__setattr__(self, name, float(value))

    def replace(self, weight_variance: float | None = None, bias_variance: float | None = None) -> Kernel:
        """The same layers under other variances."""
        w, b = self.weight_variance, self.bias_variance
        return replace(
            self,
            weight_variance=w if weight_variance is None else weight_variance,
            bias_variance=b if bias_variance is None else bias_variance,
        )

    @torch.no_grad()
    def __call__(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """k (n₁, n₂) in float64, between inputs (n, c) or (n, c, *positions); x2=None is x1."""
        first = check_inputs(x1)
        second = first if x2 is None else check_inputs(x2)
        out = first.new_empty(len(first), len(second))
        for i, j in self._pairs(first, second, x2 is None):
            same = x2 is None and i == j
            block = self.between(first[i], second[j], same)
            out[i, j] = block.tril() + block.tril(-1).mT if same else block
            if x2 is None and i != j:
                out[j, i] = block.mT
        return out

    @torch.no_grad()
    def diagonal(self, x: Tensor) -> Tensor:
        """k(x, x) of each input with itself, (n,)."""
        x = check_inputs(x)
        step = max(1, ENTRIES // self._each(x))
        return torch.cat([self.between(some, some, same=True, paired=True) for some in x.split(step)])

    def between(self, first: Tensor, second: Tensor, same: bool, paired: bool = False) -> Tensor:
        """k (n₁, n₂), or (n,) of pairs, in one piece."""
        if first.shape[1:] != second.shape[1:]:
            raise InvalidValue(f"inputs are {tuple(first.shape[1:])} each, and others {tuple(second.shape[1:])}")
        start = of_inputs(first, second, self._full, self.kind == "ntk", same, paired)
        found = run(self.layers, start, self.weight_variance, self.bias_variance)
        return _output(found)

    @torch.no_grad()
    def draw(self, x: Tensor, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """n functions of the process at inputs, before data: (n, inputs) in float64."""
        n, generator = given.whole(n, "the number of functions", 1), given.generator(generator)
        root = psd_root(self(x))
        return standard_normal((n, len(root)), generator, root) @ root.mT

    def regression(self, data: Any, noise: Any = 0.1) -> Any:
        """The process given targets y (n, c) = f + noise ε at inputs: a `Regression`. noise: a standard deviation, one,
        or one for each output."""
        from lapwing.gp.infinite.regression import regression

        return regression(self, data, noise)

    def classification(self, data: Any, concentration: float = 0.1, classes: int | None = None) -> Any:
        """The process given labels y (n,), or probabilities (n, c), as Gaussian observations of logits (the "dirichlet"
        likelihood): a `Regression` of them, which predicts classes. classes: how many, if labels do not show all."""
        from lapwing.gp.infinite.regression import classification

        return classification(self, data, concentration, classes)

    @property
    def _full(self) -> bool:
        return any(layer.pools for layer in self.layers)

    def _each(self, x: Tensor) -> int:
        """Entries of a covariance for each pair of inputs."""
        positions = x.shape[2:].numel()
        return positions**2 if self._full else positions

    def _pairs(self, first: Tensor, second: Tensor, same: bool) -> Iterator[tuple[slice, slice]]:
        step = max(1, math.isqrt(ENTRIES // self._each(first)))
        for i in range(0, len(first), step):
            for j in range(i if same else 0, len(second), step):
                yield slice(i, i + step), slice(j, j + step)

    def __repr__(self) -> str:
        shown = f"weight variance {self.weight_variance:.4g}, bias variance {self.bias_variance:.4g}"
        weighed = sum(layer.weighs for layer in self.layers)
        return f"Kernel({self.kind}; {len(self.layers)} layers, {weighed} with weights; {shown})"


def nngp(depth: int = 1, activation: Any = "relu", weight_variance: float = 2.0, bias_variance: float = 0.0) -> Kernel:
    """The process of a dense network of `depth` hidden layers with random weights N(0, weight_variance / fan_in) and
    biases N(0, bias_variance), as they become infinitely wide.

    activation: "relu", "leaky_relu", "erf", "sin", "identity", any function of a tensor (by quadrature), or an object
    with `second`, `slope` and `mean`."""
    return Kernel(mlp(depth, activation), "nngp", weight_variance, bias_variance)


def ntk(depth: int = 1, activation: Any = "relu", weight_variance: float = 2.0, bias_variance: float = 0.0) -> Kernel:
    """The tangent kernel of the same network (`nngp`) at its start."""
    return Kernel(mlp(depth, activation), "ntk", weight_variance, bias_variance)


def mlp(depth: int, activation: Any) -> tuple[Layer, ...]:
    """The layers of a dense network with so many hidden ones."""
    phi = as_activation(activation)
    hidden: tuple[Layer, ...] = (Affine(), Act(phi))
    return (*hidden * given.whole(depth, "depth"), Affine())


FUNCTIONS: dict[Callable[[Tensor], Tensor], str] = {
    torch.relu: "relu",
    torch.nn.functional.relu: "relu",
    torch.erf: "erf",
    torch.special.erf: "erf",
    torch.sin: "sin",
}


def as_activation(activation: Any) -> Activation:
    """An activation by its name, by its function, or as it is."""
    if callable(activation) and activation in FUNCTIONS:
        activation = FUNCTIONS[activation]
    if isinstance(activation, str) and activation in CLOSED:
        return CLOSED[activation]()
    if all(hasattr(activation, name) for name in ("second", "slope", "mean")):
        return activation
    if callable(activation):
        return integrated(activation)
    raise InvalidValue(
        f"activation must be one of {list(CLOSED)}, a function such as torch.tanh, or an object with second, slope and "
        f"mean; got {activation!r}"
    )


def _output(found: Moments) -> Tensor:
    """The kernel of an output."""
    if found.axes or not found.gaussian:
        raise Unsupported(
            "outputs are a Gaussian process after a linear layer, or a convolution that is pooled over all positions; "
            f"these end {'with positions' if found.axes else 'in an activation or a flattening'}"
        )
    return found.cross if found.tangent is None else found.tangent
