"""`tessera plan`: the report of a script's training step on a cluster that need not be there.

>>> from typer.testing import CliRunner
>>> from .cli import app
>>> print(CliRunner().invoke(app, ["plan", "absent.py", "--cluster", "h100x1024"]).output)
plan: 'absent.py' does not exist (name a Python file, or --table rows.csv)
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.context import replaced
from ..core.errors import TesseraError, UsageError
from ..core.machine.machine import Machine
from ..core.mesh import Mesh
from ..train.cli import one_line
from .plan_table_cli import plan_table

if TYPE_CHECKING:
    from ..plan.candidates import Found
    from ..plan.reports import Report

PRESET = "a .yaml file, dgx_h100:1024 or h100x1024"


class _Done(BaseException):
    """Ends the script at the call of its step, with the report or an error; no handler of
    exceptions in the script catches this."""

    def __init__(self, outcome: Report | TesseraError) -> None:
        self.outcome = outcome


def plan(
    script: Annotated[str, typer.Argument(help="A Python script.")] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, after --.", metavar="-- ARGS")
    ] = None,
    cluster: Annotated[str, typer.Option(help=f"The machine: {PRESET}.")] = "",
    step: Annotated[
        str, typer.Option(help="The step's name (the first compiled call), or its builder's.")
    ] = "",
    search: Annotated[
        bool, typer.Option("--search", help="Searches for the best plan, from build(mesh, ...).")
    ] = False,
    tokens: Annotated[
        float | None, typer.Option(help="The tokens of the whole training, such as 15e12.", min=0)
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="The tokens of a step, if its ids do not tell.", min=1)
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="The price of a device for an hour.", min=0)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Writes the report as a page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Writes it as JSON.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Writes the timeline for Perfetto.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="A CSV file of runs to predict, in place of a script.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The CSV file with their predictions.")] = None,
) -> None:
    """Runs a script up to its first compiled step, and reports what that costs on a cluster.

    The step is planned and simulated; it does not run, and no device of the cluster is needed.
    With --table each row of a table of runs is predicted.
    """
    if table is not None:
        return plan_table(table, out)
    from ..plan.machines import cluster_of
    from ..plan.reports import report_of

    try:
        if not Path(script).is_file():
            what = f"plan: {script!r} does not exist" if script else "plan: no script is named"
            raise UsageError(what, fix="name a Python file, or --table rows.csv", at="")
        if not cluster:
            raise UsageError("plan: no cluster is named", fix=f"--cluster with {PRESET}", at="")
        machine = cluster_of(cluster)
        if search:
            others = {"--tokens": tokens, "--step-tokens": step_tokens, "--price": price,
                      "--html": html, "--trace": trace}  # fmt: skip
            if wrong := [name for name, value in others.items() if value is not None]:
                raise UsageError(
                    f"plan: --search has no {', '.join(wrong)}", fix="--json writes it", at=""
                )
            found = _searched(script, arguments or [], step or "build", machine)
            typer.echo(found.text)
            if json is not None:
                found.save_json(json)
                typer.echo(f"{json}: {json.stat().st_size:,} bytes")
            return None
        report = _reported(
            script, arguments or [], step, machine,
            lambda fn, a, k: report_of(fn, a, k, machine, step_tokens, tokens, price),
        )  # fmt: skip
        typer.echo(report.text)
        for path, save in ((html, report.save_html), (json, report.save_json),
                           (trace, report.save_trace)):  # fmt: skip
            if path is not None:
                save(path)
                typer.echo(f"{path}: {path.stat().st_size:,} bytes")
    except TesseraError as error:
        typer.echo(one_line(error), err=True)
        raise typer.Exit(2) from None


def _searched(script: str, arguments: list[str], name: str, machine: Machine) -> Found:
    """Returns the best plans of the builder `name` of the script, which is imported: what it does
    as the main program does not run."""
    from ..plan.search import best

    with _as_program(script, arguments):
        build = runpy.run_path(script).get(name)
        if build is None:
            raise UsageError(
                f"plan: {script} has no {name} to search with",
                fix="write build(mesh, strategy, *, remat) that returns the step and its"
                " arguments; --step gives another name",
                at="",
            )
        return best(build, cluster=machine)


@contextmanager
def _as_program(script: str, arguments: list[str]) -> Iterator[None]:
    """Gives the script its arguments and the modules beside it."""
    before = sys.argv, [*sys.path]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _reported(
    script: str,
    arguments: list[str],
    name: str,
    machine: Machine,
    make: Callable[[Any, Any, Any], Report],
) -> Report:
    """Runs the script until it calls a compiled function or training step (of this `name`), and
    returns what `make` makes of that call. Raises UsageError if it ends before."""
    from ..plan.machines import as_machine

    others: dict[str, None] = {}

    def called(fn: Any, args: Any, kwargs: Any) -> Any:
        own = getattr(fn, "__name__", "")
        with replaced(called=None):
            try:
                if name in ("", own):
                    raise _Done(make(fn, args, kwargs))
                mesh = fn.plan(*args, **kwargs).mesh
                if mesh is not None:
                    if own not in others:
                        typer.echo(f"plan: {own} does not run; its results are NaN", err=True)
                    others[own] = None
                    return _not_run(own, name, mesh, getattr(fn, "compiled", fn), args, kwargs)
            except TesseraError as error:
                raise _Done(error) from None
            others[own] = None
            return fn(*args, **kwargs)

    try:
        with as_machine(machine), replaced(called=called), _as_program(script, arguments):
            runpy.run_path(script, run_name="__main__")
    except _Done as done:
        if isinstance(done.outcome, TesseraError):
            raise done.outcome from None
        return done.outcome
    except SystemExit as end:
        if end.code not in (None, 0):
            raise UsageError(
                f"plan: {script} ended with {end.code} before a step",
                fix="run it as it is; its arguments stand after --",
                at="",
            ) from None
    seen = f": it called {', '.join(others)}" if others else ""
    raise UsageError(
        f"plan: {script} ended without a call of {name or 'a compiled step'}{seen}",
        fix="compile the step with ts.jit or graph.training_step, and call it; --step names one",
        at="",
    )


def _not_run(own: str, name: str, mesh: Mesh, fn: Any, args: Any, kwargs: Any) -> Any:
    """Returns NaN in place of the results of the compiled `fn`, called before the step `name`.
    Raises UsageError if it reads a value."""
    planned = fn.planned(args, kwargs)
    if planned is None:
        raise UsageError(
            f"plan: {own} is called before {name}, on the mesh {mesh.text()}, and reads a value",
            fix=f"--step {own}, or call {name} first",
            at="",
        )
    return planned


__all__ = ["plan"]
