"""The rank of this process in its run, read from the launcher's environment variables.

| launcher                   | number                 | how many               |
|----------------------------|------------------------|------------------------|
| `tessera run`, torchrun    | `RANK`                 | `WORLD_SIZE`           |
| OpenMPI                    | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` |
| MPICH, Intel MPI           | `PMI_RANK`             | `PMI_SIZE`             |
| Slurm (`srun`)             | `SLURM_PROCID`         | `SLURM_STEP_NUM_TASKS` |
| Kubeflow JAXJob            | `PROCESS_ID`           | `NUM_PROCESSES`        |
| Kubernetes, indexed job    | `JOB_COMPLETION_INDEX` | `NUM_PROCESSES`        |

If several launchers have set variables, the first complete row holds. `RANK` and `WORLD_SIZE`
count only with an address (`TESSERA_COORDINATOR`, `MASTER_ADDR`); without one a warning says that
the process runs alone.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from . import environment
from .errors import UsageError

PORT = 29400  # the coordinator's default port
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a run. `coordinator` is the address at which the processes connect
    (`host:port`). `hosted`: the launcher hosts it, otherwise rank 0 does. `token` is the same in
    all processes of a run, and in no others."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    coordinator: str
    hosted: bool
    token: str


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of a launcher; it is this launcher only if all of `sign` are set."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    sign: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


_NUMBER = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS", "MASTER_ADDR")
_LAUNCHERS = (
    _Launcher("tessera run", "RANK", ("WORLD_SIZE",), _NUMBER, (environment.COORDINATOR,)),
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), _NUMBER[:1], ("MASTER_ADDR",)),
    _Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), _NUMBER[1:2],
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher("mpiexec", "PMI_RANK", ("PMI_SIZE",), _NUMBER[2:]),
    _Launcher(
        "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), _NUMBER[3:], ("SLURM_STEP_ID",),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Launcher("JAXJob", "PROCESS_ID", ("NUM_PROCESSES",), sign=("COORDINATOR_ADDRESS",)),
    _Launcher("Kubernetes", "JOB_COMPLETION_INDEX", ("NUM_PROCESSES", "WORLD_SIZE")),
)  # fmt: skip


def rank_of(variables: Mapping[str, str] | None = None) -> Rank | None:
    """Returns the rank of this process in its run; None if it runs alone, or `TESSERA_JOIN` is off.

    Raises UsageError if a number is invalid, or if the processes have no address to connect at.

    >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    >>> found = rank_of(variables)
    >>> found.launcher, found.rank, found.coordinator, found.hosted
    ('torchrun', 1, '10.0.0.1:29400', False)
    >>> rank_of({}), rank_of({**variables, "TESSERA_JOIN": "0"})
    (None, None)
    """
    env = os.environ if variables is None else variables
    found = _launcher(env)
    return _read(*found, env) if found else None


def started_as(variables: Mapping[str, str] | None = None) -> str:
    """Returns the rank that this process was started as, and the launcher, in words; "" if it runs
    alone.

    >>> started_as({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})
    'rank 1 of 2, started by srun'
    """
    env = os.environ if variables is None else variables
    by, size = _launcher(env) or (None, "")
    if by is None or env[size].strip() == "1":
        return ""
    return f"rank {env[by.rank]} of {env[size]}, started by {by.name}"


def alone_by_mistake(variables: Mapping[str, str] | None = None) -> str:
    """Returns a warning if `RANK` and `WORLD_SIZE` name one of several processes, but there is no
    address to connect at, so that each runs alone; "" otherwise. It is no error, as another tool
    may have set them.

    >>> alone_by_mistake({"RANK": "0", "WORLD_SIZE": "2"}).partition(":")[0]
    'join'
    >>> alone_by_mistake({"RANK": "0", "WORLD_SIZE": "2", "TESSERA_JOIN": "0"})
    ''
    """
    env = os.environ if variables is None else variables
    rank, size = (env.get(n, "").strip() for n in ("RANK", "WORLD_SIZE"))
    several = rank.isdecimal() and size.isdecimal() and int(size) > 1
    on = environment.is_on(environment.JOIN, env, default=True)
    if not (several and on) or _launcher(env):
        return ""
    return (
        f"join: RANK={rank} and WORLD_SIZE={size} are set, and nothing says where the processes"
        f" meet: this one is alone. Set {environment.COORDINATOR}=HOST:PORT in all of them, HOST"
        f" being that of rank 0; or start them with tessera run; or {environment.JOIN}=0"
    )


def _launcher(env: Mapping[str, str]) -> tuple[_Launcher, str] | None:
    """Returns the launcher whose variables hold, and the name of its variable with the number of
    processes."""
    if not environment.is_on(environment.JOIN, env, default=True):
        return None
    for by in _LAUNCHERS:
        size = next((n for n in by.size if env.get(n)), "")
        if not size or any(not env.get(n) for n in (by.rank, *by.sign)):
            continue
        if by.name == "Kubernetes" and not any(env.get(n) for n in _ADDRESSES):
            continue  # an indexed job of independent programs
        return by, size
    return None


def _read(by: _Launcher, size_name: str, env: Mapping[str, str]) -> Rank | None:
    size = _whole(env, size_name, 1)
    if size == 1:
        return None
    rank = _whole(env, by.rank, 0, size, size_name)
    local_name = next((n for n in by.local_rank if env.get(n)), "")
    local = _whole(env, local_name, 0) if local_name else 0
    count_name = next((n for n in _LOCAL_SIZES if env.get(n)), "")
    slurm = local_name == "SLURM_LOCALID"
    count = _whole(env, count_name, 1) if count_name else tasks_on_host(env, size) if slurm else 1
    job = ".".join(env[n] for n in by.job if env.get(n))
    hosted = by.name == "tessera run" and bool(env.get(environment.TOKEN))
    return Rank(
        launcher=by.name,
        rank=rank,
        size=size,
        local_rank=local,
        local_size=max(count, local + 1),
        coordinator=_coordinator(by, env, size if count == size else 0, job),
        hosted=hosted,
        token=env.get(environment.TOKEN, "") or _token_in(env) or job,
    )


def _token_in(env: Mapping[str, str]) -> str:
    """Returns the contents of the token's file; "" without one. Raises UsageError if the file is
    empty, unreadable, or readable by others."""
    name = env.get(environment.TOKEN_FILE, "")
    if not name:
        return ""
    try:
        with open(name, encoding="utf-8") as file:
            others = os.fstat(file.fileno()).st_mode & 0o077
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        problem, fix = f"cannot be read: {reason}", "name a file that is there on every host"
    else:
        if token and not others:
            return token
        problem = "may be read by others" if others else "is empty"
        fix = f"chmod 600 {name}" if others else f"openssl rand -hex 16 > {name}"
    raise UsageError(f"join: {environment.TOKEN_FILE}={name!r} {problem}", fix=fix, at="")


def tasks_on_host(env: Mapping[str, str], size: int) -> int:
    """Returns the number of an `srun`'s tasks on this host; 1 if it is unknown.

    >>> tasks_on_host({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 11)
    3
    """
    if env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1":
        return size
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get(_PER_NODE, "")):
        counts += [int(count)] * min(int(times or 1), size)
    node = env.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else 1


def _whole(
    env: Mapping[str, str], name: str, least: int, below: int | None = None, of: str = ""
) -> int:
    text = env[name].strip()
    if text.isdecimal() and least <= int(text) and (below is None or int(text) < below):
        return int(text)
    most = f" below {of}={below}" if of else f" to {below - 1}" if below is not None else ""
    raise UsageError(
        f"join: {name}={text!r} is not a number from {least}{most}",
        fix=f"start the processes with tessera run, or leave it out: unset {name}, or"
        f" {environment.JOIN}=0",
        at="",
    )


def _coordinator(by: _Launcher, env: Mapping[str, str], alone: int, job: str) -> str:
    """Returns the address at which the processes connect; `alone`: all are on this host."""
    # All processes of a job compute the same port; other jobs most likely compute another one.
    port = 20000 + zlib.crc32(job.encode()) % 9000 if job else PORT
    if given := env.get(environment.COORDINATOR):
        return with_port(given, port)
    if given := env.get("JAX_COORDINATOR_ADDRESS"):
        return with_port(given, port)
    if given := env.get("COORDINATOR_ADDRESS"):
        return with_port(given, _port(env, "COORDINATOR_PORT", port))
    if given := env.get("MASTER_ADDR"):
        # torch uses MASTER_PORT itself, and a program may use both libraries.
        master = _port(env, "MASTER_PORT", 0)
        return with_port(given, (master + 1 if master < 65535 else master - 1) if master else port)
    if alone:
        # Without a job's name: the launcher is the parent of all processes of this host.
        return f"127.0.0.1:{port if job else 20000 + os.getppid() % 9000}"
    if by.name == "srun" and (first := first_host(_nodes(env))):
        return f"{first}:{port}"
    raise UsageError(
        f"join: {by.name} started this process on one of several hosts, and nothing says where the"
        " processes meet",
        fix=f"set {environment.COORDINATOR}=HOST:PORT in all of them, HOST being that of rank 0"
        + (f" (mpirun -x {environment.COORDINATOR}=…)" if by.name == "mpirun" else "")
        + f"; or start them with tessera run; or {environment.JOIN}=0",
        at="",
    )


def _port(env: Mapping[str, str], name: str, default: int) -> int:
    return _whole(env, name, 1, 65536) if env.get(name) else default


def _nodes(env: Mapping[str, str]) -> str:
    return env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list of hosts.

    >>> [first_host(nodes) for nodes in ("n1", "gpu[007-012,20],n3", "a[1-2]b[3-4]", "")]
    ['n1', 'gpu007', 'a1b3', '']
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", first[0]) if first else ""


def with_port(address: str, port: int) -> str:
    """Returns `address`, with `port` if it has none. Raises UsageError if it is neither `host` nor
    `host:port`.

    >>> with_port("n1", 80), with_port("n1:90", 80), with_port("[::1]", 80), with_port("::1", 80)
    ('n1:80', 'n1:90', '[::1]:80', '[::1]:80')
    """
    text = address.strip()
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    host, colon, given = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, given = given or host, str(port)
    if host and given.isdecimal() and 0 < int(given) < 65536 and not set(host) & set("/ @"):
        return f"{host}:{given}"
    raise UsageError(
        f"join: {address!r} is not the address of a coordinator",
        fix="give HOST or HOST:PORT, with a port from 1 to 65535",
        at="",
    )


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port`.

    >>> split_address("[::1]:80"), split_address("n1:80")
    (('::1', 80), ('n1', 80))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
