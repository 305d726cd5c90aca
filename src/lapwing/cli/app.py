"""The program: its commands, and how each is run. Typer makes options, help and completion of their signatures."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import lapwing as lw
from lapwing.cli import fitting, judging
from lapwing.cli import options as o
from lapwing.cli.output import Output, heard, say
from lapwing.cli.ranks import alone, first
from lapwing.errors import Unsupported


class Program(TyperGroup):
    """Wrong usage is one line too."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, and end the process with the exit code."""
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.TyperException as error:
            place = getattr(getattr(error, "ctx", None), "command_path", "lapwing")
            if first():
                say("error", f"{error.format_message().rstrip('.')}; see {place} --help")
            code = error.exit_code
        sys.exit(code)


class Command(TyperCommand):
    """Figures go to stdout, all else to stderr; an error is one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the function of the command."""
        ctx.obj = Output(sys.stdout)
        with heard(ctx.params["debug"]):
            return super().invoke(ctx)


def demo(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="folder for the pictures and the page")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="of the split, the networks and their training")] = 0,
    debug: o.Debug = False,
) -> None:
    """Show on real data what error bars change: tables, pictures, one page."""
    alone()
    try:
        from lapwing.demo.run import run
    except ImportError as error:
        raise Unsupported(str(error)) from error
    with contextlib.redirect_stdout(ctx.obj.stdout):  # its tables are the figures
        run(out, seed)


def program(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="the version, and no more")] = False
) -> None:
    """Error bars and evidence for trained networks: fit, tune, evaluate.

    A network is module:factory with its checkpoint; data are a file or module:loader.

    Exit codes: 0 done, 1 a finding of the doctor, 2 an error, 130 interrupted.
    """
    if version:
        typer.echo(f"lapwing {lw.__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app = typer.Typer(
    name="lapwing", cls=Program, callback=program, invoke_without_command=True, pretty_exceptions_enable=False
)
COMMANDS = (
    demo,
    fitting.doctor,
    fitting.fit,
    fitting.tune,
    judging.evaluate,
    judging.predict,
    judging.compare,
    judging.report,
)
for function in COMMANDS:
    app.command(cls=Command)(function)
