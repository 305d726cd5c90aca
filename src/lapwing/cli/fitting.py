"""The commands before and at a fit: `doctor`, `fit`, `tune`. Over torchrun's processes `fit` and `tune` share the data
out. A file is written at the end, whole or not at all."""

from __future__ import annotations

import ast
import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import lapwing as lw
from lapwing import files
from lapwing.api.words import facts
from lapwing.cli import options as o
from lapwing.cli.examples import Source
from lapwing.cli.inputs import device_of, network
from lapwing.cli.output import FINDING
from lapwing.cli.ranks import alone, first, local, together
from lapwing.distributed import Ranks, Shard
from lapwing.errors import InvalidValue

Prior = Annotated[str, typer.Option(help="a precision, layerwise or gprior")]
Checkpoint = Annotated[Path | None, typer.Option(help="a file to stop at and go on from", show_default=False)]
Every = Annotated[int | None, typer.Option(help="batches between checkpoints (100)", show_default=False)]
Method = Annotated[str | None, typer.Option(help="mackay, evidence, em or validation", show_default=False)]
Center = Annotated[str | None, typer.Option(help="tangent, map or process", show_default=False)]
HeldOut = Annotated[str | None, typer.Option(help="other data, for --method validation", show_default=False)]


def doctor(
    ctx: typer.Context,
    factory: o.Factory,
    data: o.TrainData,
    likelihood: o.Likelihood,
    weights: o.Weights = None,
    inputs: o.Inputs = None,
    target: o.Target = None,
    structure: o.Structure = "auto",
    subset: o.Subset = None,
    memory_budget: o.Memory = None,
    device: o.Device = "cpu",
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Say what stands in the way of a fit (exit code 1), and what it would cost."""
    alone()
    model = network(factory, weights, device_of(device))
    examples = Source.of(data, inputs, target).labelled(likelihood)
    report = lw.doctor(
        model, examples, likelihood, structure=structure, subset=_subset(subset), memory_budget=memory_budget
    )
    given = [factory, *_words(weights=weights, data=data, inputs=inputs, target=target)]
    commands = _commands(report.options, given) if report.ok else []
    told = [str(report), *(["", "On the command line"] if commands else []), *(f"  {one}" for one in commands)]
    ctx.obj.figures({"ok": report.ok, **asdict(report), "commands": commands}, as_json, "\n".join(told))
    if not report.ok:
        raise typer.Exit(FINDING)


def fit(
    ctx: typer.Context,
    factory: o.Factory,
    data: o.TrainData,
    likelihood: o.Likelihood,
    out: o.Out,
    weights: o.Weights = None,
    inputs: o.Inputs = None,
    target: o.Target = None,
    structure: o.Structure = "auto",
    subset: o.Subset = None,
    prior: Prior = "1.0",
    memory_budget: o.Memory = None,
    checkpoint: Checkpoint = None,
    every: Every = None,
    device: o.Device = "cpu",
    as_json: o.Json = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Fit a posterior by one pass over the training data, and write it to a file."""
    with _network(factory, weights, device, out) as (model, ranks):
        with ranks.sharing_errors("reading the data"):
            examples = Source.of(data, inputs, target).labelled(likelihood, ranks)
        with _resumable(checkpoint):
            la = lw.laplace(
                model,
                examples,
                likelihood,
                structure=structure,
                subset=_subset(subset),
                prior=_prior(prior),
                memory_budget=memory_budget,
                progress=o.watched(progress),
                process_group=ranks.group,
                checkpoint=checkpoint,
                every=every,
            )
        _finish(ctx, la, out, as_json)


def tune(
    ctx: typer.Context,
    factory: o.Factory,
    fit: o.Fit,
    data: o.TrainData,
    out: o.Out,
    weights: o.Weights = None,
    inputs: o.Inputs = None,
    target: o.Target = None,
    method: Method = None,
    center: Center = None,
    held_out: HeldOut = None,
    device: o.Device = "cpu",
    as_json: o.Json = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Choose the prior and the noise of a fit by its evidence; write the tuned fit."""
    with _network(factory, weights, device, out) as (model, ranks):
        with ranks.sharing_errors("reading the fit and the data"):
            la = lw.load(fit, model)
            if not isinstance(la, lw.Laplace):
                raise InvalidValue(f"{fit} holds {la!r}, which has no prior to tune; give what `lapwing fit` wrote")
            examples = Source.of(data, inputs, target).labelled(la.likelihood, ranks)
            held = held_out and Source.of(held_out, inputs, target).labelled(la.likelihood, ranks)
            la = la.attached(examples if ranks.alone else Shard(examples, ranks))
        la = la.tuned(method, data=held, center=center, progress=o.watched(progress))
        _finish(ctx, la, out, as_json, log_evidence=float(la.log_evidence().detach()))


@contextlib.contextmanager
def _network(factory: str, weights: Path | None, device: str, out: Path) -> Iterator[tuple[nn.Module, Ranks]]:
    """The network, and the processes that share the data, once it is seen that rank 0 can write."""
    place = device_of(local(device))
    with together(place) as ranks:
        with ranks.sharing_errors("reading the network"):
            if first():
                files.check_target(out)
            model = network(factory, weights, place)
        yield model, ranks


@contextlib.contextmanager
def _resumable(checkpoint: Path | None) -> Iterator[None]:
    """An interruption says what is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = checkpoint is not None and any(checkpoint.parent.glob(f"{checkpoint.name}*"))
        told = f"{checkpoint} keeps what was done: call the same command to go on" if kept else "nothing was written"
        raise KeyboardInterrupt(told) from error


def _finish(ctx: typer.Context, la: lw.Laplace, out: Path, as_json: bool, **more: float) -> None:
    """Write the fit, and say what it is."""
    la = la.gathered()
    if first():
        la.save(out)
    told = {**facts(la), **more, "file": out}
    ctx.obj.figures(_figures(la) | more | {"file": out} if as_json else told, as_json)


def _figures(la: lw.Laplace) -> dict[str, Any]:
    return {
        "likelihood": la.likelihood.kind,
        **la.likelihood.hyperparameters,
        "structure": la.state.structure,
        "factor": la.state.factor,
        "parameters": la.state.layout.size,
        "examples": la.n,
        "prior": la.prior.hyperparameters,
        "temperature": la.temperature,
        "tuning": None if la.tuning is None else asdict(la.tuning),
    }


def _commands(options: Mapping[str, str], given: list[str]) -> list[str]:
    """What fits and tunes as the doctor recommends it."""
    chosen = {name: ast.literal_eval(value) for name, value in options.items()}
    fit = ["lapwing", "fit", *given, *_words(**chosen), "--out", "net.fit"]
    return [shlex.join(fit), shlex.join(["lapwing", "tune", *given, "--fit", "net.fit", "--out", "net.tuned"])]


def _words(**options: Any) -> list[str]:
    """Options as words: the name before each of its values."""
    each = {name: value if isinstance(value, list) else [value] for name, value in options.items() if value is not None}
    return [
        word for name, values in each.items() for one in values for word in (f"--{name.replace('_', '-')}", str(one))
    ]


def _subset(names: list[str] | None) -> Any:
    names = names or ["all"]
    return names[0] if names in (["all"], ["last_layer"]) else names


def _prior(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
