"""Joining of a run: a process started by a launcher connects to the others.

It joins before the engine starts, if a launcher's variables name a run (core/ranks.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from ...core import environment, flags
from ...core.errors import BackendError, EngineWarning, lines_up
from ...core.machine.visible import visible_ids
from ...core.ranks import Rank, alone_by_mistake, rank_of, split_address
from ...core.version import VERSION
from .. import compile_once
from ..jax_private import connect, place, service
from .coordinator import service_near
from .rendezvous import LOST, Member, Rendezvous, listen, reach
from .store import leave

JOIN_LIMIT_S = 300
END_S = 10  # time limit for the exit of a failed rank


@cache
def join() -> None:
    """Joins the run that this process was started in. Does nothing without one, or if the program
    has called `jax.distributed.initialize` itself.

    Warns if variables name a rank, but no coordinator. Raises UsageError if the launcher's
    variables are inconsistent, BackendError if the processes do not connect within
    TESSERA_JOIN_LIMIT seconds (300), or if the engine already runs.
    """
    if service() is not None:
        atexit.register(leave)
        compile_once.start()
        return
    rank = rank_of()
    if rank is None:
        if mistake := alone_by_mistake():
            warnings.warn(mistake, EngineWarning, stacklevel=lines_up())
        return
    run = [("run", f"rank {rank.rank} of {rank.size}, started by {rank.launcher}")]
    if flags.engine_runs():
        raise BackendError(
            "join: the engine was started before this process joined its run",
            rows=run,
            fix="call tessera.distributed.initialize() before the first array of jax, or set"
            f" {environment.JOIN}=0, and each process is alone",
        )
    _take_devices(rank)
    limit_s = environment.number(environment.JOIN_LIMIT, JOIN_LIMIT_S)
    meeting = None if rank.hosted or rank.rank else _host(rank, limit_s)
    member = reach(rank.coordinator, rank.token, limit_s, rank.hosted)
    process = f"process {os.getpid()} on {socket.gethostname()}"
    hello = {"rank": rank.rank, "size": rank.size, "versions": _versions(), "who": process}
    connect(member.meet(hello, limit_s), rank.size, rank.rank)
    compile_once.start()
    os.environ[environment.JOIN] = "0"  # inherited by child processes, which are no ranks
    threading.Thread(target=_watch, args=(member,), daemon=True).start()
    atexit.register(_end, member, meeting)
    sys.excepthook = partial(_failed, member, sys.excepthook)
    _keep_lines_whole()


def _keep_lines_whole() -> None:
    """Turns on line buffering, as other ranks and threads may write to the same file."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    with contextlib.suppress(OSError, AttributeError, ValueError):  # a libc other than glibc
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p  # never freed: in use until the process exits
        buffer = ctypes.c_void_p(libc.malloc(_LINE))
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")  # C's stdout, which the engine writes to
        libc.setvbuf(stdout, buffer, _BY_LINES, ctypes.c_size_t(_LINE))


_LINE = 4096  # bytes
_BY_LINES = 1  # _IOLBF of stdio.h


def joined() -> tuple[int, int]:
    """Returns (index, count) of this process in its run; joins the run if it has not."""
    join()
    return place()


def _host(rank: Rank, limit_s: float) -> Rendezvous:
    """Returns the coordinator, run in this process."""
    host, port = split_address(rank.coordinator)
    sock = listen(host, port, wherever=True)
    made = Rendezvous(rank.size, rank.token, limit_s, lambda: service_near(sock, host, rank.size))
    made.start(sock)
    return made


def _versions() -> str:
    found = [f"tessera {VERSION}"]
    for name in ("jax", "jaxlib"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} unknown")
    return ", ".join(found)


def _watch(member: Member) -> None:
    """Ends this process when another rank is lost, since a collective with it would never end."""
    lost = member.wait()
    if _errors:  # this rank has shown its own error already
        os._exit(1)
    if not _ending:
        os.write(2, f"tessera: {lost}, so this rank ends too\n".encode())
        os._exit(LOST)


_ending: list[bool] = []
_errors: list[BaseException] = []  # the error that ended the program


def _failed(member: Member, show: Callable[..., Any], kind: Any, error: Any, trace: Any) -> None:
    """Shows an error that ends the program, and reports it to the other ranks: they may wait for
    this one, and its exit may take long."""
    show(kind, error, trace)
    if not hasattr(sys, "ps1"):  # an interactive prompt continues after an error
        _errors.append(error)
        with contextlib.suppress(OSError):
            member.say({"failed": f"{kind.__name__}: {error}".splitlines()[0].removesuffix(": ")})


def _end(member: Member, meeting: Rendezvous | None) -> None:
    """Reports that this rank ends normally. After an error it does not wait for the other ranks to
    end, only for them to hear of the error."""
    _ending.append(True)
    if _errors:
        faulthandler.dump_traceback_later(END_S, exit=True, file=sys.__stderr__ or 2)
        if meeting is not None:
            meeting.empty.wait(END_S / 2)
        return
    leave()
    try:
        member.say({"bye": True})
    except OSError:
        return
    if meeting is not None:
        meeting.empty.wait()


# -- devices --------------------------------------------------------------------------------------
def _take_devices(rank: Rank) -> None:
    """Gives this process its share of the host's GPUs, unless they are assigned already."""
    count = gpus()
    if rank.local_size == 1 or count == 0 or "SLURM_GPUS_PER_TASK" in os.environ:
        return
    if visible_ids() is not None or (count == 1 and os.environ.get(_CUDA)):
        return
    ids = part_of(count, rank.local_rank, rank.local_size)
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, ids)))


_CUDA = "CUDA_VISIBLE_DEVICES"


def gpus() -> int:
    """Returns the number of GPUs that the engine would take here; known before it starts."""
    platforms = (
        jax.config.jax_platforms  # type: ignore[attr-defined]
        or "cuda"
    ).split(",")
    plugin = any(find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    if not plugin or not {"cuda", "gpu"} & set(platforms):
        return 0
    if _CUDA in os.environ:
        return len([i for i in os.environ[_CUDA].split(",") if i.strip()])
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def part_of(count: int, local_rank: int, local_size: int) -> range:
    """Returns the indices of a host's `count` devices that process `local_rank` takes. Raises
    BackendError unless they divide evenly.

    >>> part_of(8, 1, 4), part_of(2, 1, 2)
    (range(2, 4), range(1, 2))
    """
    if count % local_size:
        raise BackendError(
            f"join: {count} device{'s' * (count != 1)} cannot be shared by {local_size} processes"
            " of this host",
            fix="start as many processes as there are devices (tessera run -n), name each one's"
            f" with {_CUDA}, or run on the CPU: JAX_PLATFORMS=cpu",
        )
    each = count // local_size
    return range(local_rank * each, (local_rank + 1) * each)
