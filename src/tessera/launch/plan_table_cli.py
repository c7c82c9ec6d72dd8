"""`tessera plan --table`: a table of runs, each with its predicted step.

>>> from typer.testing import CliRunner
>>> from .cli import app
>>> CliRunner().invoke(app, ["plan", "--table", "nothing.csv"]).exit_code
2
"""

from __future__ import annotations

from pathlib import Path

import typer

from ..core.errors import TesseraError


def plan_table(table: Path, out: Path | None) -> None:
    """Predicts time, throughput and memory of a step of each row of `table`, a CSV file, and writes
    them to `out`, or shows them."""
    from ..plan.table import predicted

    try:
        text = predicted(table.read_text())
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text)
    except TesseraError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except (OSError, UnicodeDecodeError) as error:
        typer.echo(f"plan: {table}: {error}", err=True)
        raise typer.Exit(2) from None
    if out is not None:
        typer.echo(f"{out}: {len(text.splitlines()) - 1} rows")


__all__ = ["plan_table"]
