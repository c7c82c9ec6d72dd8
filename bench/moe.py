"""The cost of MoE dispatch and combine, against an all-to-all of the same bytes.

The experts are identities here, so the time is that of the router, its tables, row selection, the
two exchanges and the weighted sum. The peer sends arrays of the same bytes there and back by
`lax.all_to_all` in `shard_map`, and does nothing else. The forward layer with its experts is timed
too, to show the share. All run in turn in one process. Run it: `python bench/moe.py` prints one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np

import tessera as ts
from tessera import dist, nn, op
from tessera.runtime.devices import start

DEVICES = 8
TOKENS, D, HIDDEN, EXPERTS, K = 4096, 512, 1024, 16, 2


def as_they_are(rows: ts.Tensor, _: Any) -> ts.Tensor:
    """Identity experts."""
    return rows


def plain(sent_bytes: int, there: str) -> tuple[Callable[[], Any], Any]:
    """Returns a function that runs an all-to-all of `sent_bytes` per device and one back."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("ep",))
    spec = PartitionSpec("ep")
    width = {"f32": 4, "u8": 1}[there]
    count = sent_bytes // width // DEVICES

    def body(x: Any) -> Any:
        return jax.lax.all_to_all(x, "ep", 1, 0, tiled=True)

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=spec))
    dtype = jnp.float32 if there == "f32" else jnp.uint8
    x = jax.device_put(jnp.ones((DEVICES, DEVICES, count), dtype), NamedSharding(mesh, spec))
    return lambda: f(x).block_until_ready(), x


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of each, taken in turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times[2:]) for name, times in found.items()}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=15)
    rounds = ap.parse_args().rounds
    start(DEVICES)
    mesh = dist.Mesh(("ep",), shape={"ep": DEVICES})
    rng = np.random.default_rng(0)
    batch = 2 * DEVICES
    x = ts.tensor(
        rng.normal(size=(batch, TOKENS // batch, D)).astype(np.float32),
        mesh=mesh,
        layout=f"[{batch}@ep, {TOKENS // batch}, {D}]",
    )

    def weight(*shape: int) -> ts.Tensor:
        value = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[-2])
        dims = [f"{shape[0]}@ep", *map(str, shape[1:])] if len(shape) == 3 else [*map(str, shape)]
        return ts.tensor(value, mesh=mesh, layout=f"[{', '.join(dims)}]")

    w = {
        "router": weight(D, EXPERTS),
        "up": weight(EXPERTS, D, HIDDEN),
        "down": weight(EXPERTS, HIDDEN, D),
    }
    rows = []
    for capacity, packing in ((1.25, None), (1.25, "fp8_e4m3"), (None, None)):
        how: dict[str, Any] = {"capacity": capacity, "transport": {"pack_dtype": packing}}
        seen = nn.moe_inspection(w, x, K, **how)
        there, back = (sum(h.wire_bytes or 0 for h in p) for p in (seen.dispatch, seen.combine))
        sent = [b * DEVICES // (DEVICES - 1) for b in (there, back)]
        moving = ts.jit(lambda x, w, how=how: op.moe(x, w, k=K, network=as_they_are, **how))
        layer = ts.jit(lambda x, w, how=how: op.moe(x, w, k=K, **how))
        one, _ = plain(sent[0], "u8" if packing == "fp8_e4m3" else "f32")
        two, _ = plain(sent[1], "f32")

        def peer(one: Any = one, two: Any = two) -> None:
            one()
            two()

        def waited(fn: Callable[..., ts.Tensor]) -> Callable[[], Any]:
            return lambda: fn(x, w).stored.block_until_ready()

        got = timed({"ours": waited(moving), "plain": peer, "layer": waited(layer)}, rounds)
        rows.append({
            "room": "dropless" if capacity is None else f"capacity {capacity}",
            "payload": packing or "f32",
            "sent_mb": sum(sent) / 1e6,
            "ours_ms": 1e3 * got["ours"],
            "plain_ms": 1e3 * got["plain"],
            "layer_ms": 1e3 * got["layer"],
            "ratio": got["ours"] / got["plain"],
        })  # fmt: skip
    print(json.dumps({"tokens": TOKENS, "d": D, "hidden": HIDDEN, "experts": EXPERTS, "k": K,
                      "devices": DEVICES, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
