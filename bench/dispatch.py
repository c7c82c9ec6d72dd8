"""The overhead of a call: compiled functions of 1, 74 and 900 leaves, against `jax.jit`.

The program does almost nothing, so the time is that of the call. Both are called in turn. Prints
one line of JSON; times in microseconds, medians and minima over all rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tessera as ts
from tessera import dist
from tessera.runtime.devices import start


def measure(leaves: int, devices: int, rounds: int) -> dict[str, Any]:
    def body(tree: dict[str, Any]) -> dict[str, Any]:
        return {k: v + 1.0 for k, v in tree.items()}

    mesh = dist.Mesh(("dp",), shape={"dp": devices}) if devices > 1 else None
    names = [f"w{i:04d}" for i in range(leaves)]
    ours: Any = {
        k: ts.tensor(np.ones(8, np.float32), mesh=mesh, layout="[8@dp]" if mesh else None)
        for k in names
    }
    our_call = ts.jit(body)
    if mesh is not None:
        jmesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("dp",))
        spec = jax.sharding.PartitionSpec("dp")
        where = jax.sharding.NamedSharding(jmesh, spec)
        theirs: Any = {k: jax.device_put(jnp.ones(8), where) for k in names}
        their_call = jax.jit(jax.shard_map(body, mesh=jmesh, in_specs=spec, out_specs=spec))
    else:
        theirs, their_call = {k: jnp.ones(8) for k in names}, jax.jit(body)
    for _ in range(3):
        ours, theirs = our_call(ours), their_call(theirs)
    times: dict[str, list[float]] = {"ours": [], "jax": []}
    for _ in range(rounds):
        begin = time.perf_counter()
        new = our_call(ours)
        times["ours"].append(time.perf_counter() - begin)
        ours = new
        jax.block_until_ready([t.stored for t in ours.values()])
        begin = time.perf_counter()
        new = their_call(theirs)
        times["jax"].append(time.perf_counter() - begin)
        theirs = new
        jax.block_until_ready(theirs)
    micro = {f"{k}_us": round(1e6 * statistics.median(v), 1) for k, v in times.items()}
    least = {f"{k}_min_us": round(1e6 * min(v), 1) for k, v in times.items()}
    more = [a - b for a, b in zip(times["ours"], times["jax"], strict=True)]
    return {
        "leaves": leaves,
        "devices": devices,
        **micro,
        **least,
        "more_us": round(1e6 * statistics.median(more), 1),
        "more_by_minima_percent": round(100 * (min(times["ours"]) / min(times["jax"]) - 1), 1),
    }


def main() -> None:
    start(8)
    rows = [measure(n, d, 300 if n < 100 else 150) for d in (1, 8) for n in (1, 74, 900)]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
