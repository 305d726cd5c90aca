"""The mode that every pass of a tangent model runs a network in: eval mode, no backward hooks, dense gradients, no
compiler, and checkpoints that can be differentiated by some of the weights. All is given back afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from lapwing.tangent.kernels import padded_embedding, replaced


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and without backward hooks (torch.func cannot pass through them, and they are there to
    watch training); each module's own mode and hooks given back."""
    modules = list(model.modules())
    training = [m for m in modules if m.training]
    hooked = [
        (m, m._backward_hooks, m._backward_pre_hooks) for m in modules if m._backward_hooks or m._backward_pre_hooks
    ]
    flat = [(m, m._flat_weights, m._flat_weight_refs) for m in modules if isinstance(m, nn.RNNBase)]
    tables = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    gradients = [(m, m.sparse, m.scale_grad_by_freq) for m in tables]
    for table in tables:  # a dense gradient, and the derivative itself: scaled by counts it is no derivative
        table.sparse = table.scale_grad_by_freq = False
    for module in training:
        module.training = False
    for module, _, _ in hooked:
        module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        with _uncompiled(modules), _padded(tables), _checkpoints():
            yield
    finally:
        for module in training:
            module.training = True
        for module, hooks, pre in hooked:
            module._backward_hooks, module._backward_pre_hooks = hooks, pre
        for module, sparse, scaled in gradients:
            module.sparse, module.scale_grad_by_freq = sparse, scaled
        for module, weights, refs in flat:  # recurrent layers remember the weights of their last pass
            module._flat_weights, module._flat_weight_refs = weights, refs


def _padded(tables: list[Any]) -> AbstractContextManager[Any]:
    padded = any(isinstance(m, nn.Embedding) and m.padding_idx is not None for m in tables)
    return replaced("embedding", padded_embedding) if padded else nullcontext()


def _uncompiled(modules: list[nn.Module]) -> AbstractContextManager[Any]:
    """Modules under torch.compile run as they were written: what the compiler makes of them has no hooks, no forward
    mode and no batching rule."""
    if any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


class _AnyGradient:
    """In the place of what `checkpoint(..., use_reentrant=True)` runs by: use_reentrant=False. The reentrant form gives
    no gradients by chosen tensors, and none at all by a block's weights where no input of the block requires one."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextmanager
def _checkpoints() -> Iterator[None]:
    reentrant = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _AnyGradient  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
