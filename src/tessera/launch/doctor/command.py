"""The command `tessera doctor`: checks this host, joins the run, compares the ranks, and
measures."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ...core import environment as switches
from ...core.errors import TesseraError
from ...core.limits import set_limits
from .host import first_line, host_checks, versions, way_out
from .ranks import rank_checks
from .report import Check, Report, merged

LIMIT_S = 60.0  # time limit of each wait for other ranks


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Prints the report as JSON.")] = False,
) -> None:
    """Checks versions, devices, drivers, network and clocks, measures an all-reduce between all
    devices, and prints fixes. Started by a launcher (tessera run, mpirun, ...) it checks all ranks,
    and rank 0 reports.

    The exit status is 1 if something must be fixed.
    """
    with _engine_apart():
        report, leads = examined()
    if not leads:
        return  # rank 0 prints the report of all ranks
    typer.echo(report.json() if json else report.text())
    raise typer.Exit(report.exit_code)


@contextlib.contextmanager
def _engine_apart() -> Iterator[None]:
    """Redirects file 1 to file 2, as the engine prints to stdout, which is for the report alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def examined() -> tuple[Report, bool]:
    """Returns the report, and whether this process prints it."""
    own = host_checks()
    if switches.COLLECTIVE_LIMIT not in os.environ:
        set_limits(collective_s=LIMIT_S)
    try:
        from ...runtime.processes.diagnose import engine_facts

        engine = engine_facts()
        said = _said(engine, own)
    except TesseraError as error:
        fix = way_out(error) or "see the checks above"
        return Report((*own, Check("processes", "fix", first_line(error), fix))), True
    except Exception as error:  # an error of the engine at its start
        fix = "see the driver and the versions above; JAX_PLATFORMS=cpu leaves the GPUs out"
        return Report((*own, Check("devices", "fix", first_line(error), fix))), True
    hosts = [(s["host"], [Check(**c) for c in s["checks"]]) for s in said]
    checks = [*merged(hosts), *rank_checks(said), _transports()]
    from .reduce import reduce_checks

    return Report((*checks, *reduce_checks())), engine["process"] == 0


def _said(engine: dict[str, Any], own: list[Check]) -> list[dict[str, Any]]:
    """Returns the facts of each rank. Raises BackendError if one does not send them."""
    from ...runtime.processes.exchange import gather, together

    _, found = versions()
    own_facts = {
        "host": socket.gethostname(),
        "engine": engine,
        "checks": [asdict(c) for c in own],
        "versions": {**found, "python": sys.version.split()[0]},
        "hash": hash("tessera"),
    }
    together("doctor", LIMIT_S)
    return gather("doctor", own_facts | {"time_s": time.time()}, LIMIT_S)


def _transports() -> Check:
    """Returns the check of the transports of collectives."""
    from ...runtime.transports import transports

    found = transports()
    have = ", ".join(t.name for t in found.every if t.available)
    _, inside, between = found.auto[0]
    picks = inside + (f" in a process, {between} between processes" if between else "")
    lacks = "; ".join(f"no {t.name}: {t.why}" for t in found.every if not t.available)
    facts = {"transports": [asdict(t) for t in found.every], "auto": [list(a) for a in found.auto]}
    bad = between == "none"
    return Check(
        "transports",
        "fix" if bad else "ok",
        f"{have}; auto takes {picks}\n{lacks}",
        "unset JAX_CPU_COLLECTIVES_IMPLEMENTATION" if bad else "",
        facts=facts,
    )
