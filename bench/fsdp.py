"""A sharded training step against PyTorch's: ZeRO-3 against FSDP2, or data parallelism against DDP.

The same GPT, weights and tokens, f32, AdamW, over dp. Tessera is one process with a virtual device
per rank; PyTorch has a process of one thread per rank, over gloo. Steps are taken in turn, and the
waiting side is idle, so each has the whole machine. Run it: `python bench/fsdp.py --zero 3` (or
`--zero 0`) prints one line of JSON. With `--processes` Tessera has a process per rank, too.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from few_devices import start_few
from gpt_step import our_memory, ours
from peers import jax_gpt
from turns import Steps, Workers, apart, in_turn, ratio, timed

HERE = Path(__file__).resolve().parent
SAME = 1e-4  # the largest difference of losses


def beside(peer: Workers, a: argparse.Namespace) -> dict[str, Steps]:
    """Returns the steps of Tessera in a process per rank, and of the peer, taken in turn."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    given = [str(a.ranks), port, str(a.layers), str(a.zero)]
    commands = [[str(HERE / "peers/our_gpt.py"), str(r), *given] for r in range(a.ranks)]
    with Workers(commands, a.limit, {"JAX_PLATFORMS": "cpu"}) as we:
        return in_turn({"ours": we.step, "peer": peer.step}, a.rounds, warm=6)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3))
    ap.add_argument("--ranks", type=int, default=2)
    ap.add_argument("--processes", action="store_true", help="ours in processes of one device")
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--limit", type=float, default=240.0, help="seconds until it is given up")
    a = ap.parse_args()
    config = jax_gpt.GPTConfig(layers=a.layers)
    kind = "fsdp" if a.zero else "ddp"
    with tempfile.TemporaryDirectory() as folder:
        tokens, labels = jax_gpt.batch(config)
        given: dict[str, Any] = {"tokens": tokens, "labels": labels, **jax_gpt.init(config)}
        np.savez(Path(folder) / "given.npz", **given)
        commands = [
            [str(HERE / "peers/torch_fsdp.py"), kind, folder, str(rank), str(a.ranks),
             "--heads", str(config.heads)]
            for rank in range(a.ranks)
        ]  # fmt: skip
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        with Workers(commands, a.limit, {"GLOO_SOCKET_IFNAME": loopback}) as peer:
            if a.processes:
                found, more = beside(peer, a), {}
            else:
                start_few(a.ranks)
                run, step = ours(config, {"dp": a.ranks}, zero=a.zero)
                found = in_turn({"ours": timed(run), "peer": peer.step}, a.rounds, warm=6)
                count = len(list(step.graph.collectives()))
                more = {"collectives": count, "memory": our_memory(step)}
    our, theirs = found["ours"], found["peer"]
    print(json.dumps({
        "zero": a.zero, "peer": kind, "torch": peer.about["torch"], "ranks": a.ranks,
        "ours_s": our.median_s, "ours_min_s": min(our.wall_s),
        "peer_s": theirs.median_s, "peer_min_s": min(theirs.wall_s),
        "speed_ratio": ratio(theirs.wall_s, our.wall_s),
        "cpu_ratio": ratio(theirs.cpu_s, our.cpu_s),
        "ours_peak_mb": our.peak_mb, "peer_peak_mb": theirs.peak_mb,
        "largest_loss_difference": apart(our, theirs, at_most=SAME),
        **more,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
