"""The verbs that make a Laplace object: from data, from a state, from a file."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import files, given, io, likelihoods, priors, registry, tree
from lapwing.api.object import Laplace, check_served
from lapwing.arguments import (
    STRUCTURE_OF,
    as_budget,
    as_factor,
    as_likelihood,
    as_prior,
    as_ranks,
    as_shard,
    as_structure,
    as_tangent,
    as_task,
    facts,
    task_of,
)
from lapwing.curvature import BUDGET, State, accumulate, probe
from lapwing.curvature.overflow import check_sums
from lapwing.data import dropped, first_inputs, ranks_of
from lapwing.errors import BrokenFile, InvalidValue
from lapwing.packing import sound
from lapwing.posterior import placed
from lapwing.shell import Blended, Fitted, Shell
from lapwing.tangent import TangentModel, linearize
from lapwing.tangent.calling import unwrapped

ELSEWHERE = {  # keywords of laplace-torch
    "hessian_structure": "structure=",
    "subset_of_weights": "subset=",
    "prior_precision": "prior=",
    "prior_mean": "prior=lw.priors.Gaussian(precision, mean=...)",
    "sigma_noise": "likelihood=lw.likelihoods.Gaussian(noise)",
    "temperature": "tuned(method='validation', data=held_out), which picks one",
    "train_loader": "data=",
    "backend": "factor= ('exact', 'monte_carlo' or 'empirical')",
}


@given.keywords(ELSEWHERE)
@torch.inference_mode(False)
def laplace(
    model: nn.Module,
    data: Any,
    likelihood: Any,
    *,
    structure: Any = "auto",
    subset: Any = "all",
    prior: Any = 1.0,
    factor: Any = "auto",
    forward: Any = None,
    memory_budget: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
) -> Laplace:
    """Turn a trained network into a Bayesian one, by one pass over its training data.

    data: (X, y) of tensors, arrays, frames or lists, a Dataset, a DataLoader, or a mapping with "labels"; floating
    inputs are cast to the network's dtype.
    likelihood: "classification" or "regression", with which tuned() also chooses how predictions are made; or a key of
    LIKELIHOODS or an object of lw.likelihoods, which is taken at its word.
    structure: "auto", a key of STRUCTURES or an object.
    subset: "all", "last_layer", globs, {name: mask} or one bool vector.
    prior: a precision, "layerwise", "gprior", {glob: precision} or an object. factor: "auto", "exact", "monte_carlo",
    "empirical", "hessian" or an object. memory_budget: bytes of working memory (1 GiB; 2e9 is 2 GB).
    process_group: "world" or a torch.distributed group, each process of which calls this with its own shard of the data
    (see docs/guide/scaling.md); the result is the same on all, and so must be every call of its methods.
    checkpoint: a file that is written after every `every` batches (100); a fit that finds it there goes on from it to
    the same bits, and refuses that of another fit; it is removed when the fit is done (see docs/guide/continual.md).
    """
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("reading the arguments"):
        budget, task = as_budget(memory_budget), task_of(likelihood)
        likelihood = likelihood if task else as_likelihood(likelihood)
    batches = as_shard(data, ranks)
    tangent = as_tangent(model, batches, subset, forward)
    if task:
        likelihood = as_task(task, tangent.output_shape(first_inputs(batches, tangent.device))[1])
    with ranks.sharing_errors("reading the prior"):
        bound = as_prior(prior, tangent.layout, tangent.device)
    ranks.agree(
        facts(tangent, likelihood, bound, structure, factor, budget, generator),
        "Give every rank the same network (load one file, or broadcast the weights) and the same arguments",
    )
    seen = probe(tangent, batches, likelihood)
    chosen = as_structure(STRUCTURE_OF.get(task, structure) if structure == "auto" else structure, seen, budget)
    likelihood = likelihood.to(tangent.device)
    state = accumulate(
        chosen,
        tangent,
        likelihood,
        batches,
        as_factor(factor, seen, likelihood, chosen),
        generator=generator,
        progress=progress,
        seen=seen,
        checkpoint=checkpoint,
        every=every,
    )
    expected = seen.n - ranks_of(batches).count(dropped(batches), "dropped examples")
    if state.n != expected:
        raise InvalidValue(
            f"the data gave {expected} examples in one pass and {state.n} in another; curvature and "
            "evidence are sums over data: give a loader that holds the same examples in every pass"
        )
    made = _assemble(state, placed(bound, state), likelihood, budget)
    return replace(made, data=batches, mean="auto" if task else "network")


def from_state(state: State, model: nn.Module, prior: Any, likelihood: Any) -> Laplace:
    """A Laplace object from a state (merged from shards, say) and the network that it was accumulated at."""
    tangent = state.tangent
    shapes = {n: list(s) for n, s in tangent.layout.shapes.items()}
    fresh = linearize(model, _selected(model, tangent.layout, "the state"), forward=tangent.forward)
    io.check_weights(fresh, state.fingerprints, shapes, "the state")
    device = fresh.device
    return _assemble(
        replace(state, tangent=fresh),
        placed(as_prior(prior, fresh.layout, device), state),
        as_likelihood(likelihood).to(device),
        BUDGET,
    )


@torch.inference_mode(False)
def load(path: str | os.PathLike[str], model: nn.Module, *, forward: Any = None, data: Any = None) -> Any:
    """Load what `save` wrote, for the network that it was fitted at: a Laplace object, or a posterior of another kind.

    A fit with a forward hook needs the same hook again: functions are not saved. Nor are data: what reads them again
    (another prior under matrix_free, a tangent center, a certificate) needs data=, those of the fit. A mixture holds
    the weights of its members' networks; any network of their architecture will do.
    """
    content = files.read(path, io.SCHEMA)
    try:
        found = _loaded(content, model, forward, path)
    except BrokenFile as error:
        raise BrokenFile(f"{path} is broken: {error}; save it again") from error
    if data is None:
        return found
    if not isinstance(found, Laplace):
        raise InvalidValue(f"{path} holds {found!r}, which reads no data again; drop data=")
    return found.attached(data)


def _loaded(content: io.Content, model: nn.Module, forward: Any, path: Any) -> Shell:
    tensors, header = content
    kind = header.get("kind")
    if kind not in LOADERS:
        registry.complete()
    if kind not in LOADERS:
        raise BrokenFile(f"it holds a {kind!r}, and Lapwing reads {list(LOADERS)}")
    return LOADERS[kind](tensors, header, model, forward, path)


def _mixture(tensors: dict[str, Tensor], header: dict[str, Any], model: nn.Module, forward: Any, path: Any) -> Blended:
    log_weight, members = io.members_of(tensors, header, path)
    found = (_loaded(own, _with_weights(model, network, path), forward, path) for network, own in members)
    return Blended(tuple(found), log_weight)


def _fit(tensors: dict[str, Tensor], header: dict[str, Any], model: nn.Module, forward: Any, path: Any) -> Fitted:
    saved = io.checked_fit(tensors, header, path)
    tangent = linearized(saved, model, forward, path)
    likelihood, prior = saved.likelihood.to(tangent.device), saved.prior
    prior = None if prior is None else prior.bind(tangent.layout, tangent.device)
    return Fitted(saved.attached(tangent), likelihood, prior, saved.n, saved.targets, saved.made)


def _laplace(tensors: dict[str, Tensor], header: dict[str, Any], model: nn.Module, forward: Any, path: Any) -> Laplace:
    saved = io.checked(tensors, header, path)
    tangent = linearized(saved, model, forward, path)
    device = tangent.device
    state, prior = saved.attached(tangent), saved.prior.bind(tangent.layout, device)
    with sound("its prior"):  # it may have seen the curvature, which may be known by passes over the data alone
        prior = prior.put_back(tangent.theta)
    la = _assemble(state, prior, saved.likelihood.to(device), saved.memory_budget)
    (at, process), temperature = saved.centers_at(device), saved.temperature
    held = None if saved.calibration is None else saved.calibration.to(device)
    la = replace(la, center=saved.center, tuning=saved.tuning, at=at, temperature=temperature)
    la = replace(la, mean=saved.mean, calibration=held, process_at=process)
    if la.streams:
        saved.remind(la.spread.precision)
    return la


# by the kind that a file says it holds; a room above enters its own
LOADERS: dict[str, Callable[..., Shell]] = {"laplace": _laplace, "fitted": _fit, "mixture": _mixture}


def linearized(saved: io.Saved | io.SavedFit, model: nn.Module, forward: Any, path: Any) -> TangentModel:
    """The network, once it is seen to be the one that a file was made at."""
    if saved.forward_hook and forward is None:
        raise InvalidValue(f"{path} was fitted with a forward= hook, which is not saved; pass it to load again")
    shapes = {name: list(shape) for name, shape in saved.layout.shapes.items()}
    tangent = linearize(model, _selected(model, saved.layout, path), forward=forward)
    io.check_weights(tangent, saved.fingerprints, shapes, path)
    return tangent


def _with_weights(model: nn.Module, network: dict[str, Tensor], path: Any) -> nn.Module:
    """A copy of the network with the weights of a mixture's member."""
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = copy.deepcopy(unwrapped(model))
    here = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    wrong = [name for name in {**here, **network} if name not in here or name not in network]
    wrong += [name for name in network if name in here and network[name].shape != here[name].shape]
    if wrong:
        raise InvalidValue(f"{path} was saved from another architecture: {wrong[0]} is not the same on both sides")
    with torch.no_grad():
        for name, value in network.items():
            here[name].copy_(value)
    return found


def _assemble(state: State, prior: priors.Prior, likelihood: likelihoods.Likelihood, budget: int) -> Laplace:
    likelihood = check_served(check_sums(state), likelihood)
    treated = state.layout.shapes.keys() | state.coverage.keys()
    frozen = tuple(n for n, _ in state.tangent.model.named_parameters() if n not in treated)
    return Laplace(state, prior, likelihood, memory_budget=budget, frozen=frozen)


def _selected(model: nn.Module, layout: tree.Layout, where: Any) -> dict[str, Tensor]:
    """What was selected as {name: mask}, once the model is seen to have each parameter in its shape."""
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"model must be a torch.nn.Module, got {type(model).__name__}")
    named = dict(unwrapped(model).named_parameters())
    for name in (*layout.shapes, *layout.empty):
        if name not in named:
            raise InvalidValue(f"{where} was saved from another architecture: the model has no parameter {name}")
        here, saved = named[name].shape, layout.shapes.get(name)
        if here != saved and (saved is not None or here.numel()):
            then = tuple(saved) if saved is not None else "no elements"
            raise InvalidValue(f"{where}: parameter {name} has shape {tuple(here)} here and {then} when saved")
    whole = {name: torch.ones(named[name].shape, dtype=torch.bool) for name in (*layout.shapes, *layout.empty)}
    return whole | layout.masks
