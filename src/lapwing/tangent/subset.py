"""Which parameters are Bayesian: all, the last layer, names or patterns, or single elements.

"all"            every parameter with requires_grad
"last_layer"     found by tracing a batch: the last layer called, if everything passes through it
["fc.*", ...]    globs over named_parameters() names; one that is a name means that parameter
{name: mask}     boolean masks in the parameters' shapes (lapwing.subsets makes some)
mask             one boolean vector over all parameters with requires_grad, in named_parameters() order
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import given, tree
from lapwing.errors import InvalidValue
from lapwing.tangent.calling import Forward, compiled, naming_inputs, swapped
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels
from lapwing.tree import Layout


def select(model: nn.Module, subset: Any, example: Any, forward: Forward) -> Layout:
    """The layout of the selected parameters."""
    named = dict(model.named_parameters())
    if not named:
        raise InvalidValue(f"{type(model).__name__} has no parameters; there is nothing to be Bayesian about")
    chosen: dict[str, Tensor | None]
    if isinstance(subset, Tensor):
        chosen = _masks(_cut(subset, trainable(model)), named)
    elif isinstance(subset, str) and subset == "all":
        chosen = {name: None for name, p in named.items() if p.requires_grad}
        if not chosen:
            raise InvalidValue("no parameter requires grad, so subset='all' selects none; name parameters by glob")
    elif isinstance(subset, str) and subset == "last_layer":
        chosen = dict.fromkeys(last_layer(model, example, forward))
    elif isinstance(subset, Mapping):
        chosen = _masks(subset, named)
    elif isinstance(subset, Sequence) and not isinstance(subset, str):
        chosen = _globs(subset, named)
    else:
        raise no_subset(subset, _meant(subset, named))
    bad = [name for name in chosen if not named[name].is_floating_point()]
    if bad:
        raise InvalidValue(f"parameters {bad} are not floating point; leave them out of the subset")
    empty = tuple(name for name in named if name in chosen and not named[name].numel())
    if len(empty) == len(chosen):
        raise InvalidValue(f"parameters {list(empty)} have no elements; there is nothing to be Bayesian about in them")
    return Layout(
        shapes={name: p.shape for name, p in named.items() if name in chosen and name not in empty},
        masks={name: mask for name, mask in chosen.items() if mask is not None},
        empty=empty,
    )


def no_subset(found: Any, hint: str = "") -> InvalidValue:
    """The error that something says of no parameters whether they are selected."""
    return InvalidValue(
        "subset must be 'all', 'last_layer', a list of globs, {name: mask} or one bool vector; "
        f"got {type(found).__name__} {found!r}{hint}"
    )


def _meant(subset: Any, named: Mapping[str, Tensor]) -> str:
    if not isinstance(subset, str):
        return ""
    owner = any(name.startswith(f"{subset}.") for name in named)
    found = f"{subset}.*" if owner else subset if tree.chosen(subset, named) else None
    return f"; did you mean [{found!r}]?" if found else given.near(subset, ("all", "last_layer"))


def trainable(model: nn.Module) -> Layout:
    """The layout of every floating-point parameter that requires grad."""
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be a torch.nn.Module, got {type(model).__name__}")
    named = dict((model._orig_mod if compiled(model) else model).named_parameters())  # type: ignore[union-attr]
    lazy = [name for name, p in named.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise InvalidValue(f"parameter {lazy[0]} is uninitialized (a lazy module); run the model once first")
    shapes = {name: p.shape for name, p in named.items() if p.requires_grad and p.is_floating_point()}
    if not shapes:
        raise InvalidValue("no parameter of the model requires grad, so there is none to choose from")
    return Layout(shapes, {})


def masks_of(chosen: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Full-shaped masks of the parameters that a bool vector over a layout, (p,), touches."""
    masks = layout.unflatten(chosen)
    for n, mask in layout.masks.items():
        masks[n] = torch.zeros_like(mask).masked_scatter(mask, masks[n])
    return {n: mask for n, mask in masks.items() if bool(mask.any())}


def _cut(vector: Tensor, layout: Layout) -> dict[str, Tensor]:
    if vector.dtype != torch.bool or vector.shape != (layout.size,):
        raise InvalidValue(
            f"a subset given as one vector must be bool of shape ({layout.size},), one for each weight that requires "
            f"grad; got {vector.dtype} of {tuple(vector.shape)}"
        )
    return masks_of(vector, layout)


def _globs(patterns: Sequence[str], named: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidValue(f"a subset is a list of globs over parameter names, got {pattern!r} in it")
        if not tree.chosen(pattern, named):
            owner = any(name.startswith(f"{pattern}.") for name in named)
            hint = f"; did you mean {pattern + '.*'!r}?" if owner else given.near(pattern, named)
            raise InvalidValue(f"subset pattern {pattern!r} matches no parameter; they are {list(named)}{hint}")
    meant = {name for pattern in patterns for name in tree.chosen(pattern, named)}
    chosen: dict[str, Tensor | None] = {name: None for name in named if name in meant}
    if not chosen:
        raise InvalidValue("the subset is empty; give at least one pattern")
    return chosen


def _masks(masks: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    chosen: dict[str, Tensor | None] = {}
    for name, mask in masks.items():
        if name not in named:
            raise InvalidValue(f"subset names {name!r}, which is no parameter; they are {list(named)}")
        if not isinstance(mask, Tensor):
            raise InvalidValue(f"the mask of {name} must be a bool tensor, got {type(mask).__name__}")
        if mask.is_meta:
            raise InvalidValue(f"the mask of {name} is on the meta device, which holds no values")
        if mask.dtype != torch.bool or mask.shape != named[name].shape:
            raise InvalidValue(
                f"the mask of {name} must be bool of shape {tuple(named[name].shape)}, "
                f"got {mask.dtype} of {tuple(mask.shape)}"
            )
        if bool(mask.any()) or not mask.numel():
            chosen[name] = None if bool(mask.all()) else mask.detach().clone()
    if not chosen:
        raise InvalidValue("the masks select no element; there is nothing to be Bayesian about")
    return chosen


def last_layer(model: nn.Module, example: Any, forward: Forward) -> list[str]:
    """Names of the parameters of the last layer, found by cutting the network behind it.

    The candidate is the module called last among those that have parameters of their own and call no other such
    module (a container with a bare parameter is not a layer). It is the last layer if its output is a tensor and,
    with that output cut off, the network's output depends on no parameter any more.
    """
    if example is None:
        raise InvalidValue("subset='last_layer' is found by tracing: pass example=, a batch of inputs")
    calls: list[str] = []
    _traced(model, example, forward, lambda name, out: calls.append(name))
    if not calls:
        raise InvalidValue("no module with parameters was called, so there is no last layer; name parameters by glob")
    last, count = calls[-1], [0]

    def cut(name: str, out: Any) -> Any:
        count[0] += 1
        if count[0] < len(calls):
            return None
        if not isinstance(out, Tensor):
            raise InvalidValue(f"the last module called, {last}, returns {type(out).__name__}, not a tensor")
        return out.detach()

    output, params = _traced(model, example, forward, cut)
    if not isinstance(output, Tensor):
        raise InvalidValue(f"the model returns {type(output).__name__}, not a tensor; pick the output with forward=")
    if output.requires_grad:
        grads = torch.autograd.grad(output.sum(), list(params.values()), allow_unused=True)
        around = [name for name, g in zip(params, grads, strict=True) if g is not None]
        raise InvalidValue(
            f"there is no last layer: the output reaches {around[:4]} around the last module called, {last}; "
            "select parameters by glob, or all"
        )
    own = [f"{last}.{n}" if last else n for n, _ in model.get_submodule(last).named_parameters()]
    tied = [name for name in own if name not in params]  # named_parameters() gives a tied tensor its first name only
    if tied:
        tensor = model.get_parameter(tied[0])
        first = next(name for name, p in model.named_parameters() if p is tensor)
        raise InvalidValue(
            f"there is no last layer: {tied[0]} is {first} too, so it acts in front of the last module; "
            "select parameters by glob, or all"
        )
    return own


def _traced(
    model: nn.Module, example: Any, forward: Forward, seen: Callable[[str, Any], Any]
) -> tuple[Any, dict[str, Tensor]]:
    """Run the model on fresh leaves that all require grad, calling seen(name, output) after each module that has
    parameters of its own and called no other such module inside."""
    params = {n: p.detach().clone().requires_grad_(p.is_floating_point()) for n, p in model.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    ended, begun = [0], []  # how many calls ended so far; and how many had when each open call began

    def before(module: nn.Module, args: Any) -> None:
        begun.append(ended[0])

    def after(module: nn.Module, args: Any, out: Any, name: str = "") -> Any:
        leaf = begun.pop() == ended[0]
        ended[0] += 1
        return seen(name, out) if leaf else None

    modes = torch.enable_grad(), evaluating(model), plain_kernels(), naming_inputs(model, example)
    with ExitStack() as hooks:
        for mode in modes:
            hooks.enter_context(mode)
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                hooks.callback(module.register_forward_pre_hook(before).remove)
                hooks.callback(module.register_forward_hook(functools.partial(after, name=name)).remove)
        with swapped(model, {**params, **buffers}):
            return forward(model, example), params
