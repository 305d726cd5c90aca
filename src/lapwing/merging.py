"""Fits of different data at the same weights, made one: sums over data add, wherever they were summed.

merge([fit of A, fit of B, ...]) = fit of A ∪ B ∪ ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.api import Laplace, load
from lapwing.curvature import State
from lapwing.data import Joined
from lapwing.errors import InvalidValue
from lapwing.posterior import placed
from lapwing.priors import Prior


def merge(
    fits: Sequence[Laplace | str | os.PathLike[str]], model: nn.Module | None = None, *, forward: Any = None
) -> Laplace:
    """One fit of the data of all, from objects, or files that `la.save` wrote, of the same network, structure, prior
    and likelihood.

    model: the network, for files; forward: the hook that they were fitted with, if they were. The result is as from a
    fit: centered at the trained weights and not tuned. What reads the data again finds them if every fit knows its own.
    """
    if not isinstance(fits, Sequence) or isinstance(fits, str) or not len(fits):
        raise InvalidValue(f"merge takes a list of fits or files, at least one; got {fits!r}")
    if model is not None and all(isinstance(fit, Laplace) for fit in fits):
        raise InvalidValue("model= is for files, and objects have their network; leave it away")
    names = [f"fit {i}" if isinstance(fit, Laplace) else str(fit) for i, fit in enumerate(fits)]
    first, *others = found = [_loaded(fit, model, forward) for fit in fits]
    for name, fit in zip(names, found, strict=True):
        if fit.streams and fit.state.source is None:
            raise InvalidValue(
                f"{name} is matrix_free, and its products need its data, which a file does not hold; merge "
                "lw.load(path, model, data=...) in its place"
            )
    state = first.state
    for i, fit in enumerate(others, 1):
        try:
            state = state + fit.state
        except InvalidValue as error:
            raise InvalidValue(f"cannot merge {names[0]} and {names[i]}: {error}") from error
        _check_objects(first, fit, f"{names[0]} and {names[i]}")
        for j in range(i):
            if _same_data(found[j].state, fit.state):
                raise InvalidValue(f"{names[j]} and {names[i]} are of the same data, which would count twice; drop one")
    data = None if any(fit.data is None for fit in found) else Joined(tuple(fit.data for fit in found))
    return replace(first, state=state, prior=placed(first.prior, state), center="map", tuning=None, data=data, at=None)


def _loaded(fit: Laplace | str | os.PathLike[str], model: nn.Module | None, forward: Any) -> Laplace:
    if isinstance(fit, Laplace):
        return fit
    if model is None:
        raise InvalidValue(f"{fit} is a file, and needs the network that it was fitted at; pass model=")
    return load(fit, model, forward=forward)


def _check_objects(a: Laplace, b: Laplace, who: str) -> None:
    noises = [{k: v.tolist() for k, v in la.likelihood.hyperparameters.items()} for la in (a, b)]
    for what, same, both in [
        ("priors", _same_prior(a.prior, b.prior), f"{_described(a.prior)} and {_described(b.prior)}"),
        ("noises", noises[0] == noises[1], f"{noises[0]} and {noises[1]}"),
        ("temperatures", a.temperature == b.temperature, f"{a.temperature} and {b.temperature}"),
    ]:
        if not same:
            raise InvalidValue(
                f"cannot merge {who}: their {what} differ, {both}; give both the same with la.replace(...), and tune "
                "after merging"
            )


def _same_prior(a: Prior, b: Prior) -> bool:
    mine, theirs = a.facts(), b.facts()
    same = type(a) is type(b) and a.kind == b.kind and a.names == b.names and mine.keys() == theirs.keys()
    return same and all(torch.equal(value, theirs[key]) for key, value in mine.items())


def _described(prior: Prior) -> str:
    return f"{prior.kind} with " + ", ".join(f"{k} {_spread(v.reshape(-1))}" for k, v in prior.hyperparameters.items())


def _spread(values: Tensor) -> str:
    return f"{values[0]:.6g}" if len(values) == 1 else f"{values.min():.6g} to {values.max():.6g}"


def _same_data(a: State, b: State) -> bool:
    """Whether the targets and the network's outputs are those of the same data, to the last bit."""
    same = a.n == b.n and a.targets is not None and a.targets == b.targets
    mine, theirs = a.statistics, b.statistics
    return same and mine.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in mine.items())
