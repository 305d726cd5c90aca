"""Random networks of at most 150 weights, from one integer: inputs -> stems -> joined -> trunk -> head -> outputs.

One or two inputs (a tensor, positions or keywords), each of a kind of `layers.py`; outputs (n, c) or, with positions,
(n, t, c); as a tensor, under "logits", or in a tuple that `forward=` must pick from. Running statistics are random,
some parameters are frozen, and the network may be handed over in train mode.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from blocks import block, unchecked
from layers import BRIDGES, Size, after, example
from torch import Tensor, nn

MOST = 150  # weights
SIZES: dict[str, tuple[Size, ...]] = {
    "vector": ((2,), (3,), (4,)),
    "sequence": ((2, 3), (3, 3), (2, 4), (1, 3), (3, 2)),
    "signal": ((1, 5), (2, 4), (2, 6)),
    "image": ((1, 3, 3), (2, 3, 4), (4, 2, 2)),
    "volume": ((1, 2, 3, 2), (2, 2, 2, 2)),
    "tokens": ((3,), (2,)),
}
UNFIT = (RuntimeError, ValueError, AssertionError, IndexError)  # what torch says of layers that do not fit a size


class Network(nn.Module):
    """Stems for each input, added up; a trunk; a linear head; the outputs in some dress."""

    def __init__(
        self, stems: dict[str, nn.Module], trunk: nn.Module, head: nn.Module, end: nn.Module, dress: str
    ) -> None:
        super().__init__()
        self.stems, self.trunk, self.head, self.end = nn.ModuleDict(stems), trunk, head, end
        self.dress = dress

    def forward(self, *args: Tensor, **named: Tensor) -> Any:
        inputs = args or [named[name] for name in self.stems]
        hidden = [stem(x.clone()) for stem, x in zip(self.stems.values(), inputs, strict=True)]
        h = self.trunk(sum(hidden[1:], hidden[0]))
        f = self.end(self.head(h))
        return {"tensor": f, "logits": {"logits": f, "hidden": h}, "tuple": (h, f)}[self.dress]


def second(model: nn.Module, inputs: Any) -> Tensor:
    """forward= for a network that returns (hidden, outputs)."""
    if isinstance(inputs, dict):
        return model(**inputs)[1]
    return model(*inputs)[1] if isinstance(inputs, tuple) else model(inputs)[1]


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    """The outputs of a network, whatever its inputs and its dress."""
    found = (
        model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    )
    return found["logits"] if isinstance(found, dict) else found[1] if isinstance(found, tuple) else found


@dataclass(frozen=True)
class Drawn:
    """A network, and how to make inputs for it."""

    model: Network
    inputs: Callable[[int, torch.dtype], Any]  # n, dtype -> a tensor, a tuple or a dict
    forward: Any  # for laplace(forward=)
    positions: bool


def network(rng: random.Random, c: int, end: Callable[[], nn.Module]) -> Drawn:
    """Draw until one fits; torch's own random state is the caller's to seed."""
    while True:
        try:
            drawn = _network(rng, c, end())
        except UNFIT:
            continue
        if sum(p.numel() for p in drawn.model.parameters()) <= MOST and _differentiable(drawn):
            _randomize(rng, drawn)
            return drawn


def _differentiable(drawn: Drawn) -> bool:
    """Whether torch itself has gradients: not where a layer in place spoils what the one before has saved."""
    try:
        outputs(unchecked(drawn.model).eval(), drawn.inputs(2, torch.float32)).sum().backward()
    except RuntimeError:
        return False
    return True


def _network(rng: random.Random, c: int, end: nn.Module) -> Drawn:
    names = ["x"] if rng.random() < 0.7 else ["a", "b"]
    kinds = {name: rng.choice(sorted(SIZES)) for name in names}
    sizes = {name: rng.choice(SIZES[kind]) for name, kind in kinds.items()}
    positions = rng.random() < 0.2
    goal = "sequence" if positions else "vector"
    stems, size = {}, None
    for name in names:
        layers, at = _stem(rng, kinds[name], sizes[name], goal)
        if size is not None and at != size:
            if at[:-1] != size[:-1]:
                raise ValueError("stems of different lengths")
            layers.append(nn.Linear(at[-1], size[-1]))
        size = size or at
        stems[name] = nn.Sequential(*layers)
    assert size is not None
    trunk, size = _chain(rng, goal, size, rng.randint(0, 2))
    head = nn.Linear(size[-1], c, bias=rng.random() < 0.85)
    dress = rng.choice(("tensor", "tensor", "tensor", "logits", "tuple"))
    model = Network(stems, nn.Sequential(*trunk), head, end, dress)
    by_name = len(names) > 1 and rng.random() < 0.5

    def inputs(n: int, dtype: torch.dtype) -> Any:
        made = {k: example(kinds[k], sizes[k], n) for k in names}
        made = {k: t.to(dtype) if t.is_floating_point() else t for k, t in made.items()}
        return made if by_name else made["x"] if names == ["x"] else tuple(made.values())

    return Drawn(model, inputs, second if dress == "tuple" else None, positions)


def _stem(rng: random.Random, kind: str, size: Size, goal: str) -> tuple[list[nn.Module], Size]:
    """Layers from a kind of input to the goal, in at most a few bridges."""
    layers: list[nn.Module] = []
    for _ in range(6):
        some, size = _chain(rng, kind, size, rng.randint(0, 2) if kind != "tokens" else 0)
        layers += some
        if kind == goal:
            return layers, size
        before, (kind, make) = kind, rng.choice(BRIDGES[kind])
        layers.append(make(rng, size))
        size = after(layers[-1], before, size)
    raise ValueError(f"no way to {goal}")


def _chain(rng: random.Random, kind: str, size: Size, length: int) -> tuple[list[nn.Module], Size]:
    layers: list[nn.Module] = []
    for _ in range(length):
        layer = block(rng, kind, size)
        size = after(layer, kind, size)
        if len(size) != {"vector": 1, "sequence": 2, "signal": 2, "image": 3, "volume": 4}[kind] or max(size) > 16:
            raise ValueError("a layer left its kind")
        layers.append(layer)
    return layers, size


def _randomize(rng: random.Random, drawn: Drawn) -> None:
    """Random running statistics and affine weights, outputs of order one, frozen parameters, train mode."""
    model = drawn.model
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2.0)
            if "Norm" in type(module).__name__ or isinstance(module, nn.PReLU):
                for p in module.parameters(recurse=False):
                    p.add_(0.2 * torch.randn_like(p))
        size = outputs(model.eval(), drawn.inputs(8, torch.float32)).abs().max()
        if size > 3:
            model.head.weight.mul_(3 / size)
    frozen = rng.random() < 0.2
    for p in model.parameters():
        p.requires_grad_(not (frozen and rng.random() < 0.4))
    model.head.weight.requires_grad_(True)
    model.train(rng.random() < 0.5)
