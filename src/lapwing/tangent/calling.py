"""How a network is called on a batch's inputs, with tensors of ours in the place of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import tree
from lapwing.errors import LapwingError, NetworkFailed

Forward = Callable[[nn.Module, Any], Tensor]


def call(model: nn.Module, inputs: Any) -> Any:
    """How inputs reach the model by default: floating-point numbers in its dtype, a mapping as keywords, a tuple or
    list as positions; and what is taken of its outputs."""
    inputs = _in_dtype_of(model, inputs)
    if isinstance(inputs, Mapping):
        out = model(**inputs)
    else:
        out = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return logits_of(out)


def logits_of(out: Any) -> Any:
    """A network's outputs: the logits, where it returns a mapping that has some (Hugging Face)."""
    return out["logits"] if isinstance(out, Mapping) and "logits" in out else out


def _in_dtype_of(model: nn.Module, inputs: Any) -> Any:
    """Floating-point inputs in the dtype of the network's weights, where they have one; integers, and inputs of a
    network of mixed dtypes, are kept."""
    found = {t.dtype for t in tree.tensors(inputs) if t.is_floating_point()}
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(dtypes, None)
    if not found or found == {dtype} or any(other != dtype for other in dtypes):
        return inputs
    return tree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def unwrapped(model: Any) -> Any:
    """The network that torch.compile and DistributedDataParallel wrap, in any order."""
    while compiled(model) or isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    return model


def compiled(model: Any) -> bool:
    """Whether this is what torch.compile made of a module, and not a module with a part of that name."""
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


@contextmanager
def naming_inputs(model: nn.Module, inputs: Any) -> Iterator[None]:
    """What torch raises while the network runs on inputs, said in our words, with the inputs."""
    try:
        yield
    except (LapwingError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError) as error:
        given = tree.tensors(inputs)
        found = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in given]
        batch = "make one example a batch, x[None], and " if any(t.ndim == 1 for t in given) else ""
        own = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
        raise NetworkFailed(
            f"the network failed on inputs of {', '.join(found[:4]) or type(inputs).__name__}: {type(error).__name__}: "
            f"{error}; {batch}give inputs of the shapes and dtypes that it was trained on (its weights are "
            f"{', '.join(sorted(own))}), or say how it is called with forward=lambda model, x: ..."
        ) from error


@contextmanager
def swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other tensors in the place of its own parameters and buffers, by their names; one that is tied
    is swapped in all its places. Its own are given back."""
    places: dict[str, list[tuple[dict[str, Any], str]]] = {}
    names: tuple[dict[int, str], dict[int, str]] = {}, {}  # the first of each parameter, and of each buffer
    for path, module in model.named_modules():
        for first, own in zip(names, (module._parameters, module._buffers), strict=True):
            for key, tensor in own.items():
                if tensor is not None:
                    name = first.setdefault(id(tensor), f"{path}.{key}" if path else key)
                    places.setdefault(name, []).append((own, key))
    if missing := [name for name in tensors if name not in places]:
        raise AttributeError(f"the network has no {missing[0]} any more")
    held = [(own, key, own[key], tensor) for name, tensor in tensors.items() for own, key in places[name]]
    try:
        for own, key, _, tensor in held:
            own[key] = tensor
        yield
    finally:
        for own, key, before, _ in held:
            own[key] = before
