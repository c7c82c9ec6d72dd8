"""Transfer of arrays between devices of different processes, by programs over the devices of both.

A process copies the blocks that stay with it. The others are sent in rounds: a round is one program
over the devices that send or receive in it, where each sends one block at most (`ppermute`). The
routes follow from the two shardings alone, so all processes in a round build the same program, and
other processes build none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .cpu import narrow_floats
from .processes.replica_consistency import compare_values

Array = Any
Index = tuple[tuple[int, int], ...]
Route = tuple[tuple[Any, Any], ...]
"""(source, destination) for each device that receives a block."""


def moved(xs: Sequence[Array], to: Sequence[Sharding]) -> list[Array]:
    """Returns `xs` in the shardings `to`. Each process that holds a part of one of them before or
    after must call it; other processes may."""
    out: list[Array | None] = [None] * len(xs)
    away: list[tuple[int, Array, Route]] = []
    hosts = {
        i: np.asarray(x) if x.size else np.zeros(x.shape, x.dtype)
        for i, x in enumerate(xs)
        if _is_process_local(x) or not x.size
    }
    compare_values([(host, to[i]) for i, host in hosts.items() if host.size])
    for i, (x, where) in enumerate(zip(xs, to, strict=True)):
        if (host := hosts.get(i)) is not None:
            out[i] = jax.make_array_from_callback(
                x.shape, where, host.__getitem__, dtype=host.dtype
            )
        elif x.sharding == where:
            out[i] = x
        elif x.sharding.device_set == where.device_set:
            out[i] = _as(x, where)
        else:
            route = _route(x.sharding, where, x.shape)
            if route is None:  # no device has a block of `where`
                out[i] = _by_the_whole(x, where)
            else:
                away.append((i, x, route))
    for route in {r: None for _, _, r in away}:  # arrays with one route share its programs
        rows = [(i, x) for i, x, r in away if r == route]
        blocks = _carried(route, [x for _, x in rows])
        for (i, x), mine in zip(rows, blocks, strict=True):
            out[i] = jax.make_array_from_single_device_arrays(x.shape, to[i], mine, dtype=x.dtype)
    return out


def absent(shape: tuple[int, ...], dtype: Any, where: Sharding) -> Array:
    """Returns this process's handle of an array whose devices are all in other processes: no
    shards."""
    return jax.make_array_from_single_device_arrays(shape, where, [], dtype=dtype)


def _as(x: Array, where: Sharding) -> Array:
    """Returns `x` in the sharding `where`, which is over the same devices."""
    if where.addressable_devices:
        return _laid(where)(x)
    return absent(x.shape, x.dtype, where)


def _is_process_local(x: Array) -> bool:
    """Returns whether each process has its own copy of `x`: a NumPy array, or an uncommitted
    array."""
    alone = isinstance(x, np.ndarray) or isinstance(x.sharding, SingleDeviceSharding)
    return alone and not getattr(x, "committed", False)


@lru_cache(maxsize=1024)
def _laid(where: Sharding) -> Callable[[Array], Array]:
    return jax.jit(lambda x: x, out_shardings=where)


def _by_the_whole(x: Array, where: Sharding) -> Array:
    """Returns `x` in the sharding `where` by way of full replication; for shardings with different
    blocks."""
    assert isinstance(x.sharding, NamedSharding) and isinstance(where, NamedSharding)
    ends = [NamedSharding(s.mesh, PartitionSpec()) for s in (x.sharding, where)]
    (there,) = moved([_as(x, ends[0])], [ends[1]])
    return _as(there, where)


def _blocks(where: Sharding, shape: tuple[int, ...]) -> dict[Any, Index]:
    """Returns the index of each device's block."""
    return {
        d: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for d, index in where.devices_indices_map(shape).items()
    }


@lru_cache(maxsize=4096)
def _route(source: Sharding, to: Sharding, shape: tuple[int, ...]) -> Route | None:
    """Returns the source of each device's block in `to`: the device itself, else one of the same
    process, else the one with the fewest blocks to send. Returns None if no device holds a needed
    block."""
    holders: dict[Index, list[Any]] = {}
    for d, index in _blocks(source, shape).items():
        holders.setdefault(index, []).append(d)
    buffer_of: dict[Any, int] = {}
    found = []
    for d, index in _blocks(to, shape).items():
        if index not in holders:
            return None
        best = min(
            holders[index],
            key=lambda h: (h != d, h.process_index != d.process_index, buffer_of.get(h, 0), h.id),
        )
        if best.process_index != d.process_index:
            buffer_of[best] = buffer_of.get(best, 0) + 1
        found.append((best, d))
    return tuple(found)


@lru_cache(maxsize=4096)
def _rounds(route: Route) -> tuple[Route, ...]:
    """Returns the pairs of `route` between two processes, in rounds in which each device sends
    once."""
    rounds: list[dict[Any, Any]] = []
    for source, taker in route:
        if source.process_index == taker.process_index:
            continue
        free = next((r for r in rounds if source not in r), None)
        if free is None:
            rounds.append(free := {})
        free[source] = taker
    return tuple(tuple(r.items()) for r in rounds)


def _carried(route: Route, xs: Sequence[Array]) -> list[list[Array]]:
    """Returns this process's blocks of each of `xs` after `route`."""
    me = jax.process_index()
    data_of = [{s.device: s.data for s in x.addressable_shards} for x in xs]
    got: list[dict[Any, Array]] = [{} for _ in xs]
    for source, taker in route:
        if source.process_index == taker.process_index == me:
            for blocks, mine in zip(data_of, got, strict=True):
                block = blocks[source]
                mine[taker] = block if source == taker else jax.device_put(block, taker)
    for pairs in _rounds(route):
        devices = sorted({d for pair in pairs for d in pair}, key=lambda d: d.id)
        if all(d.process_index != me for d in devices):
            continue
        shapes = [x.sharding.shard_shape(x.shape) for x in xs]
        given = [
            _on_line(blocks, devices, shape, x.dtype)
            for x, blocks, shape in zip(xs, data_of, shapes, strict=True)
        ]
        for mine, y, shape in zip(got, _round(pairs)(*given), shapes, strict=True):
            blocks = {s.device: s.data for s in y.addressable_shards}
            takers = [taker for _, taker in pairs if taker in blocks]
            mine.update((d, blocks[d] if shape else blocks[d].reshape(())) for d in takers)
    return [[mine[d] for _, d in route if d.process_index == me] for mine in got]


def _on_line(
    blocks: dict[Any, Array], devices: Sequence[Any], shape: tuple[int, ...], dtype: Any
) -> Array:
    """Returns one array over `devices` of each device's block; zeros for a device without one."""
    line = _line(tuple(devices))
    n, *rest = shape or (1,)  # a scalar gets a dim, as blocks are joined along dim 0
    mine = [
        (blocks[d] if shape else blocks[d].reshape(1)) if d in blocks else _zeros(shape, dtype, d)
        for d in devices
        if d.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays((n * len(devices), *rest), line, mine)


@lru_cache(maxsize=1024)
def _line(devices: tuple[Any, ...]) -> NamedSharding:
    return NamedSharding(jax.sharding.Mesh(np.array(devices), ("d",)), PartitionSpec("d"))


@lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Array:
    """The operand of a device that only receives."""
    return jax.device_put(np.zeros(shape or (1,), dtype), device)


@lru_cache(maxsize=1024)
def _round(pairs: Route) -> Callable[..., Any]:
    """Returns the program of one round."""
    devices = sorted({d for pair in pairs for d in pair}, key=lambda d: d.id)
    line = _line(tuple(devices))
    order = [(devices.index(a), devices.index(b)) for a, b in pairs]

    def permuted(*xs: Array) -> list[Array]:
        return [narrow_floats.moved(lax.ppermute)(x, "d", order) for x in xs]

    return jax.jit(
        jax.shard_map(
            permuted, mesh=line.mesh, in_specs=line.spec, out_specs=line.spec, check_vma=False
        )
    )
