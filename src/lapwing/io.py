"""Saving and loading: what goes into a file, as tensors and a JSON header (`files.py` writes and reads it).

The header holds the schema, likelihood, prior, structure, names and shapes of the parameters, N, and a fingerprint
of every weight and buffer. A dual state keeps its inputs, so its file holds data; the header says so.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from lapwing import curvature, likelihoods, priors
from lapwing.center import Center
from lapwing.curvature import Factor, Part, State
from lapwing.errors import InvalidValue
from lapwing.files import pack_tree, unpack_tree
from lapwing.operators import Samples, Streamed
from lapwing.solvers.estimate import mean_of
from lapwing.tangent import TangentModel
from lapwing.tree import Layout

SCHEMA = 1


# -- states ------------------------------------------------------------------------------------------------------


def pack_state(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"sums.{k}": v for k, v in state.sums.items()}
    tensors |= {f"statistics.{k}": v for k, v in state.statistics.items()}
    tensors |= {} if state.inputs is None else {"inputs": state.inputs}
    tensors |= {f"basis.{k}": v for k, v in state.basis.items()}
    tensors |= {f"mask.{k}": v for k, v in state.layout.masks.items()}
    inputs = []
    for i, (x, u) in enumerate(state.batches):
        tensors[f"batch.{i}.cotangents"] = u
        inputs.append(pack_tree(x, f"batch.{i}.inputs", tensors))
    header = {
        "structure": {"kind": type(state.structure).__name__, **_fields(state.structure)},
        "factor": {"kind": state.factor.kind, "samples": state.factor.samples},
        "likelihood": state.likelihood,
        "weights": state.weights,
        "paired": state.paired,
        "parameters": {name: list(shape) for name, shape in state.layout.shapes.items()},
        "n": state.n,
        "targets": state.targets,
        "lost": state.lost,
        "fingerprints": state.fingerprints,
        "parts": [asdict(part) for part in state.parts],
        "coverage": state.coverage,
        "holds_data": state.holds_data,
        "inputs": inputs,
    }
    return tensors, header


def unpack_state(tensors: dict[str, Tensor], header: dict[str, Any], tangent: TangentModel) -> State:
    """A state, attached to a tangent model that must be the one it was made at."""
    device = tangent.device
    part = {
        kind: {k.removeprefix(f"{kind}."): v.to(device) for k, v in tensors.items() if k.startswith(f"{kind}.")}
        for kind in ("sums", "statistics", "basis")
    }
    structure = dict(header["structure"])
    return State(
        structure=getattr(curvature, structure.pop("kind"))(**structure),
        factor=Factor(**header["factor"]),
        likelihood=header["likelihood"],
        weights=header["weights"],
        tangent=tangent,
        fingerprints=header["fingerprints"],
        n=header["n"],
        statistics=part["statistics"],
        sums=part["sums"],
        basis=part["basis"],
        batches=tuple(
            (unpack_tree(spec, tensors, device), tensors[f"batch.{i}.cotangents"].to(device))
            for i, spec in enumerate(header["inputs"])
        ),
        parts=tuple(Part(**{**part, "shape": tuple(part["shape"])}) for part in header["parts"]),
        coverage=header["coverage"],
        targets=header.get("targets"),
        inputs=tensors.get("inputs"),
        paired=header.get("paired", False),
        lost=header.get("lost", 0.0),
    )


def check_weights(
    tangent: TangentModel, fingerprints: dict[str, str], parameters: dict[str, list[int]], path: Any
) -> None:
    """Raise, naming the first parameter that differs, unless the network is the one that was saved."""
    mine = tangent.fingerprints()
    for name, shape in parameters.items():
        if name not in mine:
            raise InvalidValue(f"{path} was saved from another architecture: the model has no parameter {name}")
        here = {**tangent.constants, **tangent.embed(tangent.params)}[name].shape
        if list(here) != shape:
            raise InvalidValue(f"{path}: parameter {name} has shape {tuple(here)} here and {tuple(shape)} in the file")
    for name in {**fingerprints, **mine}:
        if name not in fingerprints or name not in mine:
            raise InvalidValue(f"{path} was saved from another architecture: {name} is on one side only")
        if fingerprints[name] != mine[name]:
            raise InvalidValue(f"{path} was saved at other weights: {name} differs; load the weights it was fitted at")


def _fields(structure: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(structure).items() if isinstance(v, (str, int, float, bool))}


# -- the tangent center ------------------------------------------------------------------------------------------


def pack_center(center: Center | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if center is None:
        return {}, {"tangent_map": None}
    tensors = {"center.vector": center.vector}
    tensors |= {f"center.statistics.{k}": v for k, v in center.statistics.items()}
    kept = {"iterations": center.iterations, "residual": center.residual, "passes": center.passes}
    return tensors, {"tangent_map": kept}


def unpack_center(tensors: dict[str, Tensor], header: dict[str, Any], device: torch.device) -> Center | None:
    kept = header.get("tangent_map")
    if kept is None:
        return None
    prefix = "center.statistics."
    statistics = {k.removeprefix(prefix): v.to(device) for k, v in tensors.items() if k.startswith(prefix)}
    return Center(tensors["center.vector"].to(device), statistics, **kept)


# -- samples -----------------------------------------------------------------------------------------------------


def pack_samples(precision: Streamed) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The samples of a streamed precision, solved for if they are not yet, and log|M| where it is known."""
    if not precision.ranks.alone:
        raise InvalidValue(
            f"its samples are spread over {precision.ranks.size} ranks: call la = la.gathered() on every rank, then "
            "save on one of them"
        )
    found = precision.samples
    tensors = {f"samples.{name}": getattr(found, name) for name in ("z", "gamma", "squares")}
    known = precision.cache.get("logdet")
    if known is not None and known[0] == precision.key:
        tensors["samples.logdet"] = known[1].samples
    told = ("residual", "steps", "passes", "solver", "preconditioner")
    return tensors, {"samples": {name: getattr(found, name) for name in told}}


def unpack_samples(tensors: dict[str, Tensor], header: dict[str, Any], precision: Streamed) -> None:
    """Give a streamed precision what was saved of it."""
    saved: dict[str, Any] = {n: tensors[f"samples.{n}"].to(precision.d.device) for n in ("z", "gamma", "squares")}
    precision.remember(Samples(**saved, **header["samples"]))
    if "samples.logdet" in tensors:
        precision.cache["logdet"] = precision.key, mean_of(tensors["samples.logdet"])


# -- priors and likelihoods --------------------------------------------------------------------------------------


def pack_objects(prior: Any, likelihood: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _check_known(prior, priors)
    tensors = {f"prior.{k}": v for k, v in prior.hyperparameters.items()}
    tensors["prior.mean"] = priors.Gaussian.mean_vector(prior)
    per = prior.per if isinstance(prior.per, str) else list(prior.per)
    return tensors, {
        "prior": {"kind": type(prior).__name__, "per": per, "floor": getattr(prior, "floor", None)},
        "likelihood_object": _pack_likelihood(likelihood, "likelihood.", tensors),
    }


def _check_known(thing: Any, known: Any) -> None:
    if getattr(known, type(thing).__name__, None) is not type(thing):
        raise InvalidValue(
            f"cannot save a {type(thing).__name__} defined outside Lapwing: save la.state's parts yourself"
        )


def _pack_likelihood(likelihood: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Its fields: tensors, numbers, and the likelihood that it wraps."""
    _check_known(likelihood, likelihoods)
    spec: dict[str, Any] = {"kind": type(likelihood).__name__}
    for name, value in ((f.name, getattr(likelihood, f.name)) for f in fields(likelihood)):
        if isinstance(value, Tensor):
            tensors[f"{prefix}{name}"] = value
        elif isinstance(value, likelihoods.Likelihood):
            spec[name] = _pack_likelihood(value, f"{prefix}{name}.", tensors)
        else:
            spec[name] = value
    return spec


def _unpack_likelihood(spec: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> Any:
    kind = getattr(likelihoods, spec["kind"])
    known = {f.name: tensors.get(f"{prefix}{f.name}") for f in fields(kind)}
    for name, value in spec.items():
        if name != "kind":
            known[name] = _unpack_likelihood(value, f"{prefix}{name}.", tensors) if isinstance(value, dict) else value
    return kind(**known)


def unpack_objects(tensors: dict[str, Tensor], header: dict[str, Any], layout: Layout) -> tuple[Any, Any]:
    per = header["prior"]["per"]
    mean = tensors["prior.mean"]
    floor = header["prior"].get("floor")
    prior = getattr(priors, header["prior"]["kind"])(
        precision=tensors["prior.precision"],
        per=per if isinstance(per, str) else tuple(per),
        mean=float(mean[0]) if bool((mean == mean[0]).all()) else layout.unflatten(mean),
        **({} if floor is None else {"floor": floor}),
    )
    return prior, _unpack_likelihood(header["likelihood_object"], "likelihood.", tensors)
