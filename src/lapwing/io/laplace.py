"""A Laplace posterior in a file, as tensors and a JSON header (`files.py` writes and reads it).

The header holds the schema, likelihood, prior, structure, names and shapes of the parameters, N, and a fingerprint
of every weight and buffer. A dual state keeps its inputs, so its file holds data; the header says so.

What a file holds is checked against itself before anything is made of it, when it is written too, and then against the
network: every entry and tensor is one that belongs there, of its type, shape and range.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing import calibration, fixed, tree
from lapwing.calibration import Calibration
from lapwing.center import Center
from lapwing.curvature import Factor, Part, State, Structure
from lapwing.curvature.cover import check_layers
from lapwing.curvature.full import check_batches
from lapwing.curvature.structure import covered
from lapwing.errors import BrokenFile, InvalidValue
from lapwing.io.centers import moved_center, take_center, take_statistics
from lapwing.likelihoods import Likelihood, polarization
from lapwing.operators import Samples, Streamed
from lapwing.packing import (
    Entries,
    Tensors,
    pack_object,
    pack_plain,
    pack_tree,
    sound,
    unpack_object,
    unpack_plain,
    unpack_tree,
)
from lapwing.priors import Prior
from lapwing.solvers.estimate import mean_of
from lapwing.tangent import TangentModel
from lapwing.tree import Layout
from lapwing.tune import Tuning

SCHEMA = 2
SAMPLES = ("residual", "steps", "passes", "solver", "preconditioner")  # of Samples, beside theirs
STRINGS = ("fingerprints", "coverage")  # of a State, {name: string}
NUMBERS: dict[str, tuple[Any, ...]] = {  # of a State, as Entries.take wants them: kind, least and most
    "likelihood": ("str",),
    "terms": ("int", 1),
    "paired": ("bool",),
    "n": ("int", 1, 2**63),
    "targets": ("int | None", 0, 2**64 - 1),
    "lost": ("float", 0, 100),  # decimal digits
}


@dataclass(frozen=True, eq=False)
class Saved:
    """What a file holds, without the network."""

    layout: Layout
    state: dict[str, Any]  # the fields of a State, but for its tangent model
    prior: Prior  # not bound yet
    likelihood: Likelihood
    center: str
    at: Center | None
    tuning: Tuning | None
    samples: Samples | None
    logdet: Tensor | None
    temperature: float
    memory_budget: int
    forward_hook: bool
    mean: str
    calibration: Calibration | None
    process: Center | None

    def attached(self, tangent: TangentModel) -> State:
        """The state, at the network that it was made at."""
        device, held = tangent.device, dict(self.state)
        for kind in ("sums", "statistics", "basis"):
            held[kind] = {key: value.to(device) for key, value in held[kind].items()}
        move = lambda x: tree.map_tensors(lambda t: t.to(device), x)  # noqa: E731
        held["batches"] = tuple((move(x), u.to(device)) for x, u in held["batches"])
        state = State(**held, tangent=tangent)
        with sound("its state at this network"):
            check_layers(state.parts, tangent)
            check_batches(tangent, state.batches)
            coverage = covered(state.structure, state.parts, tangent)
        if coverage != state.coverage:
            raise BrokenFile(f"it says of its parameters {state.coverage}, and they are {coverage}")
        return state

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of every weight and buffer."""
        return self.state["fingerprints"]

    def centers_at(self, device: torch.device) -> tuple[Center | None, Center | None]:
        """The center and that of the process, where they were saved, on a device."""
        return moved_center(self.at, device), moved_center(self.process, device)

    def remind(self, precision: Streamed) -> None:
        """Give a streamed precision what was saved of it."""
        assert self.samples is not None
        device, found = precision.d.device, self.samples
        moved = {name: getattr(found, name).to(device) for name in ("z", "gamma", "squares")}
        precision.remember(replace(found, **moved))
        if self.logdet is not None:
            precision.remember_logdet(mean_of(self.logdet))


# -- packing -----------------------------------------------------------------------------------------------------


def pack_state(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state as tensors and a header."""
    tensors = {f"sums.{k}": v for k, v in state.sums.items()}
    tensors |= {f"statistics.{k}": v for k, v in state.statistics.items()}
    tensors |= {} if state.inputs is None else {"input_sums": state.inputs}
    tensors |= {f"basis.{k}": v for k, v in state.basis.items()}
    masks, layout = pack_layout(state.layout)
    tensors, inputs = tensors | masks, []
    for i, (x, u) in enumerate(state.batches):
        tensors[f"batch.{i}.cotangents"] = u
        inputs.append(pack_tree(x, f"batch.{i}.inputs", tensors))
    header = {
        "structure": pack_object(state.structure, "structure", "structure.", tensors),
        "factor": pack_plain(state.factor),
        **pack_plain(state, [*NUMBERS, *STRINGS]),
        **layout,
        "parts": [pack_plain(part) for part in state.parts],
        "holds_data": state.holds_data,
        "inputs": inputs,
    }
    return tensors, header


def pack_layout(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The names and shapes of the parameters, and their masks."""
    shapes = {name: list(shape) for name, shape in layout.shapes.items()}
    tensors = {f"mask.{name}": mask for name, mask in layout.masks.items()}
    return tensors, {"parameters": shapes, "masks": list(layout.masks), "empty": list(layout.empty)}


def pack_objects(
    prior: Prior, likelihood: Likelihood, tuning: Tuning | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Prior, likelihood and record of tuning as tensors and a header."""
    tensors: dict[str, Tensor] = {}
    return tensors, {
        "prior": pack_object(prior, "prior", "prior.", tensors),
        "likelihood_object": pack_object(likelihood, "likelihood", "likelihood.", tensors),
        "tuning": None if tuning is None else pack_plain(tuning),
    }


def pack_samples(precision: Streamed) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The samples of a streamed precision, solved for if they are not yet, and log|M| where it is known."""
    if not precision.ranks.alone:
        raise InvalidValue(
            f"its samples are spread over {precision.ranks.size} ranks: call la = la.gathered() on every rank, then "
            "save on one of them"
        )
    found = precision.samples
    tensors = {f"samples.{name}": getattr(found, name) for name in ("z", "gamma", "squares")}
    if precision.known_logdet is not None:
        tensors["samples.logdet"] = precision.known_logdet.samples
    return tensors, {"samples": pack_plain(found, SAMPLES), "logdet": "samples.logdet" in tensors}


def check_writable(tensors: dict[str, Tensor], header: dict[str, Any], path: Any) -> None:
    """Raise unless what is about to be written could be read again."""
    try:
        checked(tensors, json.loads(json.dumps(header)), path)
    except (BrokenFile, TypeError) as error:
        raise InvalidValue(f"cannot save to {path}, as it could not be loaded: {error}") from error


# -- checking ----------------------------------------------------------------------------------------------------


def checked(tensors: dict[str, Tensor], header: dict[str, Any], path: Any) -> Saved:
    """What a file holds, once it is seen to belong together."""
    entries, held = Entries(header), Tensors(tensors, path)
    entries.take("schema", "int")
    kind = entries.take("kind", "str")
    layout = take_layout(entries, held)
    likelihood = unpack_object(entries.take("likelihood_object", "dict"), "likelihood", held)
    prior = unpack_object(entries.take("prior", "dict"), "prior", held)
    state = _state(entries, held, layout, likelihood)
    if kind != state["structure"].shell:
        raise BrokenFile(f"it holds a {kind!r}, and its structure is {state['structure']}")
    with sound("its prior"):
        groups = len(prior.bind(layout).counts())
    samples, logdet = _samples(entries, held, state, layout, groups)
    tuning = entries.take("tuning", "dict | None")
    with sound("its tuning"):
        tuning = None if tuning is None else Tuning(**unpack_plain(Tuning, tuning, "its tuning"))
    center, at = entries.take("center", "str"), take_center(entries, held, layout, likelihood, state["n"])
    if center != ("map" if at is None else "tangent" if at.constant is None else "process"):
        raise BrokenFile(f"it is centered at {center!r}, and {'has no' if at is None else 'has a'} tangent center")
    temperature, budget = entries.take("temperature", "float", math.ulp(0.0)), entries.take("memory_budget", "int", 1)
    rest = samples, logdet, temperature, budget, entries.take("forward_hook", "bool"), entries.take("mean", "str")
    process = take_center(entries, held, layout, likelihood, state["n"], "process")
    chosen = calibration.unpack(entries, held)
    _check_mean(rest[-1], chosen, temperature, process)
    entries.done()
    held.done()
    return Saved(layout, state, prior, likelihood, center, at, tuning, *rest, chosen, process)


def _check_mean(mean: str, chosen: Calibration | None, temperature: float, process: Center | None) -> None:
    """That a calibration is what predictions are about, at its own temperature, and with the process that it mixes."""
    if mean not in ("network", "auto") or (chosen is not None and mean != "auto"):
        raise BrokenFile(f"its predictions are about {mean!r}")
    if chosen is not None and (chosen.choice.scale != temperature or bool(chosen.process) != (process is not None)):
        raise BrokenFile(f"its calibration ({chosen}) belongs to another posterior")


def take_layout(entries: Entries, held: Tensors) -> Layout:
    """The parameters, with masks that select some of their elements, and not all."""
    shapes = entries.take("parameters", "dict")
    for name, shape in shapes.items():
        if type(shape) is not list or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise BrokenFile(f"it has a parameter {name} of shape {shape}")
    masks = {}
    for name in entries.take("masks", "list"):
        if type(name) is not str or name not in shapes:
            raise BrokenFile(f"it has a mask for {name!r}, which is no parameter of it")
        masks[name] = held.take(f"mask.{name}", tuple(shapes[name]), torch.bool)
        if not bool(masks[name].any()) or bool(masks[name].all()):
            raise BrokenFile(f"its mask of {name} selects all or nothing")
    if not shapes:
        raise BrokenFile("it has no parameters")
    empty = entries.take("empty", "list")
    if not all(type(name) is str and name not in shapes for name in empty) or len(set(empty)) < len(empty):
        raise BrokenFile(f"it has parameters without elements {empty}, among others {list(shapes)}")
    return Layout({name: torch.Size(shape) for name, shape in shapes.items()}, masks, tuple(empty))


def _state(entries: Entries, held: Tensors, layout: Layout, likelihood: Likelihood) -> dict[str, Any]:
    with sound("its output factor"):
        factor = Factor(**unpack_plain(Factor, entries.take("factor", "dict"), "its output factor"))
    structure = unpack_object(entries.take("structure", "dict"), "structure", held)
    specs = [unpack_plain(Part, spec, "its part") for spec in entries.take("parts", "list")]
    parts = tuple(Part(**spec) for spec in specs)
    numbers = {name: entries.take(name, *kind) for name, kind in NUMBERS.items()}
    terms, n = numbers["terms"], numbers["n"]
    sums, basis = _sums(held, structure, layout, parts, terms, factor)
    out = {
        "structure": structure,
        "factor": factor,
        **numbers,
        **{name: take_strings(entries, name) for name in STRINGS},
        "parts": parts,
        "sums": sums,
        "basis": basis,
        "statistics": take_statistics(held, "statistics.", likelihood, n),
        "batches": _batches(entries, held, structure, likelihood, terms, n),
        "inputs": _input_sums(held, n),
    }
    _check_curvature_weights(likelihood, out)
    return out


def _input_sums(held: Tensors, n: int) -> Tensor | None:
    """By which the data are known again (fixed.py); NaN stands for inputs that cannot be."""
    if "input_sums" not in held.left:
        return None
    found = held.take("input_sums", (fixed.SUMS,), torch.float64)
    if float(found[0]) != n or bool(found.isinf().any()):
        raise BrokenFile(f"its sums over the inputs are of {float(found[0]):g} examples, and it has {n}")
    return found


def take_strings(entries: Entries, key: str) -> dict[str, str]:
    """An entry {name: string}."""
    found = entries.take(key, "dict")
    if not all(type(value) is str for value in found.values()):
        raise BrokenFile(f"its {key} are not strings")
    return found


def _sums(
    held: Tensors, structure: Structure, layout: Layout, parts: tuple[Part, ...], terms: int, factor: Factor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those that the structure says it keeps; a structure that does not say may keep any numbers."""
    with sound(f"its structure ({structure})"):
        kept = structure.keeps(layout, parts, terms, factor)
    if kept is None:
        return tuple({k: held.finite(f"{kind}.{k}") for k in held.under(f"{kind}.")} for kind in ("sums", "basis"))  # type: ignore[return-value]
    return held.expected("sums.", kept[0]), held.expected("basis.", kept[1])


def _batches(
    entries: Entries, held: Tensors, structure: Structure, likelihood: Likelihood, terms: int, n: int
) -> tuple[tuple[Any, Tensor], ...]:
    """Inputs and cotangents, of a dual state only."""
    specs = entries.take("inputs", "list")
    if len({entries.take("holds_data", "bool"), bool(specs), structure.keeps_rows}) > 1:
        raise BrokenFile(f"it holds {len(specs)} batches of data, and its structure is {structure}")
    columns = polarization.outputs(terms) if likelihood.paired else terms
    out, seen = [], 0
    for i, spec in enumerate(specs):
        x, u = unpack_tree(spec, held), held.finite(f"batch.{i}.cotangents")
        if u.ndim < 3 or not u.numel() or u.shape[1] % columns:
            raise BrokenFile(f"its batch {i} has cotangents of shape {tuple(u.shape)}")
        for t in tree.tensors(x):
            if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                raise BrokenFile(f"its batch {i} has NaN or infinite inputs")
        out.append((x, u))
        seen += len(u)
    if seen > n:
        raise BrokenFile(f"it is of {n} examples and holds {seen}")
    return tuple(out)


def _check_curvature_weights(likelihood: Likelihood, state: dict[str, Any]) -> None:
    """That the curvature is this likelihood's: its kind, and the number of its weights."""
    with sound("its likelihood"):
        terms = len(likelihood.curvature_weights(state["factor"].kind))
    if likelihood.kind != state["likelihood"] or likelihood.paired is not state["paired"]:
        raise BrokenFile(f"it holds the likelihood {likelihood.kind}, and its curvature is of {state['likelihood']}")
    pairs = polarization.outputs(state["terms"]) if state["paired"] else 0
    if terms not in (1, state["terms"]) or (state["paired"] and pairs * (pairs + 1) // 2 != state["terms"]):
        raise BrokenFile(f"its likelihood has {terms} curvature weights, and its curvature {state['terms']}")


def _samples(
    entries: Entries, held: Tensors, state: dict[str, Any], layout: Layout, groups: int
) -> tuple[Samples | None, Tensor | None]:
    """Of matrix_free, and of no other structure."""
    structure, double = state["structure"], torch.float64
    if not structure.streams:
        return None, None
    found = unpack_plain(Samples, entries.take("samples", "dict"), "its samples", SAMPLES)
    k = structure.samples
    z = held.finite("samples.z", (k, layout.size), double)
    gamma = held.finite("samples.gamma", (k, groups), double)
    squares = held.finite("samples.squares", (k, state["terms"]), double)
    logdet = held.finite("samples.logdet", dtype=double) if entries.take("logdet", "bool") else None
    if found["solver"] != structure.solver or (logdet is not None and (logdet.ndim != 1 or len(logdet) < 2)):
        raise BrokenFile(f"its samples were not made by {structure}")
    return Samples(z, gamma, squares, **found), logdet


# -- against the network -----------------------------------------------------------------------------------------


def check_weights(tangent: TangentModel, fingerprints: dict[str, str], shapes: dict[str, list[int]], path: Any) -> None:
    """Raise, naming the first parameter that differs, unless the network is the one that was saved."""
    mine, all_weights = tangent.fingerprints(), {**tangent.constants, **tangent.embed(tangent.params)}
    for name, shape in shapes.items():
        if name not in mine:
            raise InvalidValue(f"{path} was saved from another architecture: the model has no parameter {name}")
        here = all_weights[name].shape
        if list(here) != shape:
            raise InvalidValue(f"{path}: parameter {name} has shape {tuple(here)} here and {tuple(shape)} in the file")
    for name in {**fingerprints, **mine}:
        if name not in fingerprints or name not in mine:
            raise InvalidValue(f"{path} was saved from another architecture: {name} is on one side only")
        if fingerprints[name] != mine[name]:
            raise InvalidValue(f"{path} was saved at other weights: {name} differs; load the weights it was fitted at")
