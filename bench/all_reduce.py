"""The time of an all_reduce in one process and between processes.

The peers are raw JAX, PyTorch over gloo and OpenMPI, beside a copy of the same bytes in memory.
Every device holds an f32 tensor of a given size, and gets the sum of all. Sides take turns, and the
waiting side is idle. Run it: `python bench/all_reduce.py` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from page import prose, table
from turns import Taken, Workers, apart, in_turn

PEER = Path(__file__).resolve().parent / "peers" / "all_reduce.py"
SIZES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)
PLACES = ((1, 2), (1, 8), (2, 1), (4, 1))  # processes, devices of each


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def copied(size: int, times: int = 9) -> float:
    """The median seconds of a copy of `size` bytes."""
    x, y = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        np.copyto(y, x)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def sides(processes: int) -> list[str]:
    found = ["ours", "jax"]
    if processes > 1 and util.find_spec("torch") is not None:
        found.append("torch")
    return found + ["mpi"] * (processes > 1 and shutil.which("mpirun") is not None)


def workers(side: str, processes: int, devices: int, limit_s: float) -> Workers:
    port = free_port()
    count = 1 if side == "mpi" else processes
    commands = [
        [str(PEER), side, str(rank), str(processes), str(devices), str(port)]
        for rank in range(count)
    ]
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    env = {"JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    return Workers(commands, limit_s, env)


def place(
    processes: int, devices: int, sizes: Sequence[int], rounds: int, limit_s: float
) -> list[dict[str, Any]]:
    """For each size, the medians and minima of the seconds of one sum, by side."""
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(workers(name, processes, devices, limit_s))
            for name in sides(processes)
        }
        rows = []
        for size in sizes:
            found = in_turn({n: asking(w, size) for n, w in started.items()}, rounds, warm=2)
            apart(*found.values(), at_most=0.0)
            rows.append({
                "processes": processes, "devices": devices, "bytes": size, "copy_s": copied(size),
                "median_s": {name: s.median_s for name, s in found.items()},
                "min_s": {name: min(s.wall_s) for name, s in found.items()},
            })  # fmt: skip
    return rows


def asking(w: Workers, size: int) -> Any:
    def step() -> Taken:
        return w.step(str(size))

    return step


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The section of bench/RESULTS.md."""
    worst = max(r["median_s"]["ours"] / r["median_s"]["jax"] for r in rows)
    text = f"""`bench/all_reduce.py`: each device holds an f32 tensor of so many bytes and gets the
        sum of all; milliseconds of one sum, medians (minima in brackets). Raw JAX is `psum` in
        `shard_map`, PyTorch `all_reduce` over gloo, MPI OpenMPI's `MPI_Allreduce` over shared
        memory; a copy is `memcpy` of the same bytes in one process. Ours takes at most
        **{worst:.2f}** times as long as raw JAX (no limit was set)."""
    kinds = ("ours", "jax", "torch", "mpi")
    return [
        *prose(text),
        *table(
            ("processes x devices", "bytes", "copy", "ours", "raw JAX", "PyTorch", "MPI"),
            [
                (
                    f"{r['processes']} x {r['devices']}",
                    f"{r['bytes'] >> 10} KiB"
                    if r["bytes"] < 1 << 20
                    else f"{r['bytes'] >> 20} MiB",
                    _ms(r["copy_s"]),
                    *(
                        f"{_ms(r['median_s'][k])} ({_ms(r['min_s'][k])})"
                        if k in r["median_s"]
                        else "-"
                        for k in kinds
                    ),
                )
                for r in rows
            ],
        ),
    ]


def _ms(s: float) -> str:
    return f"{s * 1e3:.3g}"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--limit", type=float, default=120.0, help="seconds for one place")
    ap.add_argument("--most", type=int, default=SIZES[-1], help="the largest size in bytes")
    a = ap.parse_args()
    sizes = [size for size in SIZES if size <= a.most]
    rows = [r for at in PLACES for r in place(*at, sizes, a.rounds, a.limit)]
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
