"""Noise where it costs least variance, for a mean-field normal q, w ~ N(μ, s²), in layers z = W a + b:

    z ~ N(μ_W a + μ_b, s_W² a² + s_b²)          local reparameterization (Kingma et al. 2015): Linear, one position
    z = μ_W a + μ_b + r ⊙ (ΔW (t ⊙ a) + Δb)     Flipout (Wen et al. 2018): signs r, t of each example, one Δ for all

Each is exact for every example by itself; noise that is independent at the positions of a convolution would not be. A
layer has it if its weights run once a pass and nowhere else, which a run with NaN in their place shows. All other
weights are drawn once for the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing import tree
from lapwing.operators import linalg
from lapwing.tangent import TangentModel

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def noisy_layers(tangent: TangentModel, x: Any) -> dict[str, nn.Module]:
    """The layers that may have noise of their own, {name: module}, by trial on inputs x."""
    layout = tangent.layout
    whole = [name for name in layout.names if name not in layout.masks]
    found = {
        name: module
        for name, module in tangent.model.named_modules()
        if type(module) in LAYERS
        and _own(name, "weight") in whole
        and (module.bias is None or _own(name, "bias") in whole)
    }
    with torch.no_grad():
        clean = tangent.apply(tangent.params, x)
        return {name: module for name, module in found.items() if _alone(tangent, name, module, x, clean)}


def _own(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _alone(tangent: TangentModel, name: str, module: Any, x: Any, clean: Tensor) -> bool:
    """Whether its weights run once, on a batch of examples, and nowhere else."""
    params, calls = dict(tangent.params), []
    own = {key: params[_own(name, key)] for key, _ in module.named_parameters()}
    poisoned = params | {_own(name, key): torch.full_like(value, torch.nan) for key, value in own.items()}
    n = next(len(t) for t in tree.tensors(x) if t.ndim)

    def hook(layer: Any, args: Any, out: Tensor) -> Tensor:
        calls.append(tuple(args[0].shape) if args else ())
        return mapped(layer, args[0], own["weight"], own.get("bias")) if args else out

    with hooked({name: module}, lambda _: hook):
        out = tangent.apply(poisoned, x)
    batched = len(calls) == 1 and len(calls[0]) >= (2 if isinstance(module, nn.Linear) else len(module.weight.shape))
    return batched and calls[0][0] == n and torch.allclose(out, clean, rtol=1e3 * tangent.eps, atol=1e3 * tangent.eps)


def mapped(layer: Any, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's linear map at other weights."""
    return F.linear(a, weight, bias) if isinstance(layer, nn.Linear) else layer._conv_forward(a, weight, bias)


@contextmanager
def hooked(layers: Mapping[str, nn.Module], make: Callable[[str], Any]) -> Iterator[None]:
    """Forward hooks on layers, taken off at the end."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(make(name)).remove)
        yield


def adding(deviation: Mapping[str, Tensor], generator: torch.Generator) -> Callable[[str], Any]:
    """Hooks that add the noise of weights with these deviations, {parameter: tensor}, to a layer's mean output."""

    def make(name: str) -> Any:
        weight, bias = deviation[_own(name, "weight")], deviation.get(_own(name, "bias"))

        def hook(layer: Any, args: Any, out: Tensor) -> Tensor:
            a, s = args[0], (weight.to(out), None if layer.bias is None or bias is None else bias.to(out))
            if a.ndim == 2 and isinstance(layer, nn.Linear):
                return out + _local(a, *s, generator)
            return out + _flipped(layer, a, *s, generator)

        return hook

    return make


def _local(a: Tensor, weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> Tensor:
    variance = F.linear(a.square(), weight.square(), None if bias is None else bias.square())
    root = variance.clamp(min=torch.finfo(a.dtype).tiny).sqrt()  # of an input of zeros, a root without a slope
    return root * _normal(tuple(root.shape), generator, root)


def _flipped(layer: Any, a: Tensor, weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> Tensor:
    delta = weight * _normal(tuple(weight.shape), generator, weight)
    shift = None if bias is None else bias * _normal(tuple(bias.shape), generator, bias)
    last = isinstance(layer, nn.Linear)  # where channels are
    z = mapped(layer, a * _signs(a, last, generator), delta, shift)
    return z * _signs(z, last, generator)


def _normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """In the network's own dtype."""
    return linalg.standard_normal(shape, generator, like).to(like)


def _signs(t: Tensor, last: bool, generator: torch.Generator) -> Tensor:
    """±1 for each example and channel of t."""
    middle = [1] * (t.ndim - 2)
    shape = (len(t), *middle, t.shape[-1]) if last else (len(t), t.shape[1], *middle)
    return _normal(shape, generator, t).sign()
