"""`tessera mesh`: machines from descriptor files and presets, as pictures and as files.

>>> from typer.testing import CliRunner
>>> print(CliRunner().invoke(mesh, ["show", "n300", "--format", "yaml"]).output.splitlines()[0])
name: n300
"""

from __future__ import annotations

import json as js
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ..core.errors import TesseraError, UsageError
from ..core.machine.presets import PRESETS, preset

mesh = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Machines and their links.")
Format = Literal["picture", "textproto", "yaml"]


@mesh.command()
def show(
    source: Annotated[str, typer.Argument(help="A .textproto or .yaml file, or a preset's name.")],
    mesh_id: Annotated[int | None, typer.Option(help="One mesh of a graph of meshes.")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="The size of the outermost level.", min=1)
    ] = None,
    format: Annotated[Format | None, typer.Option(help="What is printed (picture).")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write it to this file instead, as its name says.")
    ] = None,
) -> None:
    """Draws a machine: its levels of links, devices and hosts. Reports every fault of a file."""
    from ..core.machine import cluster_yaml, load, mesh_graph_text
    from ..show.machine_picture import render_machine

    try:
        if write is not None and format is not None:
            raise UsageError(
                f"--format {format} has no effect with --write: the name of the file says it",
                fix="leave --format out, and end the name in .yaml or .textproto",
                at="",
            )
        machine = load.load(source, mesh_id)
        if nodes is not None:
            machine = machine.of(nodes)
        if write is not None:
            load.save(machine, write)
            typer.echo(f"{write}: {machine.topology}")
        elif format in (None, "picture"):
            Console().print(render_machine(machine))
        else:
            writer = cluster_yaml if format == "yaml" else mesh_graph_text
            typer.echo(writer.write(machine), nl=False)
    except TesseraError as error:
        typer.echo(_told(error), err=True)
        raise typer.Exit(2) from None


def _told(error: TesseraError) -> str:
    """Returns the text of an error without its "at" row, as there is no user code here."""
    return "\n".join(x for x in str(error).splitlines() if x.split(" : ")[0].strip() != "at")


@mesh.command()
def presets(
    json: Annotated[bool, typer.Option("--json", help="Prints the list as JSON.")] = False,
) -> None:
    """Lists the described machines."""
    if json:
        typer.echo(
            js.dumps({name: [str(x) for x in preset(name).topology.levels] for name in PRESETS})
        )
        return
    for name in PRESETS:
        levels = preset(name).topology.levels
        typer.echo(f"{name:<12} {' x '.join(map(str, levels))}")
