"""The command `tessera doctor`: checks this host, joins the run, compares the ranks, and
measures."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import typer

from ...core import environment as switches
from ...core.errors import TesseraError
from ...core.limits import set_limits
from ...core.mesh import auto
from ...core.wording import ranks_text
from ...lang.jit.jit import jit
from ...lang.math.create import tensor
from ...lang.math.functions import sum as total
from ...lang.parallel.collectives import all_reduce
from ...lang.value.tensor import Tensor
from .host import first_line, fix_of, host_checks, versions
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
    with engine_output_to_stderr():
        report, leads = examined()
    if not leads:
        return  # rank 0 prints the report of all ranks
    typer.echo(report.json() if json else report.text())
    raise typer.Exit(report.exit_code)


@contextlib.contextmanager
def engine_output_to_stderr() -> Iterator[None]:
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
    of_host = host_checks()
    if switches.COLLECTIVE_LIMIT not in os.environ:
        set_limits(collective_s=LIMIT_S)
    try:
        from ...runtime.processes.diagnose import engine_facts

        engine = engine_facts()
        facts = _gathered_facts(engine, of_host)
    except TesseraError as error:
        fix = fix_of(error) or "see the checks above"
        return Report((*of_host, Check("processes", "fix", first_line(error), fix))), True
    except Exception as error:  # an error of the engine at its start
        fix = "see the driver and the versions above; JAX_PLATFORMS=cpu leaves the GPUs out"
        return Report((*of_host, Check("devices", "fix", first_line(error), fix))), True
    hosts = [(s["host"], [Check(**c) for c in s["checks"]]) for s in facts]
    checks = [*merged(hosts), *rank_checks(facts), _transports()]

    return Report((*checks, *reduce_checks())), engine["process"] == 0


def _gathered_facts(engine: dict[str, Any], checks: list[Check]) -> list[dict[str, Any]]:
    """Returns the facts of each rank. Raises BackendError if one does not send them."""
    from ...runtime.processes.exchange import gather, together

    _, found = versions()
    own_facts = {
        "host": socket.gethostname(),
        "engine": engine,
        "checks": [asdict(c) for c in checks],
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


# Checks that the ranks of a run agree: devices, versions, clocks, hash seeds; and of the engine.

MOST_SKEW_S = 1.0
COMPARED = ("tessera", "jax", "jaxlib", "python")


def rank_checks(facts: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Returns the checks of the facts of each rank: its host, engine, versions, time and hash."""
    return [
        check_devices([s["engine"] for s in facts], [s["host"] for s in facts]),
        check_alike([s["versions"] for s in facts]),
        check_clocks([s["time_s"] for s in facts]),
        check_hashes([s["hash"] for s in facts]),
        check_bits(facts[0]["engine"]),
        check_overlap(facts[0]["engine"]["platform"]),
        check_bubbles(),
    ]


def check_devices(engines: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Check:
    """Checks that all ranks have the same kind and number of devices."""
    first, count = engines[0], len(engines)
    kinds = {(e["platform"], e["kind"]) for e in engines}
    numbers = [e["local"] for e in engines]
    facts = {"devices": first["devices"], "processes": count, "hosts": len(set(hosts)),
             "platform": first["platform"], "kind": first["kind"], "local": numbers}  # fmt: skip
    if len(kinds) > 1 or len(set(numbers)) > 1:
        rows = ", ".join(f"rank {r}: {e['local']} {e['kind']}" for r, e in enumerate(engines))
        fix = "give every rank the same devices: TESSERA_VISIBLE_DEVICES, TESSERA_DEVICES"
        return Check("devices", "fix", rows, fix, facts=facts)
    kind = first["kind"] if first["kind"] != first["platform"] else "virtual"
    many = f"{count} process{'es' * (count > 1)}"
    where = f"{len(set(hosts))} host{'s' * (len(set(hosts)) > 1)}"
    found = f"{first['devices']} x {first['platform']} ({kind}), {many} on {where}"
    return Check("devices", "ok", found, facts=facts)


def check_alike(versions: Sequence[Mapping[str, str]]) -> Check:
    """Checks that all ranks have the same versions."""
    differ = [n for n in COMPARED if len({v.get(n) for v in versions}) > 1]
    if not differ:
        return Check("ranks' versions", "ok", "one process" if len(versions) == 1 else "all alike")
    rows = "; ".join(
        f"{n}: " + ", ".join(
            f"{v} on {ranks_text([r for r, x in enumerate(versions) if x.get(n) == v])}"
            for v in dict.fromkeys(x.get(n) for x in versions)
        )
        for n in differ
    )  # fmt: skip
    fix = "install the same versions on every host"
    return Check("ranks' versions", "fix", rows, fix)


def check_clocks(times_s: Sequence[float]) -> Check:
    """Checks the skew of the clocks, read at about the same moment."""
    skew_s = max(times_s) - min(times_s)
    facts = {"skew_s": skew_s}
    if len(times_s) == 1:
        return Check("clocks", "ok", "one process has one clock", facts=facts)
    if skew_s <= MOST_SKEW_S:
        return Check("clocks", "ok", f"less than {MOST_SKEW_S:g} s apart", facts=facts)
    late = min(range(len(times_s)), key=lambda r: times_s[r])
    return Check(
        "clocks", "fix", f"{skew_s:.1f} s apart; rank {late} is behind",
        "run chronyd or ntpd on every host: records of ranks cannot be put in order",
        facts=facts,
    )  # fmt: skip


def check_hashes(hashes: Sequence[int]) -> Check:
    """Checks that hash("text") is equal on all ranks, as code that picks an owner by it needs."""
    if len(set(hashes)) == 1:
        one = "one process" if len(hashes) == 1 else "the same on all ranks"
        return Check("hash seed", "ok", one)
    return Check(
        "hash seed", "fix", "hash(name) differs from rank to rank",
        "set PYTHONHASHSEED=0 on every rank, or start them with tessera run",
    )  # fmt: skip


def check_bits(engine: Mapping[str, Any]) -> Check:
    """Reports the backend's level of determinism, and checks that its sums are right."""
    if not engine["exact"]:
        return Check(
            "determinism", "fix", "this jaxlib computes some sums on a CPU wrongly",
            "import tessera before the first array of jax, which sets the flag that prevents it",
        )  # fmt: skip
    level = "mesh_invariant" if engine["invariant"] else "run_to_run"
    found = f"dist.deterministic() keeps the level {level} here"
    return Check("determinism", "ok", found, facts={"level": level})


def check_overlap(platform: str) -> Check:
    """Reports whether communication and compute can overlap here."""
    if platform == "cpu":
        found = "on CPUs nothing overlaps inside a program; the schedule shows what may"
        return Check("overlap", "note", found)
    found = "schedule.all_reduce_overlap(True) asks for it; dist.profile() measures the wait"
    return Check("overlap", "ok", found)


def check_bubbles() -> Check:
    """Reports how to see idle pipeline stages."""
    found = "take twice as many microbatches as stages; dist.inspect(step) shows what idles"
    return Check("bubbles", "ok", found)


# Measurement of an all-reduce between all devices, and a check of its sum.

SMALL, LARGE = 1, 2**22  # elements of f32 per device
MOST_BYTES = 2**30  # of all devices together


def reduce_checks() -> list[Check]:
    """Returns the latency of an all-reduce of 4 bytes, and the bandwidth of one of 16 MiB."""
    try:
        mesh = auto(("all",))
        if mesh.size == 1:
            return [Check("all_reduce", "note", "one device: there is nothing to reduce between")]
        # The large one first: after a small one, gloo's later ones are slower.
        large = max(min(LARGE, MOST_BYTES // 4 // mesh.size), SMALL)
        times_s = {}
        for elements, times in ((large, 5), (SMALL, 20)):
            took, right = _measured(mesh.size, elements, times)
            if not right:
                return [check_sum(mesh.size, elements)]
            times_s[elements] = took
    except TesseraError as error:
        fix = fix_of(error) or "see the checks above"
        return [Check("all_reduce", "fix", first_line(error), fix)]
    return [reduced(mesh.size, times_s[SMALL], 4 * large, times_s[large])]


def _measured(devices: int, elements: int, times: int) -> tuple[float, bool]:
    """Returns the seconds of one all-reduce of `elements` per device, and whether its sum is
    right."""
    from ...runtime.processes.diagnose import took_s  # it loads the engine

    mesh = auto(("all",))
    block = np.arange(elements, dtype=np.float32) % 64
    data = np.broadcast_to(block, (devices, elements))
    x = tensor(data, mesh=mesh, layout=f"[{devices}@all, {elements}]")

    @jit
    def summed(x: Tensor) -> Tensor:
        made: Tensor = all_reduce(total(x, dim=0), axis="all")
        return made

    right = bool((summed(x).numpy() == block * devices).all())
    return took_s(lambda: summed(x), times), right


def check_sum(devices: int, elements: int) -> Check:
    """Returns the check of a wrong sum."""
    return Check(
        "all_reduce", "fix", f"the sum of {elements:,} numbers over {devices} devices is wrong",
        "do not train here: update jaxlib and the driver, and run tessera doctor again",
    )  # fmt: skip


def reduced(devices: int, small_s: float, size: int, large_s: float) -> Check:
    """Returns the check of an all-reduce that works.

    >>> reduced(8, 20e-6, 2**24, 0.01).found
    'right among 8 devices: 20 µs for 4 B; 16 MiB in 10.0 ms, 2.9 GB/s on a ring'
    """
    ring = 2 * (devices - 1) / devices * size / large_s
    return Check(
        "all_reduce", "ok",
        f"right among {devices} devices: {small_s * 1e6:.0f} µs for 4 B; {size / 2**20:g} MiB in "
        f"{large_s * 1e3:.1f} ms, {ring / 1e9:.1f} GB/s on a ring",
        facts={"devices": devices, "latency_s": small_s, "bytes": size, "time_s": large_s,
               "bus_bytes_per_s": ring},
    )  # fmt: skip
