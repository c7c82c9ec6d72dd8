"""The cost of calls of TT-NN's API: the replay of a captured MLP over 8 devices against the same in
`jax.jit`, and an eager op against PyTorch's on one device.

The two of a pair run in turn, each of them first in half of the rounds (an earlier call fills the
caches), and each ends before the next. The call's time ends when it returns; the whole time ends
when the result is ready. Prints one line of JSON; microseconds, medians over all rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tessera import ttnn

ROWS, WIDTH, HIDDEN, ROUNDS = 32, 64, 256, 400


def main() -> None:
    rng = np.random.default_rng(0)
    x, up, down = (
        rng.normal(size=s).astype(np.float32)
        for s in ((1, 1, ROWS, WIDTH), (1, 1, WIDTH, HIDDEN), (1, 1, HIDDEN, WIDTH))
    )
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 8))
    columns = ttnn.ShardTensorToMesh(device, dim=3)
    put = partial(ttnn.from_torch, layout=ttnn.TILE_LAYOUT, device=device)
    rows, first, second = put(x), put(up, mesh_mapper=columns), put(down, mesh_mapper=columns)

    def mlp() -> ttnn.Tensor:
        return ttnn.linear(ttnn.all_gather(ttnn.linear(rows, first, activation="gelu"), 3), second)

    mlp()
    trace = ttnn.begin_trace_capture(device)
    out = mlp()
    ttnn.end_trace_capture(device, trace)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    whole, cut = (jax.sharding.PartitionSpec(*s) for s in ((), (None, None, None, "x")))
    place = partial(jax.sharding.NamedSharding, mesh)
    theirs = [jax.device_put(v, place(s)) for v, s in ((x, whole), (up, cut), (down, cut))]

    def body(x: Any, up: Any, down: Any) -> Any:
        hidden = (
            x @ up
        )  # and its gelu as ours has it; jax's own is by erfc, which is another program
        hidden = hidden * (0.5 * (1.0 + jax.lax.erf(hidden * 0.5**0.5)))
        return jax.lax.all_gather(hidden, "x", axis=3, tiled=True) @ down

    call = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(whole, cut, cut), out_specs=cut, check_vma=False)
    )
    found = np.concatenate([ttnn.to_torch(t).numpy() for t in ttnn.get_device_tensors(out)], 3)
    np.testing.assert_allclose(found, np.asarray(call(*theirs)), rtol=1e-3, atol=1e-3)

    one = torch.from_numpy(x).repeat(1, 1, 8, 1)
    kept: dict[str, Any] = {}

    def replay() -> None:
        ttnn.execute_trace(device, trace, blocking=False)
        kept["replay"] = out.value.stored

    def jitted() -> None:
        kept["jax"] = call(*theirs)

    def eager() -> None:
        kept["eager"] = ttnn.gelu(rows).value.stored

    def torch_eager() -> None:
        kept["torch"] = torch.nn.functional.gelu(one)

    pairs: list[dict[str, Callable[[], None]]] = [
        {"replay": replay, "jax": jitted}, {"eager": eager, "torch": torch_eager},
    ]  # fmt: skip
    times: dict[str, list[tuple[float, float]]] = {name: [] for pair in pairs for name in pair}
    for pair in pairs:
        for k in range(ROUNDS):
            for name in sorted(pair, reverse=k % 2 == 1):
                begin_s = time.perf_counter()
                pair[name]()
                returned_s = time.perf_counter()
                if name != "torch":
                    jnp.asarray(kept[name]).block_until_ready()
                times[name].append((returned_s - begin_s, time.perf_counter() - begin_s))
    micro = {
        f"{name}_{what}_us": round(1e6 * statistics.median(t[i] for t in took[20:]), 1)
        for name, took in times.items()
        for i, what in enumerate(("call", "whole"))
    }
    more = [a[1] - b[1] for a, b in zip(times["replay"], times["jax"])][20:]
    print(json.dumps(micro | {"more_us": round(1e6 * statistics.median(more), 1)}))
    ttnn.close_mesh_device(device)


if __name__ == "__main__":
    main()
