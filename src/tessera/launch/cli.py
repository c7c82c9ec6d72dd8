"""`tessera`: the command line.

>>> from typer.testing import CliRunner
>>> CliRunner().invoke(app, ["flight", "nothing.json"]).exit_code
2
"""

from __future__ import annotations

import json as js
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..core.errors import TesseraError
from ..core.version import VERSION
from ..observe.flight import load_dump, render_dump
from ..train.cli import one_line
from . import commands
from . import run as launcher
from .calibrate_cli import calibrate
from .ckpt_cli import ckpt
from .doctor.command import doctor
from .generate_cli import generate
from .info_cli import info
from .mesh_cli import mesh
from .plan_cli import plan
from .train_cli import train
from .tune_cli import tune


class Commands(TyperGroup):
    """The commands. One that ends with an error of Tessera prints it in one line, and has the exit
    status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TesseraError as error:
            typer.echo(one_line(error), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},  # of all commands
)
app.add_typer(mesh, name="mesh")
app.add_typer(ckpt, name="ckpt")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tessera {VERSION}")
        raise typer.Exit


@app.callback()
def tessera(
    shows_version: Annotated[
        bool,
        typer.Option("--version", help="Shows the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Tensor programs on a named mesh of devices."""


@app.command()
def flight(
    dump: Annotated[Path, typer.Argument(help="A tessera-flight-*.json that a program left.")],
    last: Annotated[int, typer.Option(help="How many records of each rank.", min=1)] = 8,
    json: Annotated[bool, typer.Option("--json", help="Prints all records as JSON.")] = False,
) -> None:
    """Shows the last records of each rank, and the differences between ranks."""
    found = load_dump(dump)
    if json:
        typer.echo(js.dumps(js.loads(dump.read_text())))
        return
    console = Console()
    for part in render_dump(found, last):
        console.print(part)


app.command(context_settings=launcher.CONTEXT)(launcher.run)
app.command()(doctor)
app.command()(info)
app.command()(calibrate)
app.command()(plan)
app.command()(train)
app.command()(generate)
app.command(context_settings=launcher.CONTEXT)(tune)


def main() -> None:
    app()


def tt_run() -> None:
    """`tt-run`: the launcher under the name in the guides of TT-NN."""
    sys.argv.insert(1, "run")
    app(obj="mpi" if commands.has("mpi") else None)


if __name__ == "__main__":
    main()
