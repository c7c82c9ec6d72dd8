"""`tessera tune`: tunes the compiled functions of a script, and shows what is recorded.

>>> from typer.testing import CliRunner
>>> from .cli import app
>>> print(CliRunner().invoke(app, ["tune"]).output)  # doctest: +ELLIPSIS
tune: no script is named (write tessera tune train.py, ...
"""

from __future__ import annotations

import json as js
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..autotune.choices import words
from ..autotune.records import Records
from ..core import environment
from ..core.errors import UsageError
from ..lang.jit.tuner import LIMIT_S, folder
from ..train.cli import one_line


def tune(
    script: Annotated[
        list[str] | None, typer.Argument(help="A Python script, and its arguments.")
    ] = None,
    limit_s: Annotated[
        int, typer.Option(help="Seconds of the search for one program.", min=1)
    ] = int(LIMIT_S),
    show: Annotated[bool, typer.Option("--list", help="Shows the recorded choices.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Deletes the records.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Shows --list as JSON.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Writes all records to this file, as JSON lines.")
    ] = None,
) -> None:
    """Runs a script, and tunes each of its compiled functions at its first call."""
    try:
        if json and not show:
            raise UsageError("tune: --json is for --list", fix="write tune --list --json", at="")
        records = _records(script, show, clear, export)
        if records is not None:
            if export is not None:
                lines = [*dict.fromkeys(line for line in records.lines() if line)]
                export.write_bytes(b"".join(line + b"\n" for line in lines))
                typer.echo(f"{export}: {len(lines)} lines")
            elif clear:
                typer.echo(f"{records.clear()} choices deleted")
            else:
                rows = list(records.table())
                Console().print(_table(rows)) if not json else typer.echo(js.dumps(rows))
            return
    except (UsageError, OSError) as error:
        typer.echo(one_line(error) if isinstance(error, UsageError) else str(error), err=True)
        raise typer.Exit(2) from None
    assert script is not None
    os.environ |= {environment.TUNE: "search", environment.TUNE_LIMIT: str(limit_s)}
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *script])


def _records(
    script: list[str] | None, show: bool, clear: bool, export: Path | None
) -> Records | None:
    """Returns the records to show, clear or export; None if a script is to be run. Raises
    UsageError unless exactly one of these is asked for."""
    asked = [show, clear, export is not None, bool(script)]
    if sum(asked) != 1:
        what = "one thing at a time" if any(asked) else "no script is named"
        fix = "write tessera tune train.py, or one of --list, --clear and --export FILE"
        raise UsageError(f"tune: {what}", fix=fix, at="")
    if script:
        return None
    place = folder()
    if place is None:
        raise UsageError(
            f"tune: nothing is recorded, as {environment.PROGRAM_CACHE} is off",
            fix="unset it, or name a folder",
            at="",
        )
    return Records(place)


def _table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table("program", "arguments", "machine", "chosen", "gain", "timed", box=None)
    for row in rows:
        key = row["key"]
        arguments = f"{key.get('dtype', '')} {key.get('shape', '')}"
        where = f"{key.get('backend', '')} {key.get('arch', '')}"
        gain = f"{row.get('gain', 1.0):.2f}x"
        chosen = words(row["chosen"])
        table.add_row(row["id"], arguments, where, chosen, gain, str(row.get("timed", "")))
    return table


__all__ = ["tune"]
