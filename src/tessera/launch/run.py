"""`tessera run`: starts one program as many processes, on this machine or on several.

tessera run -n 4 train.py --steps 100 tessera run --rank-binding ranks.yaml --mpi-args "--hostfile
hosts" train.py
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import environment
from ..core.errors import TesseraError, UsageError
from ..core.ranks import split_address, started_as, with_port
from ..runtime.processes.rendezvous import listen
from . import bindings, commands
from .elastic_runs import REJOIN_AFTER_S, Generations, elastic_sizes
from .guard import TIES, Guard
from .supervisor import GRACE_S, Supervisor

JOIN_LIMIT_S = 300
# Words after the program are the program's own arguments.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def run(
    context: typer.Context,
    program: Annotated[
        list[str], typer.Argument(help="A Python file or a program, and its arguments.")
    ],
    nproc: Annotated[
        int | None, typer.Option("-n", "-np", "--nproc", help="How many processes.", min=1)
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(help="MIN:MAX processes; when one is lost, the run goes on with the others."),
    ] = None,
    rejoin_after: Annotated[
        int | None,
        typer.Option(help="Seconds until an --elastic run has MAX processes again (60).", min=1),
    ] = None,
    grace: Annotated[
        int, typer.Option(help="Seconds that ranks have to save and end after a signal.", min=1)
    ] = GRACE_S,
    rank_binding: Annotated[
        Path | None, typer.Option(help="A YAML file with the ranks and their variables.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="local, mpi or slurm; local where neither has arguments."),
    ] = None,
    mpi_args: Annotated[
        str | None, typer.Option(help="More arguments for mpirun, in one string.")
    ] = None,
    slurm_args: Annotated[
        str | None, typer.Option(help="More arguments for srun, in one string.")
    ] = None,
    coordinator: Annotated[
        str,
        typer.Option(help="HOST or HOST:PORT of this machine, as the ranks' hosts know it."),
    ] = "127.0.0.1",
    devices: Annotated[
        int | None, typer.Option(help="Virtual CPU devices of each rank (1).", min=1)
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="PROGRAM is a module.")] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Each line begins with its rank.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prints the command, and runs nothing.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Prints the command, and runs it.")
    ] = False,
) -> None:
    """Runs PROGRAM in many processes that are one program.

    Each rank joins the others as it first uses Tessera. When one fails, all end, and its last lines
    are shown; Ctrl-C ends all. After a signal they have the time of --grace to save.
    """
    try:
        chosen = _backend(backend, mpi_args, slurm_args, by_name=context.obj)
        sizes = elastic_sizes(elastic, chosen, nproc, rank_binding, rejoin_after)
        status = _run(program, nproc, rank_binding, chosen, f"{mpi_args or ''} {slurm_args or ''}",
                      coordinator, devices, module, prefix, dry_run, verbose, sizes,
                      rejoin_after or REJOIN_AFTER_S, grace)  # fmt: skip
    except TesseraError as error:
        typer.echo(f"tessera run: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _run(
    program: list[str],
    nproc: int | None,
    rank_binding: Path | None,
    backend: str,
    arguments: str,
    coordinator: str,
    devices: int | None,
    module: bool,
    prefix: bool,
    dry_run: bool,
    verbose: bool,
    sizes: tuple[int, int] | None,
    rejoin_after_s: float,
    grace_s: float,
) -> int:
    if outer := started_as():
        raise UsageError(
            "each of several processes would start a run of its own",
            this=outer,
            fix="call it once: --backend mpi or slurm starts ranks on all hosts; or let that"
            " launcher start the program itself; TESSERA_JOIN=0 if each is to be a run of its own",
            at="",
        )
    host, port = split_address(with_port(coordinator, 65535))
    # An address with its own port does not depend on the default port.
    fixed = with_port(coordinator, 1) == with_port(coordinator, 2)
    run = commands.Run(
        environments=_environments(nproc if sizes is None else sizes[1], rank_binding),
        program=commands.program_of(program, module),
        coordinator=f"{_bracketed(host)}:{port if fixed else 'PORT'}",
        token="",
        devices=devices,
        arguments=commands.PREFIX[backend] * prefix + commands.words(backend, arguments),
    )
    if dry_run:
        print("\n".join(commands.shown(run, backend)))
        return 0
    commands.need(backend)
    limit_s = environment.number(environment.JOIN_LIMIT, JOIN_LIMIT_S)

    def supervised(run: commands.Run, **how: Any) -> Supervisor:
        sock = listen(host, port if fixed else 0)
        address = f"{_bracketed(host)}:{sock.getsockname()[1]}"
        run = replace(run, coordinator=address, token=secrets.token_hex(16))
        if verbose:
            print("\n".join(commands.shown(run, backend)), file=sys.stderr)
        sys.stdout.flush()
        guard = Guard(run, sock, limit_s, asks=backend == "local" or not TIES)
        lines = prefix and backend == "local"
        return Supervisor(commands.jobs(run, backend), guard, lines, grace_s=grace_s, **how)

    if sizes is not None:
        return Generations(run, sizes[0], rejoin_after_s, supervised).run()
    return supervised(run).run()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _backend(
    backend: str | None, mpi_args: str | None, slurm_args: str | None, by_name: str | None
) -> str:
    """Returns the chosen backend: `--backend`, else the one whose arguments are given, else the
    command's default (`tt-run` takes mpirun if it is installed). Raises UsageError."""
    meant = "mpi" if mpi_args is not None else "slurm" if slurm_args is not None else None
    chosen = backend or meant or by_name or "local"
    if chosen not in commands.BACKENDS:
        fix = f"use {', '.join(commands.BACKENDS)}"
        raise UsageError(f"--backend: there is no {chosen!r}", fix=fix, at="")
    for option, value, of in (("mpi", mpi_args, "mpi"), ("slurm", slurm_args, "slurm")):
        if value is not None and chosen != of:
            raise UsageError(
                f"--{option}-args have no effect with --backend {chosen}",
                fix=f"leave one of both out, or --backend {of}",
                at="",
            )
    return chosen


def _environments(nproc: int | None, rank_binding: Path | None) -> tuple[dict[str, str], ...]:
    """Returns the variables of each rank. Raises UsageError."""
    if (nproc is None) == (rank_binding is None):
        raise UsageError(
            "how many processes? " + ("Nothing says so" if nproc is None else "Two options do"),
            fix="give either -n 4 or --rank-binding FILE",
            at="",
        )
    if rank_binding is None:
        return tuple({} for _ in range(nproc or 1))
    return bindings.environments(bindings.load(rank_binding))
