"""The checks of `tessera doctor`: faults found, and advice given."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tessera as ts
from tessera.core import limits
from tessera.core.transports import OPS, Transport, Transports, choices
from tessera.launch.doctor import command as ranks
from tessera.launch.doctor import host
from tessera.launch.doctor.command import check_sum, reduced
from tessera.launch.doctor.report import SYMPTOMS, Check, Report, merged

MIB = 2**20
NEED = ["jax<0.12,>=0.10", "rich>=13.7"]
HAVE = {"tessera": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "rich": "15.0.0"}
ENGINE = {"platform": "cpu", "kind": "cpu", "local": 4, "devices": 8, "process": 0,
          "processes": 2, "exact": True, "invariant": True}  # fmt: skip
GPU = {**ENGINE, "platform": "gpu", "kind": "NVIDIA H200"}


def missing(name: str) -> str:
    raise OSError


# Each row: a check of values, its status, what it found, what to do.
ROWS: dict[str, tuple[Check, str, str, str]] = {
    "versions that fit": (
        host.check_versions(NEED, HAVE), "ok", "tessera 0.1.0, jax 0.10.2, jaxlib 0.10.2", ""),
    "a library is old": (
        host.check_versions(NEED, HAVE | {"rich": "12.0"}), "fix", "rich 12.0",
        'pip install "rich>=13.7"'),
    "a library is missing": (
        host.check_versions(NEED, {"jax": "0.10.2"}), "fix", "rich is missing",
        'pip install "rich>=13.7"'),
    "jax and jaxlib differ": (
        host.check_versions(NEED, HAVE | {"jax": "0.10.1"}), "fix",
        "jax 0.10.1 with jaxlib 0.10.2", 'pip install "jax==0.10.2"'),
    "the plugin is another": (
        host.check_versions(NEED, HAVE | {"jax-cuda12-plugin": "0.9.0"}), "fix",
        "jax-cuda12-plugin 0.9.0 with jaxlib 0.10.2", 'pip install "jax-cuda12-plugin==0.10.2"'),
    "switches": (
        host.check_switches({"TESSERA_COMM_TRACE": "1", "TESSERA_TOKEN": "secret"}), "ok",
        "TESSERA_COMM_TRACE=1", ""),
    "no switch": (host.check_switches({}), "ok", "none is set", ""),
    "a switch with a slip": (
        host.check_switches({"TESSERA_COM_TRACE": "1"}), "fix",
        "environment: 1 variable of no switch\n  TESSERA_COM_TRACE : the nearest are "
        "TESSERA_COMM_TRACE", "correct the name, or unset it"),
    "visible devices with a slip": (
        host.check_switches({"TT_VISIBLE_DEVICES": "x"}), "fix",
        "TT_VISIBLE_DEVICES: 'x' is no list of device ids", "set it to ids with commas"),
    "no GPU": (host.check_driver([], "", False), "ok", "no NVIDIA GPU", ""),
    "GPUs": (host.check_driver(["a", "b"], "570.1", True), "ok",
             "2 NVIDIA GPUs, driver 570.1", ""),
    "no driver": (host.check_driver(["a"], "", True), "fix", "1 NVIDIA GPU, and no driver answers",
                  "install NVIDIA's driver"),
    "no plugin": (host.check_driver(["a"], "570.1", False), "fix",
                  "1 NVIDIA GPU, driver 570.1; jax has no plugin", 'pip install "jax[cuda12]"'),
    "no chip": (host.check_chips([]), "ok", "no Tenstorrent chip", ""),
    "chips": (host.check_chips(["0", "1"]), "note", "2 Tenstorrent chips: jax has no backend", ""),
    "shared memory": (host.check_shared_memory(1024 * MIB, 512 * MIB), "ok",
                      "/dev/shm: 512 of 1,024 MiB free", ""),
    "a container's": (host.check_shared_memory(64 * MIB, 60 * MIB), "fix",
                      "/dev/shm: 60 of 64 MiB free", "free at least 64 MiB; in a container start"),
    "limits": (host.check_limits(4096, 8 * MIB, []), "ok",
               "4,096 open files, 8,192 KiB locked memory", ""),
    "few files": (host.check_limits(256, -1, []), "fix", "256 open files, any locked memory",
                  "ulimit -n 16384"),
    "memory that is not locked": (
        host.check_limits(4096, 65536, ["mlx5_0"]), "fix", "64 KiB locked memory",
        "ulimit -l unlimited, which RDMA needs"),
    "interfaces": (host.check_interfaces({"lo": "unknown", "eth0": "up"}, {}), "ok",
                   "lo unknown, eth0 up", ""),
    "an interface that is named": (
        host.check_interfaces({"lo": "up", "eth0": "up"}, {"NCCL_SOCKET_IFNAME": "=eth0,lo"}),
        "ok", "lo up, eth0 up", ""),
    "an interface that is not there": (
        host.check_interfaces({"lo": "up", "eth0": "up"}, {"GLOO_SOCKET_IFNAME": "ib0"}), "fix",
        "GLOO_SOCKET_IFNAME=ib0: there is no such interface",
        "name one of lo, eth0, or unset GLOO_SOCKET_IFNAME"),
    "no way out": (host.check_interfaces({"lo": "up", "eth0": "down"}, {}), "note",
                   "lo up, eth0 down: other hosts cannot be reached", ""),
    "a name": (host.check_name("n1", lambda name: "10.0.0.1"), "ok", "n1 is 10.0.0.1", ""),
    "a name of this host alone": (
        host.check_name("n1", lambda name: "127.0.1.1"), "note",
        "n1 is 127.0.1.1, which other hosts cannot reach", "of several hosts: give the name"),
    "a name without an address": (host.check_name("n1", missing), "fix", "n1 has no address",
                                  "add the line '127.0.1.1 n1'"),
    "devices": (ranks.check_devices([ENGINE, ENGINE], ["a", "b"]), "ok",
                "8 x cpu (virtual), 2 processes on 2 hosts", ""),
    "GPUs of one process": (ranks.check_devices([GPU], ["a"]), "ok",
                            "8 x gpu (NVIDIA H200), 1 process on 1 host", ""),
    "devices that differ": (
        ranks.check_devices([ENGINE, {**ENGINE, "local": 2}], ["a", "b"]), "fix",
        "rank 0: 4 cpu, rank 1: 2 cpu", "give every rank the same devices"),
    "ranks are alike": (ranks.check_alike([HAVE, HAVE]), "ok", "all alike", ""),
    "ranks differ": (
        ranks.check_alike([HAVE, HAVE | {"jax": "0.11"}, HAVE]), "fix",
        "jax: 0.10.2 on ranks 0, 2, 0.11 on rank 1", "install the same versions"),
    "one clock": (ranks.check_clocks([5.0]), "ok", "one process has one clock", ""),
    "clocks": (ranks.check_clocks([5.0, 5.4]), "ok", "less than 1 s apart", ""),
    "clocks that differ": (ranks.check_clocks([9.0, 5.5, 8.0]), "fix",
                           "3.5 s apart; rank 1 is behind", "run chronyd or ntpd"),
    "hashes": (ranks.check_hashes([3, 3]), "ok", "the same on all ranks", ""),
    "hashes that differ": (ranks.check_hashes([3, 4]), "fix", "hash(name) differs",
                           "set PYTHONHASHSEED=0 on every rank, or start them with tessera run"),
    "bits": (ranks.check_bits(ENGINE), "ok",
             "dist.deterministic() keeps the level mesh_invariant here", ""),
    "bits of a GPU": (ranks.check_bits({**GPU, "invariant": False}), "ok",
                      "dist.deterministic() keeps the level run_to_run here", ""),
    "sums that are wrong": (ranks.check_bits({**ENGINE, "exact": False}), "fix",
                            "this jaxlib computes some sums on a CPU wrongly",
                            "import tessera before the first array of jax"),
    "no overlap": (ranks.check_overlap("cpu"), "note", "on CPUs nothing overlaps", ""),
    "overlap": (ranks.check_overlap("gpu"), "ok", "schedule.all_reduce_overlap(True)", ""),
    "an all-reduce": (reduced(2, 1e-5, 2**24, 0.1), "ok",
                      "right among 2 devices: 10 µs for 4 B; 16 MiB in 100.0 ms, 0.2 GB/s", ""),
    "an all-reduce that is wrong": (check_sum(8, 4), "fix",
                                    "the sum of 4 numbers over 8 devices is wrong",
                                    "do not train here"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_check_says_what_it_found_and_what_to_do(name: str) -> None:
    check, status, found, fix = ROWS[name]
    assert check.status == status
    assert found in check.found
    assert check.fix.startswith(fix) and bool(check.fix) >= (status == "fix")
    json.dumps(check.facts)


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in Report((ROWS["switches"][0],)).json()


def test_hangs_end_and_leave_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(limits, "_set", [limits.Limits(300, 8)])
    monkeypatch.setenv("TESSERA_FLIGHT_DIR", str(tmp_path / "new" / "dumps"))
    check = host.check_hangs()
    assert check.status == "ok" and check.found.startswith("after 300 s the program ends and names")
    monkeypatch.setenv("TESSERA_FLIGHT_DIR", "/proc/nothing")
    check = host.check_hangs()
    assert (check.status, check.found) == ("fix", "/proc/nothing cannot be written")
    assert check.fix == "set TESSERA_FLIGHT_DIR to a folder that can be written"


def test_this_host_is_examined() -> None:
    names = [c.name for c in host.host_checks({})]
    assert names == [
        "versions", "switches", "driver", "chips", "shared memory", "limits", "interfaces",
        "host name", "hangs",
    ]  # fmt: skip


def test_hosts_are_told_apart_where_they_differ() -> None:
    small, large = ROWS["a container's"][0], ROWS["shared memory"][0]
    limits = ROWS["limits"][0]
    found = merged([("n1", [large, limits]), ("n2", [small, limits]), ("n2", [small, limits])])
    assert [(c.name, c.status) for c in found] == [
        ("shared memory (n1)", "ok"),
        ("shared memory (n2)", "fix"),
        ("limits", "ok"),
    ]


def test_a_report_ends_with_its_symptoms_and_its_count() -> None:
    report = Report((ROWS["few files"][0], ROWS["hashes that differ"][0], ROWS["no overlap"][0]))
    assert report.exit_code == 1 and not json.loads(report.json())["ok"]
    assert report.text() == (
        " fix   limits     256 open files, any locked memory\n"
        "                  → ulimit -n 16384\n"
        " fix   hash seed  hash(name) differs from rank to rank\n"
        "                  → set PYTHONHASHSEED=0 on every rank, or start them with tessera run\n"
        " note  overlap    on CPUs nothing overlaps inside a program; the schedule shows what may\n"
        "\n"
        "what is seen, and the checks that look for the cause:\n"
        "  init or QP errors (NVSHMEM, DeepEP): limits fix\n"
        "  low overlap: overlap note\n"
        "  results differ: hash seed fix\n"
        "\n"
        "2 things must be fixed"
    )
    good = Report((ROWS["limits"][0],))
    assert good.exit_code == 0 and good.text().endswith("nothing must be fixed")


def test_every_symptom_of_the_guide_has_checks() -> None:
    known = {c.name for c, *_ in ROWS.values()} | {"hangs", "bubbles", "transports"}
    assert set().union(*SYMPTOMS.values()) <= known
    assert len(SYMPTOMS) == 5, "guide 2, section 7"


# ---- transports --------------------------------------------------------------------------------
def test_a_table_of_transports_says_why_and_what_auto_takes() -> None:
    gloo = Transport("gloo", True, "jaxlib has it")
    mpi = Transport("mpi", False, "no library", "build one")
    assert str(Transports((gloo, mpi), choices("cpu", 2, "gloo"))).splitlines() == [
        "transport       because",
        "gloo       yes  jaxlib has it",
        "mpi        no   no library",
        "                to have it: build one",
        "",
        f"{'auto takes':<{len(OPS[0])}}  in a process  between processes",
        f"{OPS[0]}  in-process    gloo",
        f"{OPS[1]:<{len(OPS[0])}}  in-process    gloo",
        f"{OPS[2]:<{len(OPS[0])}}  in-process    gloo",
    ]
    one = str(Transports((gloo,), choices("gpu", 1, "gloo")))
    assert "between" not in one and one.endswith("nccl")


@pytest.mark.parametrize(
    ("platform", "processes", "picks"),
    [
        ("cpu", 1, ("in-process", "")),
        ("cpu", 4, ("in-process", "mpi")),
        ("gpu", 1, ("nccl", "")),
        ("cuda", 4, ("nccl", "nccl")),
        ("tpu", 4, ("engine", "engine")),
    ],
)
def test_auto_depends_on_the_platform(platform: str, processes: int, picks: Any) -> None:
    assert {row[1:] for row in choices(platform, processes, "mpi")} == {picks}


def test_the_way_out_of_an_error_is_read() -> None:
    error = ts.BackendError("a: b", x=1, fix="do this : now")
    assert (host.first_line(error), host.fix_of(error)) == ("a: b", "do this : now")
    assert host.fix_of(ValueError("x")) == ""
