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
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) != 1:
        return inputs
    dtype = dtypes.pop()
    if all(t.dtype == dtype or not t.is_floating_point() for t in tree.tensors(inputs)):
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
        found = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tree.tensors(inputs)]
        own = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
        raise NetworkFailed(
            f"the network failed on inputs of {', '.join(found[:4]) or type(inputs).__name__}: {type(error).__name__}: "
            f"{error}; give inputs of the shapes and dtypes that it was trained on (its weights are "
            f"{', '.join(sorted(own))}), or say how it is called with forward=lambda model, x: ..."
        ) from error


class Swapped(nn.Module):
    """forward(model, x) as a module, so that functional_call can swap the model's tensors under any hook."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.hook = forward

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """Each module once, always: functional_call swaps every name of a tied tensor, and would swap a module that
        has two names twice, which leaves the swapped tensor behind in the user's model."""
        return super().named_modules(memo, prefix)

    def forward(self, x: Any) -> Tensor:
        return self.hook(self.model, x)
