"""Hyperparameters of the network itself: parameters that are no weights, moved by the slope of `tune/surrogate.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lapwing import tree
from lapwing.errors import InvalidValue, NotConverged
from lapwing.training.history import summary
from lapwing.tune.surrogate import Surrogate, ascend


def matched(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The parameters that globs mean, in the order of the model."""
    if not isinstance(patterns, Sequence) or isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise InvalidValue(f"hyperparameters is a list of globs over parameter names, got {patterns!r}")
    names = [n for n, p in model.named_parameters() if p.requires_grad] if patterns else []
    for pattern in patterns:
        if not tree.chosen(pattern, names):
            raise InvalidValue(
                f"hyperparameters: {pattern!r} matches no parameter that requires grad; they are {names}"
            )
    meant = {name for pattern in patterns for name in tree.chosen(pattern, names)}
    found = tuple(n for n in names if n in meant)
    if found and len(found) == len(names):
        raise InvalidValue("hyperparameters= takes every parameter, and leaves no weight to be Bayesian about")
    return found


def weights_beside(model: nn.Module, names: tuple[str, ...]) -> Any:
    """The subset of weights that leaves these parameters out."""
    return [n for n, p in model.named_parameters() if p.requires_grad and n not in names] if names else "all"


def shown(model: nn.Module, names: tuple[str, ...], taken: set[str]) -> dict[str, float]:
    """Their values for a record, apart from those of prior and likelihood, whatever they are called."""
    found = {f"model.{n}" if n in taken else n: model.get_parameter(n) for n in names}
    return {k: v for name, t in found.items() for k, v in summary(name, t).items()}


def move(model: nn.Module, names: tuple[str, ...], objective: Surrogate, data: Any, lr: float) -> None:
    """One pass of Adam over the data moves the model's parameters in place."""
    moved = ascend(objective, names, data, lr)
    bad = [name for name, value in moved.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise NotConverged(f"the evidence's slope in {bad} is not finite; lower hyper_lr, or leave them out")
    with torch.no_grad():
        for name, value in moved.items():
            model.get_parameter(name).copy_(value)
