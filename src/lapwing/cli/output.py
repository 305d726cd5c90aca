"""What the commands say: figures on stdout, all else on stderr, and rank 0 alone.

stdout has a table or, with --json, one object of JSON and nothing else: what the user's modules print goes to stderr.
Warnings, errors and an interruption are a line each.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lapwing.cli.ranks import first
from lapwing.distributed.meeting import SHARED
from lapwing.errors import LapwingError, LapwingWarning

FINDING, ERROR, INTERRUPTED = 1, 2, 130  # exit codes
WIDTH = 120  # of tables in a pipe or a file
STYLES = {"error": "bold red", "warning": "yellow", "interrupted": "yellow"}


class Output:
    """Where the figures of a command go."""

    def __init__(self, stdout: TextIO) -> None:
        self.stdout = stdout

    def figures(self, values: Mapping[str, Any], as_json: bool, shown: Any = None) -> None:
        """One object of JSON; or what is shown for it, names and values unless given."""
        if not first():
            return
        if as_json:
            self.stdout.write(json.dumps(plain(values), allow_nan=False) + "\n")
            return
        width = None if self.stdout.isatty() else WIDTH
        console = Console(file=self.stdout, highlight=False, markup=False, width=width)
        console.print(listed(values) if shown is None else shown, soft_wrap=isinstance(shown, str))


def listed(values: Mapping[str, Any]) -> Table:
    """Names and values, a row each."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in values.items():
        table.add_row(Text(name.replace("_", " ")), Text(f"{value:.6g}" if isinstance(value, float) else str(value)))
    return table


def tabled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with a head; numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def plain(value: Any) -> Any:
    """As JSON has it: names, lists and numbers; null for a number that JSON has not."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (int, str, type(None))) else str(value)


def say(kind: str, text: object) -> None:
    """ "error: ..." on stderr, in one line."""
    line = Text.assemble((kind, STYLES.get(kind, "")), ": ", " ".join(str(text).split()))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


@contextlib.contextmanager
def heard(debug: bool) -> Iterator[None]:
    """The run of a command: prints go to stderr, warnings and errors become lines, errors exit codes. debug: with
    tracebacks."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("default", LapwingWarning)
        warnings.showwarning = _warned
        try:
            yield
        except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            raise typer.Exit(_told(error)) from error


def _warned(message: Warning | str, *place: Any, **more: Any) -> None:
    if first():
        say("warning", message)


def _told(error: BaseException) -> int:
    """Say it, unless rank 0 says it too; the exit code."""
    if not first() and getattr(error, SHARED, False):
        return ERROR
    if isinstance(error, KeyboardInterrupt):
        say("interrupted", error if error.args else "the command was not finished")
        return INTERRUPTED
    known = isinstance(error, LapwingError)
    text = str(error) if known else f"unexpected {type(error).__name__}: {error}; --debug shows where"
    say("error", text if first() else f"rank {os.environ['RANK']}: {text}")
    return ERROR
