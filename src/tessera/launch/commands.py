"""Commands that start the ranks of a run, for each backend (local, mpi, slurm)."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core import flags
from ..core.errors import BackendError, UsageError

BACKENDS = ("local", "mpi", "slurm")
# The option of the backend's command that begins each line of output with its rank.
PREFIX = {"local": (), "mpi": ("--tag-output",), "slurm": ("--label",)}
# Variables that mpirun passes on to other hosts.
_HANDED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "XLA_FLAGS")
_PREFIXES = ("TESSERA_", "JAX_", "TT_", "NCCL_")
# Variables of an outer launcher, which do not hold for the ranks.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TESSERA_JOIN")


@dataclass(frozen=True, slots=True)
class Run:
    """`program` in each rank, with the rank's variables in `environments`. The ranks connect to
    `coordinator`; `token` is known to them alone. `arguments` are for the backend's own command."""

    environments: tuple[Mapping[str, str], ...]
    program: tuple[str, ...]
    coordinator: str
    token: str
    devices: int | None = None
    arguments: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.environments)


@dataclass(frozen=True, slots=True)
class Job:
    """One process that the launcher starts, with all its variables in `environment`. It gets the
    signal `orphaned` if the launcher is killed. `rank` is its number, None if it is no rank."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    orphaned: signal.Signals = signal.SIGTERM  # mpirun and srun pass it on to their ranks
    rank: int | None = None


def program_of(words: Sequence[str], module: bool) -> tuple[str, ...]:
    """Returns the command of `words`: a Python file, a module (`-m`) or any other program.

    Raises UsageError if there is no such file or program here.
    """
    first, *rest = words
    if module:
        return (sys.executable, "-m", first, *rest)
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise _absent(first)
        return (sys.executable, first, *rest)
    if shutil.which(first) is None:
        raise _absent(first)
    return (first, *rest)


def _absent(name: str) -> UsageError:
    fix = "name a Python file, a program, or a module with -m"
    what = "is a folder" if Path(name).is_dir() else "does not exist, or cannot be run"
    return UsageError(f"{name!r} {what}", fix=fix, at="")


def rank_variables(run: Run, k: int) -> dict[str, str]:
    """Returns the variables of rank `k`, without the token and those that depend on its host."""
    own = {**run.environments[k]}
    if run.devices is not None:
        own.setdefault("TESSERA_DEVICES", str(run.devices))
    # hash(name) % size picks the same owner on every rank
    own.setdefault("PYTHONHASHSEED", os.environ.get("PYTHONHASHSEED", "0"))
    own.setdefault("PYTHONUNBUFFERED", "1")  # a killed rank loses no output
    return own | {
        "RANK": str(k),
        "WORLD_SIZE": str(run.size),
        "TESSERA_COORDINATOR": run.coordinator,
    }


def _around(run: Run) -> dict[str, str]:
    """Returns the launcher's own variables, without those of an outer launcher, and the token."""
    own = {
        name: value for name, value in flags.original_environment().items() if name not in _FOREIGN
    }
    return own | {"TESSERA_TOKEN": run.token}


def local(run: Run) -> list[Job]:
    """Returns a job for each rank, a process of this machine."""
    around = _around(run)
    return [
        Job(f"rank {k}", run.program, around | _local_variables(run, k), signal.SIGKILL, k)
        for k in range(run.size)
    ]


def _local_variables(run: Run, k: int) -> dict[str, str]:
    return {**rank_variables(run, k), "LOCAL_RANK": str(k), "LOCAL_WORLD_SIZE": str(run.size)}


def mpi(run: Run) -> list[Job]:
    """Returns one `mpirun` (OpenMPI's) that starts all ranks, each with its own variables."""
    found = next(filter(shutil.which, _COMMANDS["mpi"]), "mpirun")
    hand_on = [
        n for n in flags.original_environment() if n in _HANDED_ON or n.startswith(_PREFIXES)
    ]
    command = [found, "--bind-to", "none", *run.arguments]
    for k in range(run.size):
        own = rank_variables(run, k)
        names = ["TESSERA_TOKEN", *sorted({*hand_on} - {*own, *_FOREIGN, "TESSERA_TOKEN"})]
        handed = [f"{name}={value}" for name, value in own.items()] + names
        command += [":"] * (k > 0) + ["-np", "1", *(w for x in handed for w in ("-x", x))]
        command += run.program
    return [Job(found, tuple(command), _around(run))]


def slurm(run: Run) -> list[Job]:
    """Returns one `srun` that starts all ranks; a shell sets each rank's variables by its number.
    Variables that are equal in all ranks are written once, as an argument has at most 128 KiB."""
    each = [rank_variables(run, k) for k in range(run.size)]
    alike = {n: v for n, v in each[0].items() if n != "RANK" and all(e.get(n) == v for e in each)}
    own = [[f"{n}={v}" for n, v in e.items() if n != "RANK" and n not in alike] for e in each]
    cases = " ".join(f"{k}) export {shlex.join(o)};;" for k, o in enumerate(own) if o)
    script = f'case "$SLURM_PROCID" in {cases} esac; ' if cases else ""
    script += f'exec env RANK="$SLURM_PROCID" {shlex.join([f"{n}={v}" for n, v in alike.items()])}'
    script += f" {shlex.join(run.program)}"
    command = ("srun", f"--ntasks={run.size}", "--kill-on-bad-exit=1", *run.arguments,
               "sh", "-c", script)  # fmt: skip
    return [Job("srun", command, _around(run))]


def jobs(run: Run, backend: str) -> list[Job]:
    """Returns the jobs of `backend`."""
    return {"local": local, "mpi": mpi, "slurm": slurm}[backend](run)


def shown(run: Run, backend: str) -> list[str]:
    """Returns the commands of `backend` as lines for a shell, without the token."""
    if backend != "local":
        return [shlex.join(job.command) for job in jobs(run, backend)]
    return [
        " ".join([*(f"{n}={shlex.quote(v)}" for n, v in _local_variables(run, k).items()),
                  shlex.join(run.program)])
        for k in range(run.size)
    ]  # fmt: skip


_COMMANDS = {"local": (), "mpi": ("mpirun-ulfm", "mpirun"), "slurm": ("srun",)}


def has(backend: str) -> bool:
    """Returns whether the command of `backend` is installed."""
    return backend == "local" or any(map(shutil.which, _COMMANDS[backend]))


def need(backend: str) -> None:
    """Raises BackendError if the command of `backend` is not installed."""
    if not has(backend):
        raise BackendError(
            f"--backend {backend}: {_COMMANDS[backend][-1]} is not installed here",
            fix="install OpenMPI (apt-get install openmpi-bin), or --backend local"
            if backend == "mpi"
            else "start it inside of an allocation of Slurm, or --backend local",
            at="",
        )


def words(backend: str, text: str) -> tuple[str, ...]:
    """Returns additional arguments for the command of `backend`, split as by a shell. Raises
    UsageError for an open quotation."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        fix = "close the quotation marks"
        raise UsageError(f"--{backend}-args: {str(error).lower()}", fix=fix, at="") from None
