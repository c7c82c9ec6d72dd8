"""The overhead of comparing the order of calls, in a step of two processes that reads its loss.

The GPT of the other sections over dp, one device and one thread per process. The same compiled step
runs in turn with the comparison, and with nothing noted, published or compared. Run it: `python
bench/call_order.py` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))


def taken(layers: int, rounds: int) -> None:
    """A rank's part: the steps of both sides in turn. The first rank prints the times."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo writes there
    from gpt_step import ours
    from peers import jax_gpt
    from turns import in_turn, ratio, timed

    from tessera import compile as compiled
    from tessera.runtime.devices import start
    from tessera.runtime.processes.call_order import CallOrder

    start(2)
    run, _ = ours(jax_gpt.GPTConfig(layers=layers), {"dp": 2}, zero=0)

    def without() -> float:
        noted = patch.object(CallOrder, "came", lambda *_: None)
        with noted, patch.object(compiled, "compare_calls", lambda: None):
            return run()

    found = in_turn({"with": timed(run), "without": timed(without)}, rounds, warm=6)
    a, b = found["with"], found["without"]
    if os.environ["RANK"] == "0":
        print(json.dumps({
            "layers": layers, "with_s": a.median_s, "without_s": b.median_s,
            "time_ratio": ratio(a.wall_s, b.wall_s), "cpu_ratio": ratio(a.cpu_s, b.cpu_s),
        }), file=out, flush=True)  # fmt: skip
    time.sleep(1)
    os._exit(0)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--rounds", type=int, default=40)
    ap.add_argument("--limit", type=float, default=300.0, help="seconds until it is given up")
    a = ap.parse_args()
    if "RANK" in os.environ:
        taken(a.layers, a.rounds)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port,
                 "MASTER_ADDR": "127.0.0.1", "TESSERA_DEVICES": "1", "JAX_PLATFORMS": "cpu"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for p in ranks:
            p.wait(a.limit)
    finally:
        for p in reversed(ranks):
            p.kill()


if __name__ == "__main__":
    main()
