"""Bodies of the local view with their expected results, as formulas over the devices' blocks.

A row is a body, its input (split along dim 0 over all axes of the mesh), and the results of all
devices, or one array if all devices hold the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist

Array = np.ndarray[Any, np.dtype[Any]]
Blocks = Sequence[Array]
MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
N = MESH.size


@dataclass(frozen=True)
class Case:
    """A `body` on a block of shape `block` per device; `expect` returns the list of results, or
    one."""

    name: str
    body: Callable[[ts.Tensor], ts.Tensor]
    expect: Callable[[Blocks], Blocks | Array]
    block: tuple[int, ...] = (4, 3)
    smooth: bool = True


def pairs(blocks: Blocks, axis: int) -> list[list[Array]]:
    """For each device, the blocks of its group along mesh axis `axis` (2 x 2 devices)."""
    if axis == 0:
        return [[blocks[i % 2], blocks[2 + i % 2]] for i in range(4)]
    return [[blocks[2 * (i // 2)], blocks[2 * (i // 2) + 1]] for i in range(4)]


def rank_is(k: int, yes: Callable[..., Any], no: Callable[..., Any]) -> Callable[..., Any]:
    def body(x: ts.Tensor) -> ts.Tensor:
        return yes(x) if ts.mesh.current().rank == k else no(x)  # type: ignore[no-any-return]

    return body


def ring_sum(x: ts.Tensor) -> ts.Tensor:
    """An all_reduce by hand: each block goes once round the ring."""
    total, passing = x, x
    for _ in range(N - 1):
        passing = dist.shift(passing, ("dp", "tp"))
        total = total + passing
    return total


def by_rank(x: ts.Tensor) -> ts.Tensor:
    rank = ts.mesh.current().rank
    if rank == 0:
        x = x * 2.0
    elif rank == 3:
        x = ts.tanh(x)
    return dist.all_reduce(x * x, "tp") + x


def messages(x: ts.Tensor) -> ts.Tensor:
    rank = ts.mesh.current().rank
    if rank == 0:
        dist.send(x * 3.0, to=2, name="a")
        return dist.recv(2, "b") + x
    if rank == 2:
        got = dist.recv(0, "a")
        dist.send(got * x, to=0, name="b")
        return got
    return x


def looped(x: ts.Tensor) -> ts.Tensor:
    """A collective in a loop body; the carry starts equal on all devices and then differs by
    device."""

    def iteration(total: ts.Tensor, row: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        new = total + dist.all_reduce(row, "tp") * 0.5 + row
        return new, new * new

    end, rows = ts.scan(iteration, ts.zeros((3,)), x)
    return rows + end


CASES = [
    Case("all_reduce", lambda x: dist.all_reduce(x), lambda b: sum(b)),  # type: ignore[arg-type]
    Case("all_reduce tp", lambda x: dist.all_reduce(x, "tp"),
         lambda b: [p[0] + p[1] for p in pairs(b, 1)]),
    Case("all_reduce of one value", lambda x: dist.all_reduce(ts.ones((2,)), "dp"),
         lambda b: np.full(2, 2.0)),
    Case("mean", lambda x: dist.all_reduce(x, op="mean"), lambda b: np.mean(b, 0)),
    Case("max", lambda x: dist.all_reduce(x, "dp", op="max"),
         lambda b: [np.maximum(*p) for p in pairs(b, 0)]),
    Case("min", lambda x: dist.all_reduce(x, op="min"), lambda b: np.min(b, 0)),
    Case("all_gather", lambda x: dist.all_gather(x), lambda b: np.concatenate(b)),
    Case("all_gather dim 1", lambda x: dist.all_gather(x, "dp", dim=1),
         lambda b: [np.concatenate(p, 1) for p in pairs(b, 0)]),
    Case("gather", lambda x: dist.gather(x, "tp", dim=-1),
         lambda b: [np.concatenate(p, 1) for p in pairs(b, 1)]),
    Case("reduce_scatter", lambda x: dist.reduce_scatter(x, ("dp", "tp")),
         lambda b: np.split(sum(b), 4)),  # type: ignore[arg-type]
    Case("reduce_scatter mean", lambda x: dist.reduce_scatter(x, "tp", dim=0, op="mean"),
         lambda b: [np.split((p[0] + p[1]) / 2, 2)[i % 2] for i, p in enumerate(pairs(b, 1))]),
    Case("broadcast", lambda x: dist.broadcast(x, ("dp", "tp"), root=2), lambda b: b[2]),
    Case("broadcast dp", lambda x: dist.broadcast(x, "dp", root=1),
         lambda b: [p[1] for p in pairs(b, 0)]),
    Case("scatter", lambda x: dist.scatter(x, ("dp", "tp"), root=1), lambda b: np.split(b[1], 4)),
    Case("all_to_all", lambda x: dist.all_to_all(x, ("dp", "tp"), 0, 1),
         lambda b: [np.concatenate([np.split(s, 4)[i] for s in b], 1) for i in range(4)]),
    Case("all_to_all back", lambda x: dist.all_to_all(x, "tp", 1, 0),
         lambda b: [np.concatenate([np.split(s, 2, 1)[i % 2] for s in p])
                    for i, p in enumerate(pairs(b, 1))], block=(3, 4)),
    Case("all_to_all in place", lambda x: dist.all_to_all(x, ("dp", "tp"), 0, 0),
         lambda b: [np.concatenate([np.split(s, 4)[i] for s in b]) for i in range(4)]),
    Case("shard", lambda x: dist.shard(x, "tp", dim=0),
         lambda b: [np.split(s, 2)[i % 2] for i, s in enumerate(b)]),
    Case("permute", lambda x: dist.permute(x, ("dp", "tp"), [(0, 3), (2, 1)]),
         lambda b: [0 * b[0], b[2], 0 * b[0], b[0]]),
    Case("shift", lambda x: dist.shift(x, "dp"), lambda b: [p[1 - i // 2] for i, p in
                                                           enumerate(pairs(b, 0))]),
    Case("ring", ring_sum, lambda b: [sum(b)] * 4),  # type: ignore[list-item]
    Case("rank as a symbol", lambda x: x * (1.0 + ts.mesh.current().rank.to(ts.f32)),
         lambda b: [s * (1 + i) for i, s in enumerate(b)]),
    Case("rank as a number", rank_is(2, lambda x: x * 10.0, lambda x: x + 1.0),
         lambda b: [s * 10 if i == 2 else s + 1 for i, s in enumerate(b)]),
    Case("collectives after ranks", by_rank, lambda b: _by_rank(b)),
    Case("messages", messages,
         lambda b: [3 * b[0] * b[2] + b[0], b[1], 3 * b[0], b[3]]),
    Case("loop", looped, lambda b: _looped(b)),
]  # fmt: skip


def _by_rank(blocks: Blocks) -> Blocks:
    own = [blocks[0] * 2, blocks[1], blocks[2], np.tanh(blocks[3])]
    return [p[0] ** 2 + p[1] ** 2 + own[i] for i, p in enumerate(pairs(own, 1))]


def _looped(blocks: Blocks) -> Blocks:
    out = []
    for i, p in enumerate(pairs(blocks, 1)):
        totals = np.cumsum((p[0] + p[1]) * 0.5 + blocks[i], axis=0)
        out.append(totals**2 + totals[-1])
    return out
