"""A network linearized at its weights: which networks can be, and the tangent model of one that can."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lapwing.errors import InvalidValue
from lapwing.tangent.calling import Forward, call, unwrapped
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels
from lapwing.tangent.model import TangentModel
from lapwing.tangent.subset import select

DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


@torch.inference_mode(False)
def linearize(
    model: nn.Module, subset: Any = "all", *, forward: Forward | None = None, example: Any = None
) -> TangentModel:
    """Linearize a network at its weights.

    subset: "all", "last_layer" (needs example=, a batch of inputs to trace), a list of globs, or {name: mask}.
    forward: forward(model, inputs) -> outputs, where the model cannot be called on a batch's inputs as they are.
    """
    model = unwrapped(model)
    _check(model)
    forward = forward or call
    with evaluating(model), plain_kernels():
        layout = select(model, subset, example, forward)
    tensors = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    params = {n: tensors[n][layout.masks[n]] if n in layout.masks else tensors.pop(n) for n in layout.names}
    buffers = tuple(n for n, _ in model.named_buffers())
    return TangentModel(model, params, tensors, layout, forward, buffers)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InvalidValue(f"parameter {name} is uninitialized (a lazy module); run the model once first")
        if hasattr(p, "full_tensor") or getattr(p, "_is_flat_param", False):  # a DTensor, or of the first FSDP
            raise InvalidValue(
                f"parameter {name} is cut over processes (FSDP, DTensor), and every process needs the whole network; "
                "load its full state dict into a plain copy"
            )
        if p.is_meta:
            raise InvalidValue(f"parameter {name} is on the meta device, which holds no values; load the weights first")
        if p.is_floating_point() and p.dtype not in DTYPES:
            raise InvalidValue(
                f"parameter {name} is {p.dtype}, in which there is no arithmetic; cast the network to one of "
                f"{', '.join(str(dtype) for dtype in DTYPES)}"
            )
        if p.is_floating_point() and not torch.isfinite(p).all():
            raise InvalidValue(f"parameter {name} holds NaN or infinite values; train the network again")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise InvalidValue(
                f"{name} renormalizes its weight in every pass (max_norm={module.max_norm}), so the network is no "
                "fixed function of it; normalize it once and set max_norm=None"
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise InvalidValue(
                f"{name} normalizes by the statistics of each batch (track_running_stats=False), so its outputs "
                "depend on the other examples; use running statistics, or a layer or group norm"
            )
