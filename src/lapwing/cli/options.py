"""The arguments and options of the commands, each written once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lapwing.cli.ranks import first

SOURCE = ".npz, .csv, .parquet or module:loader"

Factory = Annotated[str, typer.Argument(help="module:factory, a function that returns the network", show_default=False)]
Weights = Annotated[
    Path | None, typer.Option(help="its state_dict: .safetensors, or by torch.save", show_default=False)
]
TrainData = Annotated[str, typer.Option("--data", help=f"training data: {SOURCE}", show_default=False)]
NewData = Annotated[str, typer.Option("--data", help=f"data it was not trained on: {SOURCE}", show_default=False)]
Inputs = Annotated[list[str] | None, typer.Option(help="names of inputs in the data", show_default=False)]
Target = Annotated[list[str] | None, typer.Option(help="names of targets in the data", show_default=False)]
Likelihood = Annotated[str, typer.Option(help="classification, regression, or a likelihood", show_default=False)]
Structure = Annotated[str, typer.Option(help="auto, full, kron, ekfac, block, diag, lowrank, matrix_free")]
Subset = Annotated[list[str] | None, typer.Option(help="all, last_layer, or names of parameters such as 'head.*'")]
Memory = Annotated[float | None, typer.Option(help="bytes of working memory: 2e9 is 2 GB", show_default=False)]
Fit = Annotated[Path, typer.Option(help="what `lapwing fit` or `tune` wrote", show_default=False)]
Out = Annotated[Path, typer.Option(help="the file to write", show_default=False)]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps ...")]
Json = Annotated[bool, typer.Option("--json", help="figures as JSON on stdout, and nothing else there")]
Progress = Annotated[bool | None, typer.Option("--progress/--no-progress", help="bars on stderr; else at a terminal")]
Debug = Annotated[bool, typer.Option("--debug", help="errors with their tracebacks")]  # read by app.Command


def watched(progress: bool | None) -> bool:
    """Whether this process shows bars: unless told, where somebody looks."""
    return first() and (sys.stderr.isatty() if progress is None else progress)
