"""Reference interpreter of graphs in NumPy: on global arrays, or block by block.

`evaluate` ignores layouts: a collective is the identity. `evaluate_blocks` runs each device's local
computation on its own block. It changes a layout by joining the blocks and cutting them again, so
it shares no code with the collectives of the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ...core.checks import unfit
from ...core.dtypes import BY_NAME, held_as
from ...core.errors import DTypeError, GraphError, UsageError
from ...core.layout import TensorType, plain, shard_count
from ...core.mesh import Mesh
from ...core.tensor_checks import alike
from ...ops.local import axis_index, broadcast, reinterpret
from ...ops.op import OPS, Call, infer
from ...ops.redistribute import MOVES, NAMES
from ..tile.node import mesh_kernel, on_block
from . import xp_numpy
from .node import Graph, Node, need_graph
from .verify import verify
from .xp_numpy import identity

Array = Any
Coords = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """The place where local code runs: the whole array (`coords` None) or the block at `coords`."""

    coords: Coords | None = None

    def shape(self, t: TensorType) -> tuple[int, ...]:
        return t.shape if self.coords is None else t.local_shape

    def rank(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Array:
        assert self.coords is not None
        at = 0
        for a in axes:
            at = at * sizes[a] + self.coords[a]
        return np.int32(at)

    def start(self, t: TensorType, dim: int, digit: int) -> Array:
        d = t.digits(dim)
        if self.coords is None or not d:
            return np.int32(0)
        return np.int32(self.index(t, dim)[0])

    def index(self, t: TensorType, dim: int) -> Array:
        if self.coords is None:
            return np.arange(t.shape[dim], dtype=np.int32)
        return dim_index(t, dim, self.coords)


def dim_index(t: TensorType, dim: int, coords: Coords) -> Array:
    """The global index of each local element along `dim`; padding has an index past its digit."""
    total = np.zeros(1, np.int32)
    for d in t.digits(dim):
        at = 0
        for a in d.axes:
            at = at * t.sizes[a] + coords[a]
        line = np.arange(d.local, dtype=np.int32) + at * d.local
        total = (total[:, None] * d.size + line[None, :]).reshape(-1)
    return total


def dim_valid(t: TensorType, dim: int, coords: Coords) -> Array:
    """A mask of the local elements along `dim`: True for real elements, False for padding."""
    ok = np.ones(1, np.bool_)
    for d in t.digits(dim):
        at = 0
        for a in d.axes:
            at = at * t.sizes[a] + coords[a]
        line = np.arange(d.local) + at * d.local < d.size
        ok = (ok[:, None] & line[None, :]).reshape(-1)
    return ok


def every_coords(mesh: Mesh | None) -> list[Coords]:
    """The coordinates of every device, in row-major order."""
    if mesh is None:
        return [{}]
    ranges = [range(n) for n in mesh.shape]
    return [dict(zip(mesh.axes, at, strict=True)) for at in product(*ranges)]


def evaluate(graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of `graph` for global arrays, computed by NumPy as if there were one device.

    Each array must have the shape of its input and is cast to its dtype: floats to the input's
    width, whole numbers only if it holds all their values. Raises GraphError if the graph is not
    valid, UsageError if the number of arrays is not that of the inputs or a value is no array,
    ShapeError and DTypeError if an array does not match its input.
    """
    names = ", ".join(n.attrs["name"] for n in need_graph("evaluate", graph).inputs)
    if not isinstance(inputs, (list, tuple)):
        fix = f"give a list with one array per input, in order: [{names}]"
        raise unfit("evaluate", "the inputs", inputs, fix)
    if len(graph.inputs) != len(inputs):
        raise UsageError(
            f"evaluate: the graph has {len(graph.inputs)} inputs, {len(inputs)} values are given",
            inputs=names,
            fix="give one array per input, in order",
        )
    verify(graph)
    return computed(graph, [_input_array(n, x) for n, x in zip(graph.inputs, inputs, strict=True)])


def _input_array(n: Node, value: object) -> Array:
    """`value` as an array for the input `n`; a varying value has one leading dim per varying
    axis."""
    t, label = n.type, f"input {n.attrs['name']!r}"
    x = None
    with contextlib.suppress(ValueError, TypeError, RuntimeError):
        x = np.asarray(value)
    if x is None or (x.dtype.kind not in "biuf" and x.dtype.name not in BY_NAME):
        raise unfit("evaluate", label, value, f"give an array of {t}")
    whole = (*(t.sizes[a] for a in t.varying), *t.shape)
    fix = "give an array of what was recorded, or record the function with this one"
    alike(f"evaluate: {label}", plain(t.dtype, whole), plain(held_as(x.dtype), x.shape), fix)
    array = x.astype(t.dtype.numpy)
    if t.dtype.is_float or np.array_equal(array, x):
        return array
    raise DTypeError(
        f"evaluate: {label} does not hold all values that are given",
        have=t,
        given=f"{x.min()} to {x.max()}",
        fix="keep them within what the dtype holds",
    )


def computed(graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    """`evaluate` without casts: f64 arrays are computed in f64."""
    env: dict[Node, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for n in graph.nodes:
        if n.op == "input":
            continue
        if n.op == "item":
            env[n] = env[n.args[0]][n.attrs["index"]]
            continue
        with np.errstate(all="ignore"):
            env[n] = value_of(n, [env[a] for a in n.args])
    return [env[o] for o in graph.outputs]


def value_of(n: Node, args: list[Array]) -> Any:
    """The global result of `n`. A varying value has one leading dim per varying axis."""
    if n.op in NAMES:
        return args[0]
    if n.op == reinterpret.name:
        src = n.args[0].type.on(n.type.mesh)
        return join(n.type, cut(src, args[0]))
    if n.op == axis_index.name:
        return join(n.type, [_rank(n, c) for c in every_coords(n.type.mesh)])
    if n.op in MOVES:
        src = n.args[0].type.on(n.type.mesh)
        return join(n.type, _moved(n, cut(src, args[0])))
    if n.op == mesh_kernel.name:
        blocks = [cut(a.type.on(n.type.mesh), x) for a, x in zip(n.args, args, strict=True)]
        made = tuple(map(join, n.types, _put(n, blocks)))
        return made if len(made) > 1 else made[0]
    if n.op == "scan":
        return _scan_whole(n, args)
    ins = tuple(a.type for a in n.args)
    call = Call(xp_numpy, Place(), ins, n.types, n.attrs, computed)
    varying = n.types[0].varying
    if not varying:
        return OPS[n.op].compute(call, *args)
    sizes = tuple(n.type.sizes[a] for a in varying)
    results = []
    for at in product(*map(range, sizes)):
        where = dict(zip(varying, at, strict=True))
        coordinates_values = [
            x[tuple(where[a] for a in t.varying)] for x, t in zip(args, ins, strict=True)
        ]
        results.append(OPS[n.op].compute(call, *coordinates_values))

    def whole(parts: Sequence[Array]) -> Array:
        return np.stack(parts).reshape(*sizes, *np.shape(parts[0]))

    if isinstance(results[0], tuple):
        return tuple(whole(column) for column in zip(*results, strict=True))
    return whole(results)


def _rank(n: Node, coords: Coords) -> Array:
    """The rank of `coords` along the axes of `n`."""
    return Place(coords).rank(n.attrs["axes"], n.type.sizes)


def _moved(n: Node, blocks: Sequence[Array]) -> list[Array]:
    """The blocks of all devices after `n` has moved whole blocks between them."""
    every = every_coords(n.type.mesh)
    source = {to: src for src, to in n.attrs.get("pairs", ())}
    out = []
    for coords in every:
        src = n.attrs["root"] if n.op == broadcast.name else source.get(int(_rank(n, coords)))
        if src is None:
            out.append(np.zeros_like(blocks[0]))
            continue
        twin = dict(coords)
        for a in reversed(n.attrs["axes"]):
            src, twin[a] = divmod(src, n.type.sizes[a])
        out.append(np.asarray(blocks[every.index(twin)]))
    return out


def _put(n: Node, args: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """The blocks of all devices for each output of a kernel that puts."""
    every, axes = every_coords(n.type.mesh), n.attrs["axes"]
    sizes = [n.type.sizes[a] for a in axes]
    outs: list[list[Array]] = [[None] * len(every) for _ in n.types]
    for coords in every:
        if any(coords[a] for a in axes):
            continue
        group = [
            every.index({**coords, **dict(zip(axes, at))}) for at in product(*map(range, sizes))
        ]
        given = [np.stack([x[i] for i in group]).reshape(*sizes, *x[0].shape) for x in args]
        k = on_block(n.attrs["kernel"], [x[0].shape for x in args])
        for out, made in zip(outs, xp_numpy.kernel(k, axes, given), strict=True):
            for i, block in zip(group, made.reshape(-1, *made.shape[len(axes) :]), strict=True):
                out[i] = block
    return outs


# -- block by block -------------------------------------------------------------------------------
def cut(t: TensorType, value: Array, fill: float = 0) -> list[Array]:
    """The blocks of `value`, one per device. The first device of a partial axis holds the whole
    sum, the others zeros. Padding holds `fill`."""
    blocks = []
    for coords in every_coords(t.mesh):
        block = np.asarray(value)[tuple(coords[a] for a in t.varying)]
        for i in range(t.rank):
            at, ok = dim_index(t, i, coords), dim_valid(t, i, coords)
            block = np.take(block, np.where(ok, at, 0), axis=i)
            if not ok.all():
                shape = [1] * t.rank
                shape[i] = -1
                block = np.where(ok.reshape(shape), block, np.asarray(fill, block.dtype))
        if any(coords[a] for a, kind in t.partial if kind == "sum"):
            block = np.zeros_like(block)
        blocks.append(block)
    return blocks


FOLD = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def join(t: TensorType, blocks: Sequence[Array]) -> Array:
    """The global value of `blocks`: splits are concatenated, partial values reduced.

    Raises GraphError if two replicas hold different numbers.
    """
    out: dict[tuple[int, ...], Array] = {}
    first: dict[tuple[int, ...], Array] = {}  # key: coordinates, 0 for replicated axes
    kinds = dict(t.partial)
    for coords, block in zip(every_coords(t.mesh), blocks, strict=True):
        ok = [dim_valid(t, i, coords) for i in range(t.rank)]
        held = np.asarray(block)[np.ix_(*ok)] if t.rank else np.asarray(block)
        owned = {*t.split_axes, *t.varying, *kinds}
        home = tuple(v if a in owned else 0 for a, v in coords.items())
        if home in first:
            if not _close(first[home], held):
                raise GraphError(
                    f"oracle: the replicas of a value differ at {dict(coords)}", type=t, at=""
                )
            continue
        first[home] = held
        part = tuple(coords[a] for a in kinds)
        if part not in out:
            out[part] = np.zeros((*(t.sizes[a] for a in t.varying), *t.shape), held.dtype)
        places = [dim_index(t, i, coords)[ok[i]] for i in range(t.rank)]
        own = tuple(coords[a] for a in t.varying)
        out[part][(*own, *np.ix_(*places))] = held
    for level, (_, kind) in reversed(list(enumerate(t.partial))):
        folded: dict[tuple[int, ...], Array] = {}
        for part in sorted(out):
            key = part[:level] + part[level + 1 :]
            folded[key] = FOLD[kind](folded[key], out[part]) if key in folded else out[part]
        out = folded
    return out[()]


def _close(a: Array, b: Array) -> bool:
    if np.array_equal(a, b):
        return True
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    # Equal only within a tolerance: BLAS may take another code path for another memory alignment.
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))


def _change(src: TensorType, dst: TensorType, blocks: Sequence[Array]) -> list[Array]:
    """The blocks of `dst` from the blocks of `src`. Axes that are partial in both are handled one
    coordinate at a time."""
    stay = [a for a, _ in src.partial if a in dst.partial_axes]
    every = every_coords(src.mesh)
    done: list[Any] = [None] * len(every)
    n = shard_count(stay, src.sizes)
    for part in product(*(range(src.sizes[a]) for a in stay)):
        mine = [all(c[a] == p for a, p in zip(stay, part, strict=True)) for c in every]
        # The value as one coordinate of the staying axes sees it, as if those axes did not exist.
        inner_src = src.with_partial(tuple(p for p in src.partial if p[0] not in stay))
        inner_dst = dst.with_partial(tuple(p for p in dst.partial if p[0] not in stay))
        chosen = list(blocks)
        if n > 1:
            for k, c in enumerate(every):
                twin = {**c, **dict(zip(stay, part, strict=True))}
                chosen[k] = blocks[every.index(twin)]
        new = cut(inner_dst, join(inner_src, chosen))
        for k, ok in enumerate(mine):
            if ok:
                done[k] = new[k]
    return done


def mask(x: Array, ok: Array, dim: int, kind: str) -> Array:
    """`x` with the identity of the reduction `kind` where `ok` (along `dim`) is False."""
    shape = [1] * np.ndim(x)
    shape[dim] = -1
    return np.where(ok.reshape(shape), x, np.asarray(identity(kind, x.dtype), x.dtype))


def evaluate_blocks(graph: Graph, inputs: Sequence[Array], padding: float = 0) -> list[Array]:
    """The outputs for global arrays, computed block by block on the graph's mesh.

    `padding` is the value of float inputs in the padding of short blocks: no output may depend on
    it.
    """
    blocks = []
    for n, x in zip(graph.inputs, inputs, strict=True):
        blocks.append(cut(n.type, x, padding if n.type.dtype.is_float else 0))
    outs = run_blocks(graph, blocks, graph.mesh)
    return [join(n.type.on(graph.mesh), o) for n, o in zip(graph.outputs, outs, strict=True)]


def run_blocks(
    graph: Graph, inputs: Sequence[Sequence[Array]], mesh: Mesh | None
) -> list[list[Array]]:
    """The blocks of all devices for each output, from the blocks of the inputs."""
    every = every_coords(mesh)
    env: dict[Node, Any] = {}
    for n, x in zip(graph.inputs, inputs, strict=True):
        env[n] = list(x) if len(x) == len(every) else list(x) * len(every)
    for n in graph.nodes:
        if n.op == "input":
            continue
        if n.op in NAMES:
            env[n] = _change(n.args[0].type.on(mesh), n.type.on(mesh), env[n.args[0]])
            continue
        if n.op == "item":
            env[n] = env[n.args[0]][n.attrs["index"]]
            continue
        if n.op == "scan":
            env[n] = _scan_blocks(n, [env[a] for a in n.args], mesh)
            continue
        if n.op in MOVES:
            env[n] = _moved(n, env[n.args[0]])
            continue
        if n.op == mesh_kernel.name:
            found = _put(n, [env[a] for a in n.args])
            env[n] = found if len(found) > 1 else found[0]
            continue
        if n.op == "cond":
            pick, *given = (env[a] for a in n.args)
            yes, no = (run_blocks(n.attrs[k], given, mesh) for k in ("yes", "no"))
            env[n] = [
                [(y if p else z) for p, y, z in zip(pick, *ways_, strict=True)]
                for ways_ in zip(yes, no, strict=True)
            ]
            continue
        rule = infer(OPS[n.op], tuple(a.type for a in n.args), n.attrs)
        results = []
        for k, coords in enumerate(every):
            args = [env[a][k] for a in n.args]
            for i, dim, kind in rule.reduces:
                ok = dim_valid(n.args[i].type, dim, coords)
                args[i] = mask(args[i], ok, dim, kind)
            site = Place(coords)
            ins = tuple(a.type for a in n.args)
            with np.errstate(all="ignore"):
                call = Call(xp_numpy, site, ins, n.types, n.attrs, computed)
                results.append(OPS[n.op].compute(call, *args))
        if isinstance(results[0], tuple):
            env[n] = [[r[j] for r in results] for j in range(len(n.types))]
        else:
            env[n] = results
    return [env[o] for o in graph.outputs]


def _scan_blocks(n: Node, args: list[list[Array]], mesh: Mesh | None) -> list[list[Array]]:
    """A scan, block by block. All devices run each iteration together, because the body may have
    collectives."""
    carry, ys = _iterations(
        n,
        args,
        lambda values: run_blocks(n.attrs["body"], values, mesh),
        lambda x, t, i: [b[i] for b in x],
        lambda go, new, old, t: [x if g else y for g, x, y in zip(go, new, old, strict=True)],
    )
    outs = n.types[len(carry) :]
    every = range(len(every_coords(mesh)))
    return [*carry, *([_rows([b[k] for b in y], t, t.local_shape) for k in every]
                      for y, t in zip(ys, outs, strict=True))]  # fmt: skip


def _rows(
    iterations: Sequence[Array], t: TensorType, shape: tuple[int, ...], axis: int = 0
) -> Array:
    """The results of all iterations of a scan, stacked to `shape`."""
    return np.stack(iterations, axis=axis) if iterations else np.zeros(shape, t.dtype.numpy)


def _scan_whole(n: Node, args: list[Array]) -> tuple[Array, ...]:
    """A scan on global arrays: the scanned dim follows the dims of the varying axes."""
    carry, ys = _iterations(
        n,
        args,
        lambda values: computed(n.attrs["body"], values),
        lambda x, t, i: np.take(x, i, axis=len(t.varying)),
        lambda go, new, old, t: np.where(_on_dims(go, n.types[0], t), new, old),
    )
    outs = n.types[len(carry) :]
    shapes = [(*(t.sizes[a] for a in t.varying), *t.shape) for t in outs]
    rows = (_rows(y, t, s, len(t.varying)) for y, t, s in zip(ys, outs, shapes, strict=True))
    return (*carry, *rows)


def _on_dims(go: Array, of: TensorType, t: TensorType) -> Array:
    """The bool `go` of type `of`, one per device, reshaped to broadcast over the type `t`."""
    own = [t.sizes[a] if a in of.varying else 1 for a in t.varying]
    return np.reshape(go, (*own, *(1,) * t.rank))


def _iterations(
    n: Node,
    args: list[Any],
    run: Callable[[list[Any]], list[Any]],
    pick: Callable[[Any, TensorType, int], Any],
    stay: Callable[[Any, Any, Any, TensorType], Any],
) -> tuple[list[Any], list[list[Any]]]:
    """(final carry, the results of each iteration per stacked output) of the scan `n`.

    `pick` takes one row. `stay(go, new, old, type)` is the new value on the devices that continue,
    and the old one on the others.
    """
    consts, carries, length = n.attrs["consts"], n.attrs["carries"], n.attrs["length"]
    fixed, carry, xs = args[:consts], args[consts : consts + carries], args[consts + carries :]
    types = [a.type for a in n.args[consts + carries :]]
    ys: list[list[Any]] = []
    while length is None and np.any(carry[0]):
        new = run([*fixed, *carry])
        carry = [stay(carry[0], *found) for found in zip(new, carry, n.types, strict=True)]
    order = range(length or 0)
    for i in reversed(order) if n.attrs["reverse"] else order:
        out = run([*fixed, *carry, *(pick(x, t, i) for x, t in zip(xs, types, strict=True))])
        carry = out[:carries]
        ys.append(out[carries:])
    if n.attrs["reverse"]:
        ys.reverse()
    return carry, [[iteration[j] for iteration in ys] for j in range(len(n.types) - carries)]
