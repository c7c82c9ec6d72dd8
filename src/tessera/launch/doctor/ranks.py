"""Checks that the ranks of a run agree: devices, versions, clocks, hash seeds; and of the
engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.wording import ranks_text
from .report import Check

MOST_SKEW_S = 1.0
COMPARED = ("tessera", "jax", "jaxlib", "python")


def rank_checks(said: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Returns the checks of the facts of each rank: its host, engine, versions, time and hash."""
    return [
        check_devices([s["engine"] for s in said], [s["host"] for s in said]),
        check_alike([s["versions"] for s in said]),
        check_clocks([s["time_s"] for s in said]),
        check_hashes([s["hash"] for s in said]),
        check_bits(said[0]["engine"]),
        check_overlap(said[0]["engine"]["platform"]),
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
