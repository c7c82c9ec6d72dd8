"""The cost of checkpoints: stall, throughput and load time, against Orbax, PyTorch and `dd`.

0.5 GB of f32 weights over 8 virtual devices in one process. Each round runs every side in turn, on
one disk; PyTorch has the same tensors in a process group of one. Loads follow saves, so files are
read from the page cache. A byte of the largest file is then flipped, and all is read again. Run it:
`python bench/checkpoints.py` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera import checkpoint, dist
from tessera.runtime.devices import start

DEVICES, ROWS = 8, 2048


@dataclass
class Side:
    """A side: `save` returns when training may continue, `wait` when all is on the disk; `load`
    returns a sum of all values."""

    save: Callable[[Path], None]
    wait: Callable[[], None]
    load: Callable[[Path], float]
    stall_s: list[float] = field(default_factory=list)
    saved_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    finds: bool = False

    def turn(self, folder: Path, want: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        begin = time.perf_counter()
        self.save(folder)
        self.stall_s.append(time.perf_counter() - begin)
        self.wait()
        self.saved_s.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        got = self.load(folder)
        self.load_s.append(time.perf_counter() - begin)
        assert abs(got - want) <= 1e-3 * abs(want), (got, want)

    def flip(self, folder: Path) -> None:
        """Returns whether a load finds one flipped byte."""
        file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        with file.open("r+b") as f:
            f.seek(file.stat().st_size // 3)  # within a tensor
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte ^ 1]))
        try:
            self.load(folder)
        except Exception:
            self.finds = True

    def row(self, nbytes: int) -> dict[str, Any]:
        saved_s = statistics.median(self.saved_s)
        return {
            "stall_s": statistics.median(self.stall_s), "min_stall_s": min(self.stall_s),
            "saved_s": saved_s, "mb_s": nbytes / saved_s / 1e6,
            "load_s": statistics.median(self.load_s), "finds_a_flipped_byte": self.finds,
        }  # fmt: skip


def ours(weights: dict[str, Any]) -> Side:
    def save(folder: Path) -> None:
        checkpoint.save("t", weights, root=folder, quiet=True)

    def load(folder: Path) -> float:
        found = checkpoint.load("t", weights, root=folder).tensors
        return float(sum(t.stored[0, 0] + t.stored[-1, -1] for t in found.values()))

    return Side(save, checkpoint.wait, load)


def orbax(weights: dict[str, Any]) -> Side:
    import jax
    import orbax.checkpoint as ocp

    keeper = ocp.StandardCheckpointer()  # saves in the background
    arrays = {name: t.stored for name, t in weights.items()}
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
    }

    def load(folder: Path) -> float:
        found = keeper.restore(folder, like)
        return float(sum(x[0, 0] + x[-1, -1] for x in found.values()))

    return Side(lambda folder: keeper.save(folder, arrays), keeper.wait_until_finished, load)


def pytorch(weights: dict[str, Any], store: Path) -> Side:
    import torch
    import torch.distributed as group
    import torch.distributed.checkpoint as dcp

    group.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    state = {name: torch.from_numpy(t.numpy().copy()) for name, t in weights.items()}
    running: list[Any] = []

    def load(folder: Path) -> float:
        into = {name: torch.empty_like(x) for name, x in state.items()}
        dcp.load(into, checkpoint_id=folder)
        return float(sum(x[0, 0] + x[-1, -1] for x in into.values()))

    return Side(
        lambda folder: running.append(dcp.async_save(state, checkpoint_id=folder)),
        lambda: running.pop().result(),
        load,
    )


def dd(folder: Path, nbytes: int) -> float:
    """Returns the seconds in which `dd` writes as many bytes and syncs them to the disk."""
    begin = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=32M", f"count={nbytes >> 25}",
         "conv=fsync"],
        check=True, capture_output=True,
    )  # fmt: skip
    took_s = time.perf_counter() - begin
    (folder / "dd").unlink()
    return took_s


def stepped(weights: dict[str, Any], mesh: dist.Mesh) -> float:
    """Returns the seconds of a training step on 64 rows that reads and writes all weights."""
    x = ts.tensor(np.ones((64, ROWS), np.float32), mesh=mesh)

    @ts.jit
    def step(weights: Any, x: Any) -> Any:
        loss = sum((((x @ w) ** 2).mean() for w in weights.values()), start=ts.tensor(0.0))
        grads = ts.grad(loss, weights)
        return {name: w - 1e-6 * grads[name] for name, w in weights.items()}

    times = []
    for _ in range(4):
        begin = time.perf_counter()
        new = step(weights, x)
        for t in new.values():
            t.stored.block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--mb", type=int, default=512)
    a = ap.parse_args()
    start(DEVICES)
    mesh, rng = dist.Mesh(("dp",), devices=DEVICES), np.random.default_rng(0)
    count = a.mb // 32  # matrices of 32 MiB
    weights = {
        f"w{i}": ts.tensor(
            rng.normal(size=(ROWS, 4096)).astype(np.float32), mesh=mesh, layout=f"[{ROWS}@dp, 4096]"
        )
        for i in range(count)
    }
    nbytes = sum(t.type.nbytes for t in weights.values())
    want = float(sum(t.stored[0, 0] + t.stored[-1, -1] for t in weights.values()))
    with tempfile.TemporaryDirectory() as there, contextlib.redirect_stdout(sys.stderr):
        folder = Path(there)
        sides = {"ours": ours(weights)}
        if util.find_spec("orbax"):
            sides["orbax"] = orbax(weights)
        if util.find_spec("torch"):
            sides["torch"] = pytorch(weights, folder / "store")
        step_s, plain_s = stepped(weights, mesh), list[float]()
        for k in range(a.rounds + 1):
            names = [*sides]
            for name in names[k % len(names) :] + names[: k % len(names)]:
                sides[name].turn(folder / name, want)
            plain_s.append(dd(folder, nbytes))
            if k == 0:  # compiles and makes threads
                for side in sides.values():
                    side.stall_s, side.saved_s, side.load_s = [], [], []
        for name, side in sides.items():
            side.flip(folder / name)
        versions = {
            name: metadata.version(package)
            for name, package in (("orbax", "orbax-checkpoint"), ("torch", "torch"))
            if name in sides
        }
    print(json.dumps({
        "nbytes": nbytes, "devices": DEVICES, "rounds": a.rounds, "versions": versions,
        "step_s": step_s, "dd_mb_s": nbytes / statistics.median(plain_s) / 1e6,
        "sides": {name: side.row(nbytes) for name, side in sides.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
