"""Ways to put layers together that libraries stumble over: sharing, tying, parametrizations, checkpoints, routing, raw
parameters, buffers, modules that no output needs.

`block(rng, kind, size)` gives a module that keeps the kind, plain or wrapped in one of these.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
from layers import LAYERS, Size, after
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(0.5 * x)


class Twice(nn.Module):
    """One module, used twice."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.body(x.clone()).tanh())


class Doubled(nn.Module):
    """One module under two names."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first = self.second = body

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.clone()) - 0.3 * self.second(x.sin())


class Tied(nn.Module):
    """Two linear layers with one weight, as it is or transposed."""

    def __init__(self, width: int, transpose: bool) -> None:
        super().__init__()
        self.one, self.two, self.transpose = nn.Linear(width, width), nn.Linear(width, width, bias=False), transpose
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x).tanh()
        return F.linear(h, self.one.weight.mT) if self.transpose else self.two(h)


class Checkpointed(nn.Module):
    """Runs its body again in the backward pass. `active = False` is the same function without. Nothing in place: torch
    would run it again on what it has changed."""

    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        for module in body.modules():
            if getattr(module, "inplace", False):
                module.inplace = False
        self.body, self.reentrant, self.active = body, reentrant, True

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        return checkpoint(self.body, x, use_reentrant=self.reentrant) if self.active else self.body(x)


def unchecked(model: nn.Module) -> nn.Module:
    """A copy that computes the same and runs nothing twice."""
    out = copy.deepcopy(model)
    for module in out.modules():
        if isinstance(module, Checkpointed):
            module.active = False
    return out


class Gate(nn.Module):
    """Raw parameters: a scale, a shift, an einsum, and one that no output needs."""

    def __init__(self, size: Size, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.scale = nn.Parameter(torch.randn(size[-1]))
        self.alpha = nn.Parameter(torch.randn(()))
        if mode == "einsum":
            self.mix = nn.Parameter(torch.randn(size[-1], size[-1]))
        if mode == "list":
            self.shifts = nn.ParameterList([nn.Parameter(torch.randn(size[-1])), nn.Parameter(torch.randn(1))])
        if mode == "spare":
            self.spare = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.sigmoid() + self.alpha
        if self.mode == "einsum":
            x = torch.einsum("...i,ij->...j", x, self.mix)
        if self.mode == "list":
            x = x + self.shifts[0] * self.shifts[1]
        return x


class Buffered(nn.Module):
    """A buffer that scales, and one that counts calls in train mode only."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("factor", torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.factor * self.body(x)


class Spare(nn.Module):
    """A module beside the body that is never called."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.spare = body, nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Routed(nn.Module):
    """Each example goes to the expert that its own numbers choose; an expert may get none."""

    def __init__(self, width: int, experts: int, soft: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=i % 2 == 0) for i in range(experts))
        self.soft = soft

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).softmax(-1)
        best, out = score.argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = (best == i).nonzero().squeeze(-1)
            found = expert(x[chosen])
            out = out.index_add(0, chosen, score[chosen, i, None] * found if self.soft else found)
        return out


def parametrized(layer: nn.Module, kind: str) -> nn.Module:
    if kind == "weight_norm":
        return parametrizations.weight_norm(layer)
    if kind == "spectral_norm":
        return parametrizations.spectral_norm(layer)
    return parametrizations.orthogonal(layer)


# -- draws ---------------------------------------------------------------------------------------------------------


def plain(rng: random.Random, kind: str, size: Size) -> nn.Module:
    return rng.choice(LAYERS[kind])(rng, size)


def same(rng: random.Random, kind: str, size: Size) -> nn.Module:
    """One or two layers that keep the size; raises where none was found."""
    for _ in range(20):
        try:
            body = nn.Sequential(*[plain(rng, kind, size) for _ in range(rng.randint(1, 2))])
            if after(body, kind, size) == size and any(True for _ in body.parameters()):
                return body
        except (RuntimeError, ValueError, AssertionError, IndexError):
            continue
    raise ValueError("no layer keeps the size")


def weighted(rng: random.Random, kind: str, size: Size) -> nn.Module:
    """A layer with a weight matrix, parametrized."""
    for _ in range(20):
        layer = plain(rng, kind, size)
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
            return parametrized(layer, rng.choice(("weight_norm", "weight_norm", "spectral_norm", "orthogonal")))
    raise ValueError("no layer with a weight")


WRAPPED: dict[str, Callable[[random.Random, str, Size], nn.Module]] = {
    "residual": lambda rng, kind, size: Residual(same(rng, kind, size)),
    "twice": lambda rng, kind, size: Twice(same(rng, kind, size)),
    "doubled": lambda rng, kind, size: Doubled(same(rng, kind, size)),
    "checkpointed": lambda rng, kind, size: Checkpointed(plain(rng, kind, size), rng.random() < 0.4),
    "gate": lambda rng, kind, size: Gate(size, rng.choice(("plain", "einsum", "list", "spare"))),
    "buffered": lambda rng, kind, size: Buffered(plain(rng, kind, size)),
    "spare": lambda rng, kind, size: Spare(plain(rng, kind, size)),
    "parametrized": weighted,
}
VECTORS: dict[str, Callable[[random.Random, str, Size], nn.Module]] = {
    "tied": lambda rng, kind, size: Tied(size[-1], rng.random() < 0.5),
    "routed": lambda rng, kind, size: Routed(size[-1], rng.randint(2, 3), rng.random() < 0.5),
}


def block(rng: random.Random, kind: str, size: Size) -> nn.Module:
    if rng.random() < 0.6:
        return plain(rng, kind, size)
    ways = {**WRAPPED, **VECTORS} if kind == "vector" else WRAPPED
    return ways[rng.choice(sorted(ways))](rng, kind, size)
