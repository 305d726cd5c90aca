"""The commands after a fit: `evaluate`, `predict`, `compare`, `report`. One process's work."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

import lapwing as lw
from lapwing import files
from lapwing.cli import options as o
from lapwing.cli.examples import Source, inputs_of
from lapwing.cli.inputs import device_of, network
from lapwing.cli.output import tabled
from lapwing.cli.ranks import alone
from lapwing.data import as_batches, passes
from lapwing.errors import InvalidValue
from lapwing.metrics import summary

NEEDS: dict[str, tuple[str, ...]] = {".npz": (), ".csv": ("pandas",), ".parquet": ("pandas", "pyarrow")}

Written = Annotated[Path | None, typer.Option("--out", help=f"a file to write: {', '.join(NEEDS)}")]
Factories = Annotated[list[str], typer.Argument(help="module:factory, one for all or one a fit", show_default=False)]
Fits = Annotated[list[Path], typer.Option("--fit", help="what `lapwing tune` wrote; several", show_default=False)]
AllWeights = Annotated[list[Path] | None, typer.Option("--weights", help="a state_dict for all, or one a fit")]
Train = Annotated[str | None, typer.Option(help="training data, for a certificate", show_default=False)]
Unlike = Annotated[str | None, typer.Option(help="inputs unlike the training data", show_default=False)]
HeldOut = Annotated[str | None, typer.Option("--data", help=f"held-out data: {o.SOURCE}", show_default=False)]


def evaluate(
    ctx: typer.Context,
    factory: o.Factory,
    fit: o.Fit,
    data: o.NewData,
    weights: o.Weights = None,
    inputs: o.Inputs = None,
    target: o.Target = None,
    device: o.Device = "cpu",
    as_json: o.Json = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Score predictions on new data, beside those of the network alone."""
    alone()
    model, la = _loaded(factory, weights, fit, device)
    examples = Source.of(data, inputs, target).labelled(la.likelihood)
    y = torch.cat([y for _, y in passes(as_batches(examples), la.tangent.device)])
    fits = {"network": lw.ensembles.deep([model], la.likelihood.plain)} if isinstance(la, lw.Laplace) else {}
    fits["posterior"] = la
    x = inputs_of(examples)
    scores = {name: summary(one.predict(x, progress=o.watched(progress)), y) for name, one in fits.items()}
    rows = [[name, *(f"{value:.4f}" for value in row.values())] for name, row in scores.items()]
    shown = tabled([f"{len(y):,} examples", *scores["posterior"]], rows)
    ctx.obj.figures({"examples": len(y), **scores}, as_json, shown)


def predict(
    ctx: typer.Context,
    factory: o.Factory,
    fit: o.Fit,
    data: o.NewData,
    weights: o.Weights = None,
    out: Written = None,
    inputs: o.Inputs = None,
    target: o.Target = None,
    device: o.Device = "cpu",
    as_json: o.Json = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Predict with error bars: into a file, as JSON, or the first few on screen."""
    alone()
    _check_written(out)
    _, la = _loaded(factory, weights, fit, device)
    predicted = la.predict(Source.of(data, inputs, target).unlabelled(), progress=o.watched(progress))
    fields = predicted.to_numpy()
    if out is not None:
        files.write_whole(out, _content(predicted, fields, out))
    shown = repr(predicted) if out is None else f"{len(predicted.f_mean):,} predictions in {out}"
    ctx.obj.figures({"file": out, "examples": len(predicted.f_mean)} if out else fields, as_json, shown)


def compare(
    ctx: typer.Context,
    factories: Factories,
    fits: Fits,
    weights: AllWeights = None,
    data: HeldOut = None,
    inputs: o.Inputs = None,
    target: o.Target = None,
    device: o.Device = "cpu",
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Hold fits against each other by their evidence, and by held-out data."""
    alone()
    if len(set(fits)) < len(fits):
        raise InvalidValue("a fit is named twice; name each once")
    made = _one_each(factories, fits, "factories")
    read = _one_each(weights or [None], fits, "--weights")
    found = {
        str(fit): _loaded(factory, one, fit, device)[1] for fit, factory, one in zip(fits, made, read, strict=True)
    }
    likelihood = next(iter(found.values())).likelihood
    held_out = None if data is None else Source.of(data, inputs, target).labelled(likelihood)
    comparison = lw.compare(found, held_out)
    values = {"examples": comparison.n, "weights": comparison.weights, "fits": comparison.to_dict()}
    ctx.obj.figures(values, as_json, repr(comparison))


def report(
    ctx: typer.Context,
    factory: o.Factory,
    fit: o.Fit,
    data: o.NewData,
    out: o.Out,
    weights: o.Weights = None,
    train: Train = None,
    ood: Unlike = None,
    inputs: o.Inputs = None,
    target: o.Target = None,
    device: o.Device = "cpu",
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Write a page of HTML that says how good a fit is on new data."""
    alone()
    files.check_target(out)
    _, la = _loaded(factory, weights, fit, device)
    if train is not None:
        la = la.attached(Source.of(train, inputs, target).labelled(la.likelihood))
    unlike = ood and Source.of(ood, inputs, target).unlabelled()
    test = Source.of(data, inputs, target).labelled(la.likelihood)
    la.report(test, out, ood=unlike, certify=None if train is None else True)
    ctx.obj.figures({"file": out}, as_json)


def _loaded(factory: str, weights: Path | None, fit: Path, device: str) -> tuple[nn.Module, Any]:
    model = network(factory, weights, device_of(device))
    return model, lw.load(fit, model)


def _one_each(given: Sequence[Any], fits: Sequence[Path], what: str) -> list[Any]:
    if len(given) not in (1, len(fits)):
        raise InvalidValue(f"{len(fits)} fits take one or {len(fits)} {what}, got {len(given)}")
    return list(given) * (len(fits) if len(given) == 1 else 1)


def _check_written(out: Path | None) -> None:
    if out is None:
        return
    files.check_target(out)
    if out.suffix not in NEEDS:
        raise InvalidValue(f"predictions are written as {', '.join(NEEDS)}; got {out}")
    for missing in (name for name in NEEDS[out.suffix] if importlib.util.find_spec(name) is None):
        raise InvalidValue(f"writing {out} needs {missing}, which is not installed; pip install it, or write .npz")


def _content(predicted: lw.Prediction, fields: dict[str, Any], out: Path) -> bytes:
    """The bytes of a file of predictions."""
    if out.suffix == ".csv":
        return predicted.to_frame().to_csv(index=False).encode()
    buffer = io.BytesIO()
    if out.suffix == ".npz":
        np.savez(buffer, **fields)
    else:
        predicted.to_frame().to_parquet(buffer, index=False)
    return buffer.getvalue()
