"""f(x) and J(x) as functions of their inputs, which autograd can differentiate: for gradients of predictions in x.

    x ↦ f(x, θ*) (n, ..., c),   x ↦ J(x) (n, q·c, p)

A prediction keeps this graph where gradients are on and an input requires one; elsewhere nothing is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint

from lapwing import tree
from lapwing.errors import InvalidValue, Unsupported
from lapwing.tangent import rows
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel

F = TypeVar("F", bound=Callable[..., Any])


def asked(x: Any) -> bool:
    """Whether gradients in these inputs are wanted; inside of what `graph_where_asked` decorates, whether the user
    wants them."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tree.tensors(x))


def graph_where_asked(function: F) -> F:
    """Run out of inference mode, and with gradients only where the caller has them on and an argument requires one."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = asked([*args, *kwargs.values()])
        with torch.inference_mode(False), torch.set_grad_enabled(wanted):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def with_graph(tangent: TangentModel, x: Any, budget: int) -> tuple[Tensor, Tensor]:
    """f (n, ..., c) and J (n, q·c, p) in float64, both with a graph to x; all rows are kept, within the budget."""
    with evaluating(tangent.model), plain_kernels(onednn=False), no_checkpoints(), torch.enable_grad():
        f = tangent.apply(tangent.params, x)
        size = 8 * f.numel() * tangent.layout.size
        if size > budget:
            raise InvalidValue(
                f"gradients in the inputs keep all {f.numel():,} rows of the Jacobian, {size / 1e9:.3g} GB, which is "
                "past memory_budget; predict at fewer inputs at once, raise it, or give inputs that require no grad"
            )
        found = rows.pulled(tangent, x, rows.units(f.detach()), tangent.layout.names, graph=True)
    return f, found.to(torch.float64)


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """A checkpointed layer would run again in the user's backward(), at whatever weights the module then has."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Unsupported(
            "this network checkpoints activations, which run again in backward(): gradients in the inputs cannot be "
            "had through them; switch gradient checkpointing off, or give inputs that require no grad"
        )

    was = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = refuse
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = was
