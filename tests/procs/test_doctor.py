"""`tessera doctor` on all ranks, without comparisons of times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cases import LONG
from tests.procs.harness import Ended, run_ranks

BODY = """
import sys
sys.argv[1:] = ["doctor", "--json"]
from tessera.launch.cli import main
sys.stdout.flush(); os.dup2(sys.stdout.fileno(), 1)
main()
"""
JOIN = """\
import os
import jax
jax.distributed.initialize(
    os.environ["TEST_ADDRESS"], int(os.environ["TEST_SIZE"]), int(os.environ["TEST_RANK"]),
    initialization_timeout=30,
)
"""
NAMES = [
    "versions", "switches", "driver", "chips", "shared memory", "limits", "interfaces",
    "host name", "hangs", "devices", "ranks' versions", "clocks", "hash seed", "determinism",
    "overlap", "bubbles", "transports", "all_reduce",
]  # fmt: skip


def told(ended: Ended) -> dict[str, Any]:
    """The report by check. Asserts its status and its list of checks."""
    report = json.loads(ended.out)
    assert report["ok"] == (ended.code == 0)
    assert [c["name"] for c in report["checks"]] == NAMES, ended.err
    return {c["name"]: c for c in report["checks"]}


def test_one_process_reduces_between_its_devices(tmp_path: Path) -> None:
    (ended,) = run_ranks(BODY, tmp_path, size=1, head="import os\n", TESSERA_DEVICES="4",
                         limit_s=300)  # fmt: skip
    checks = told(ended)
    assert checks["devices"]["facts"]["devices"] == 4
    reduced = checks["all_reduce"]
    assert reduced["status"] == "ok" and reduced["facts"]["devices"] == 4
    assert reduced["facts"]["latency_s"] > 0 and reduced["facts"]["bus_bytes_per_s"] > 0
    auto = checks["transports"]["facts"]["auto"]
    assert {tuple(row[1:]) for row in auto} == {("in-process", "")}


@LONG
def test_all_ranks_are_examined_and_one_reports(tmp_path: Path) -> None:
    """The harness gives each rank another hash seed, which the doctor must report."""
    first, second = run_ranks(BODY, tmp_path, head=JOIN, TESSERA_DEVICES="2", limit_s=300)
    assert first.code == 1 and second.code == 0, first.err + second.err
    assert second.out == ""
    checks = told(first)
    assert checks["devices"]["facts"] == {
        "devices": 4, "processes": 2, "hosts": 1, "platform": "cpu", "kind": "cpu",
        "local": [2, 2],
    }  # fmt: skip
    assert [n for n, c in checks.items() if c["status"] == "fix"] == ["hash seed"]
    assert checks["all_reduce"]["facts"]["devices"] == 4
    auto = checks["transports"]["facts"]["auto"]
    assert {tuple(row[1:]) for row in auto} == {("in-process", "gloo")}
