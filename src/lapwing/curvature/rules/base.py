"""A layer rule: how a module's input and output gradients become `a` and `g` of view.py.

Register one for a module type of your own, and every structure and prediction can use it:

    @lw.curvature.rules.register(MyLinear)
    class MyRule(Rule):
        def shape(self, module): return 1, module.out, module.inp                  # b, o, i without the bias
        def inputs(self, module, x, n): return x.reshape(n, -1, 1, module.inp)     # (n, s, b, i)
        def outputs(self, module, g, n): return g.reshape(len(g), n, -1, 1, module.out)  # (k, n, s, b, o)

A module that is several linear maps (attention, recurrent layers) has a `ComposedRule`, which runs it in steps that
show them. A rule is looked up along the module's MRO, so subclasses inherit it. A wrong rule does no harm: its
gradient is checked against autograd's on a probe batch, and where they differ an exact generic block takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """One set of shared linear maps of a module, and the names of its parameters there."""

    name: str  # "" where the module is nothing else
    weight: str | None
    bias: str | None
    shape: tuple[int, int, int]  # b, o, i without the bias
    transposed: bool = False
    kernel: int = 1


class Rule:
    """Base class: a module z = W a + bias with parameters called `weight` and `bias`."""

    transposed = False  # the weight is stored (i, o, ...) rather than (o, i, ...)

    def sites(self, module: Any) -> tuple[Site, ...]:
        """The linear maps in a module: their parameters and shapes."""
        return (Site("", "weight", "bias", self.shape(module), self.transposed, self.kernel(module)),)

    def shape(self, module: Any) -> tuple[int, int, int]:
        """Blocks b, outputs o and inputs i of a block, without the bias."""
        raise NotImplementedError

    def kernel(self, module: Any) -> int:
        """Kernel offsets: a weight stored (o, channels, offsets) has inputs in the order (offsets, channels)."""
        return 1

    def inputs(self, module: Any, x: Tensor, n: int) -> Any:
        """a (n, s, b, i), or a strided view of more dimensions in that order, or inputs of a kind of their own (see
        OneHotInputs)."""
        raise NotImplementedError

    def traced(self, module: Any, x: Tensor, n: Any) -> Any:
        """`inputs` by operations that ONNX has, at a number of examples that is not known yet."""
        return self.inputs(module, x, n)

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        """Output gradients (k, *output shape) as (k, n, s, b, o); a permuted view is fine, and saves a copy."""
        raise NotImplementedError


class ComposedRule(Rule):
    """Base class for a module that is several sets of linear maps, or whose kernel hides them: it says which, and
    runs the module in steps that show them."""

    def sites(self, module: Any) -> tuple[Site, ...]:
        """The linear maps in a module: their parameters and shapes."""
        raise NotImplementedError

    def forward(self, module: Any, keep: Keep, *args: Any, **kwargs: Any) -> Any:
        """What module.forward returns, with keep(site, a, z) called for the inputs a (n, s, b, i) and outputs
        z (n, s, b, o) of each site; `z` must be what the rest is computed from. For inputs that it cannot take apart
        it returns `type(module).forward(module, *args, **kwargs)`, and keeps nothing."""
        raise NotImplementedError


Keep = Callable[[str, Tensor, Tensor], None]

_RULES: dict[type[nn.Module], Rule] = {}


def register(*types: type[nn.Module]) -> Callable[[type[Rule]], type[Rule]]:
    """Register a rule for module types and their subclasses."""

    def add(rule: type[Rule]) -> type[Rule]:
        for t in types:
            _RULES[t] = rule()
        return rule

    return add


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of the first class along the MRO that has one; one that runs the module itself only where the module
    still runs as that class does."""
    found = next((t for t in type(module).__mro__ if t in _RULES), None)
    if found is None:
        return None
    rule = _RULES[found]
    if isinstance(rule, ComposedRule):
        own = module.__dict__.get("forward")
        changed = type(module).forward is not found.forward or not (own is None or getattr(own, "composed", False))
        return None if changed else rule
    return rule


def fold(x: Tensor, n: int, tail: int) -> Tensor:
    """(n·t, ..., *tail) or (n, ..., *tail) as (n, s, *tail): leading positions are joined."""
    return x.reshape(n, -1, *x.shape[x.ndim - tail :])


def with_ones(a: Tensor, n: int, b: int, i: int, weight: bool, bias: bool) -> Tensor:
    """The inputs of the parameters that are selected, (n, s, b, i'): those of the weight, a 1 for the bias, or both.

    `a` is (n, s, b, i) or a strided view of more dimensions in that order (patches): it is copied once, at most.
    """
    if weight and not bias:
        return a.reshape(n, -1, b, i)
    positions = a.numel() // (n * b * i)
    if not weight:
        return a.new_ones(n, positions, b, 1)
    out = a.new_empty(n, positions, b, i + 1)
    out[..., :i].view(a.shape).copy_(a)
    out[..., i] = 1
    return out
