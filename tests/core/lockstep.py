"""Local implementations of ops with NumPy in place of the engine: all devices in lockstep.

A local implementation calls at most one collective, so each device runs twice: first up to the
collective, where it records the data it sends, then to the end, with the data it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tessera.core.layout import shard_count
from tessera.core.mesh import Mesh
from tessera.ir.graph import xp_numpy
from tessera.ir.graph.node import Node
from tessera.ir.graph.oracle import FOLD, Place, evaluate, every_coords
from tessera.ops.op import OPS, Call

Array = Any
Coords = Mapping[str, int]


class _Sent(Exception):
    """Raised when a device reaches its collective."""

    def __init__(
        self, receive: Callable[[list[Array], int], Array], axes: tuple[str, ...], x: Array
    ):
        self.receive, self.axes, self.x = receive, axes, x


class Adapter(SimpleNamespace):
    """The `xp` of one device: NumPy, with collectives that raise `_Sent` until `answer` is set."""

    def __init__(self, coords: Coords, sizes: Mapping[str, int], answer: Array = None) -> None:
        super().__init__(coords=coords, sizes=sizes, answer=answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(xp_numpy, name)

    def dynamic_slice(self, x: Array, dim: int, index: Array, size: int) -> Array:
        return np.take(x, np.arange(size) + int(index) * size, dim)

    def _meet(
        self, receive: Callable[[list[Array], int], Array], axes: Sequence[str], x: Array
    ) -> Array:
        if self.answer is None:
            raise _Sent(receive, tuple(axes), x)
        return self.answer

    def all_gather(self, x: Array, axes: Sequence[str], dim: int) -> Array:
        return self._meet(lambda xs, me: np.concatenate(xs, dim), axes, x)

    def all_reduce(self, x: Array, axes: Sequence[str], kind: str) -> Array:
        return self._meet(lambda xs, me: _fold(kind, xs), axes, x)

    def reduce_scatter(self, x: Array, axes: Sequence[str], dim: int) -> Array:
        return self._meet(lambda xs, me: np.split(_fold("sum", xs), len(xs), dim)[me], axes, x)

    def all_to_all(self, x: Array, axes: Sequence[str], split: int, concat: int) -> Array:
        return self._meet(
            lambda xs, me: np.stack([np.take(y, me, split) for y in xs], concat), axes, x
        )


def _fold(kind: str, xs: Sequence[Array]) -> Array:
    total = xs[0]
    for x in xs[1:]:
        total = FOLD[kind](total, x)
    return total


def run_local(node: Node, blocks: Sequence[Array], mesh: Mesh) -> list[Array]:
    """The block of `node` on every device, computed from the blocks of its one argument."""
    every = every_coords(mesh)
    ins = tuple(a.type for a in node.args)

    def local(k: int, answer: Array = None) -> Array:
        xp = Adapter(every[k], mesh.sizes, answer)
        call = Call(xp, Place(every[k]), ins, node.types, node.attrs, evaluate)
        return OPS[node.op].local(call, blocks[k])

    done: list[Array] = []
    sent: list[_Sent] = []
    for k in range(len(every)):
        try:
            done.append(local(k))
        except _Sent as stop:
            sent.append(stop)
    if not sent:
        return done
    assert len(sent) == len(every), "all devices reach the collective, or none"
    for k, me in enumerate(every):
        axes = sent[k].axes
        same = [
            j
            for j, other in enumerate(every)
            if all(other[a] == me[a] for a in mesh.axes if a not in axes)
        ]
        place = {j: int(Place(every[j]).rank(axes, mesh.sizes)) for j in same}
        group = sorted(same, key=place.__getitem__)
        assert len(group) == shard_count(axes, mesh.sizes)
        done.append(local(k, sent[k].receive([sent[j].x for j in group], group.index(k))))
    return done
