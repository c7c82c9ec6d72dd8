"""Creation of tensors with values and a layout: `tensor`, `dist.tensor`, `redistribute`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...core.checks import axes_of, shown, sizes, string, unfit
from ...core.context import settings
from ...core.dtypes import dtype_of, f32
from ...core.errors import DTypeError, LayoutError, ShapeError, UsageError
from ...core.layout import Factor, TensorType, parse_type, plain
from ...core.mesh import Mesh
from ...core.options import ProgramOptions
from ...core.value_checks import is_whole
from ...ir.graph.node import Graph
from ..record.box import Box
from ..record.local_view import view
from ..record.mesh_transfer import moved
from ..record.operands import as_tensor
from ..record.recorder import KEY_TYPE, Recorder, current, recording, symbolic
from ..value.checks import mesh_or_none
from ..value.deferred_values import Recipe
from ..value.eager import run_graph
from ..value.engine import Engine, Program, engine
from ..value.host_data import engine_array, host_array, host_recipe, remembered
from ..value.tensor import Tensor
from . import functions, random

ROLES = {"row": -2, "col": -1, "batch": 0, "seq": 1, "hidden": -1, "vocab": -1, "experts": 0}
ROLES |= {"heads": -2}


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A layout by dim: which dims of a tensor are split over which mesh axes (guide 1, 7.3).

    `partition` names dims by role ("row" is dim -2, "col" is dim -1, ...) or by number. The entry
    of `mesh_axes` at the same position is the axis that splits this dim, or a tuple of axes, major
    first.
    """

    partition: tuple[str | int, ...] = ()
    mesh_axes: tuple[str | tuple[str, ...], ...] = ()

    def type(self, shape: Sequence[int], dtype: Any, mesh: Mesh | None) -> TensorType:
        """The TensorType of a tensor of `shape` in this layout.

        Raises LayoutError if the two lists differ in length, or name a dim twice or a dim that does
        not exist.
        """
        parts = _entries("partition", self.partition)
        axes = _entries("mesh_axes", self.mesh_axes)
        if len(parts) != len(axes):
            raise LayoutError(
                f"ShardSpec: {len(parts)} entries in partition, {len(axes)} in mesh_axes",
                partition=parts,
                mesh_axes=axes,
                fix="each entry pairs with the mesh axis at the same place",
            )
        split: dict[int, tuple[str, ...]] = {}
        for part, axis in zip(parts, axes, strict=True):
            d = self._dim(part, len(shape))
            if d in split:
                raise LayoutError(
                    f"ShardSpec: dim {d} is named twice",
                    partition=parts,
                    fix="give its axes as one tuple, major first",
                )
            split[d] = axes_of("ShardSpec", axis)
        dims = tuple((Factor(int(n), split.get(i, ())),) for i, n in enumerate(shape))
        return TensorType(dtype_of(dtype), dims, (), mesh)

    def _dim(self, part: str | int, rank: int) -> int:
        """Returns the dim that `part` names in a tensor of `rank` dims: a number, or a role such as
        "row". Raises LayoutError if there is no such dim."""
        if not is_whole(part) and not (isinstance(part, str) and part in ROLES):
            raise LayoutError(
                f"ShardSpec: {part!r} names no dim",
                partition=self.partition,
                fix="use " + ", ".join(ROLES) + " or a number",
            )
        d = ROLES[part] if isinstance(part, str) else int(part)
        if part == "row" and rank == 1:
            d = 0
        if not -rank <= d < rank:
            raise LayoutError(
                f"ShardSpec: {part!r} is dim {d}, but the tensor has {rank} dims",
                partition=self.partition,
                fix="name a dim that exists",
            )
        return d % rank


def _entries(argument: str, entries: object) -> tuple[Any, ...]:
    if isinstance(entries, (tuple, list)):
        return tuple(entries)
    raise unfit(
        "ShardSpec",
        argument,
        entries,
        'give a tuple with an entry per dim that is split, e.g. ("row",) and ("tp",)',
        LayoutError,
    )


Layout = ShardSpec | TensorType | str | None


def layout_type(layout: Layout, shape: Sequence[int], dtype: Any, mesh: Mesh | None) -> TensorType:
    """The type of a tensor of `shape` in `layout`: a ShardSpec, a text like `[8@dp, 4]` or
    `f32[8@dp, 4]`, a type, or None for replicated. Raises LayoutError if it cannot be read,
    ShapeError if it is for another shape, DTypeError if a text names another dtype."""
    want = dtype_of(dtype)
    if layout is None:
        return plain(want, shape, mesh)
    if isinstance(layout, ShardSpec):
        return layout.type(shape, want, mesh)
    if isinstance(layout, str):
        text = layout.strip()
        if "[" not in text:
            raise LayoutError(
                f"layout: {layout!r} has no brackets", fix='write a text such as "[8@dp, 4096]"'
            )
        if text.startswith("["):
            text = want.name + text
        t = parse_type(text, mesh)
        if t.dtype is not want:
            raise DTypeError(
                f"layout: {layout!r} names {t.dtype}, the tensor is of {want}",
                fix=f"leave the dtype out of the layout; for {t.dtype} give dtype=, or cast",
            )
    elif isinstance(layout, TensorType):
        t = layout if mesh is None else layout.on(mesh)
    else:
        raise LayoutError(
            f"layout: {shown(layout)} is no layout",
            fix='use dist.ShardSpec(...), or a text such as "[8@dp, 4096]"',
        )
    if t.varying and view() is None:
        raise LayoutError(
            f"layout: {layout} has a value for each device along {', '.join(t.varying)}",
            fix="give these values a dim and split that; only local bodies have what varies",
        )
    if t.shape != tuple(shape):
        raise ShapeError(
            f"layout: {layout} is for shape {t.shape}, the tensor has {tuple(shape)}",
            fix="write the tensor's own sizes",
        )
    return t.with_dtype(want)


def tensor(
    data: Any, mesh: Mesh | None = None, layout: Layout = None, dtype: Any = None, name: str = ""
) -> Tensor:
    """A tensor on a mesh from host data: numbers, lists, NumPy, DLPack, or a `jax.Array`.

    `layout` says which dims are split, e.g. "[8@dp, 4]"; without it every device holds all of it.
    Without `mesh` the mesh of the enclosing `with mesh:` is used; outside of one the tensor has no
    mesh and can be used with any. A tensor of another mesh is moved to `mesh`; its gradient ends
    there. For a parameter the result is its current value. Floats with a `name` become a weight,
    like a tensor of `dist.tensor`. If `dtype` is None, 64-bit data becomes 32-bit. Raises
    DTypeError if `dtype` does not exist or a value does not fit 32 bits; ShapeError if `layout` is
    for another shape; LayoutError if it cannot be read or does not fit the mesh; MeshError if
    `mesh` is not a Mesh, or a recorded function has a tensor of another one.
    """
    asked = mesh_or_none("tensor", mesh)
    mesh = asked or settings().mesh
    lies = engine().adopt(data, mesh) if engine_array(data) and layout is None else None
    if lies is not None and lies.mesh is None and mesh is not None:
        lies = None  # an array on one device is placed on the mesh, like host data
    if isinstance(data, Tensor) or lies is not None:
        t = data.now() if lies is None else Tensor(data, lies)
        if dtype is not None:
            t = t.to(dtype)
        if asked is not None and t.mesh not in (None, asked):
            to = layout_type(layout, t.shape, t.dtype, asked)
            return moved(t, to) if current() is None else functions.relayout(t, to)
        if layout is not None:
            t = functions.relayout(t, layout_type(layout, t.shape, t.dtype, mesh or t.mesh))
        return t
    x, want = host_array(data, dtype)
    kind, recorder = layout_type(layout, x.shape, want, mesh), current()
    boxed = name and recorder is None and want.is_float
    t = Box(None, kind) if boxed else Tensor(None, kind)
    t.wait(host_recipe(x))
    if not boxed:
        t._pending = lambda: engine().place(x, t.type)  # the array itself: no copy
    t.name = name
    t._host_values = remembered(x)
    if recorder is not None:
        inner = symbolic(recorder.node(t), recorder)
        inner._host_values = t._host_values
        return inner
    return t


Init = Callable[[tuple[int, ...]], Tensor] | str | float | None


def dist_tensor(
    shape: Sequence[int],
    layout: Layout = None,
    mesh: Mesh | None = None,
    dtype: Any = f32,
    init: Init = "normal",
    name: str = "",
) -> Box:
    """A tensor of `shape` made on the devices, each its own block, when it is first used.

    `init` is "normal" (standard deviation 1/sqrt(fan-in)), "zeros", "ones", "uniform", a number, or
    a function from the shape to a Tensor. Random values depend on `ts.seed` and `name` (without a
    name, on the order of creation), never on the layout. The value may be replaced, by
    `step.parameters = ...` or `t.put(tensor)`: functions read it again at each call. Without
    `name`, the tensor gets the name of its variable in the first `graph.training_step` that uses
    it. A step that makes a tensor under a name makes it once, and reuses it later. Raises
    UsageError if `init` is unknown, ShapeError if the function returns another shape, LayoutError
    if `layout` does not fit.
    """
    if hasattr(shape, "__array__"):
        fix = "a tensor of values is ts.tensor(x, mesh, layout); dist.tensor draws new ones"
        raise unfit("dist.tensor", "the shape", shape, fix)
    mesh = mesh_or_none("dist.tensor", mesh) or settings().mesh
    t = Box(None, layout_type(layout, sizes("dist.tensor", shape), dtype, mesh), name)
    t.drawn = True
    recorder = current()
    again: Box | None = None if recorder is None else recorder.root.earlier_boxes.get(name)
    if again is not None and (again.shape, again.dtype) == (t.shape, t.dtype):
        return again
    t.wait(first_values("dist.tensor", init, name))
    return t


def first_values(caller: str, init: Init, name: str) -> Recipe:
    """Returns a recipe that makes the first values of a tensor by `init`."""
    string(caller, "name", name)
    _check_init(init)
    key = random.key_for(name)
    return Recipe(lambda to: _initial(to, init, key))


def _initial(t: TensorType, init: Init, key: np.ndarray[Any, Any]) -> Any:
    engine().start(t.mesh)  # else the first draw would start too few devices
    small = _small(t, init, key)
    if small is not None:
        return engine().place(small, t)
    seed = Tensor(None, KEY_TYPE)
    seed._pending = lambda: engine().place(key, KEY_TYPE)
    options = settings().program
    if callable(init) and not isinstance(init, Normal):  # it may give other values next time
        graph, captured = _init_graph(t, init, options)
        return run_graph(graph, [seed, *captured])[0].stored
    program = _init_program(engine(), options, t, init)
    return program([seed.stored], (KEY_TYPE,))[0]


SMALL = (1 << 12, 1 << 16)
"""The element counts of the shared draws that small tensors are cut from. A program for each shape
took 0.2 s to compile, and a small model has dozens of shapes."""


def _small(t: TensorType, init: Init, key: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Returns the first values of a small tensor, equal to those of `_init_program`; None for
    others."""
    room = next((n for n in SMALL if t.size <= n), None)
    if room is None or t.dtype is not f32 or t.partial:
        return None
    match init:
        case None | "zeros":
            return np.zeros(t.shape, np.float32)
        case "ones":
            return np.ones(t.shape, np.float32)
        case int() | float():
            return np.full(t.shape, init, np.float32)
        case "normal":
            std = 1.0 / math.sqrt(_fan_in(t))
        case Normal():
            std = init.std
        case _:
            return None
    flat, number, by = plain(f32, (room,)), plain(f32, ()), engine()
    drawn = _draws(by, settings().program, flat)(
        [by.place(key, KEY_TYPE), by.place(np.float32(std), number)], (KEY_TYPE, number)
    )[0]
    found: np.ndarray[Any, Any] = by.fetch(drawn, flat)
    return found[: t.size].reshape(t.shape).copy()


@lru_cache(maxsize=16)
def _draws(by: Engine, options: ProgramOptions, t: TensorType) -> Program:
    """The program of normal draws: its inputs are a key and a standard deviation."""
    recorder = Recorder("init", options=options)
    recorder.key = recorder.node(recorder.input(KEY_TYPE, "random_key"))
    std = recorder.input(plain(f32, ()), "std")
    with recording(recorder):
        drawn = random.normal(t.shape) * std
    return by.compile(recorder.builder.graph([recorder.node(drawn)]))


@lru_cache(maxsize=256)
def _init_program(by: Engine, options: ProgramOptions, t: TensorType, init: Init) -> Program:
    """The program that makes tensors of one type. The key is an argument, so tensors share it."""
    return by.compile(_init_graph(t, init, options)[0])


def _init_graph(t: TensorType, init: Init, options: ProgramOptions) -> tuple[Graph, list[Tensor]]:
    """Returns (the graph from the random key to the values, the outside tensors that `init`
    uses)."""
    recorder = Recorder("init", options=options)
    k = recorder.input(KEY_TYPE, "random_key")
    recorder.key = recorder.node(k)
    with recording(recorder), random.laid_out(t):
        value = functions.relayout(initial_value(t, init), t)
    graph = recorder.builder.graph([recorder.node(value)])
    return graph, [c for c, _ in recorder.captured]


@dataclass(frozen=True, slots=True)
class Normal:
    """An `init` of normal draws around 0. Two with the same `std` are equal, so they share a
    program."""

    std: float

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        return random.normal(shape, std=self.std)


INITS = ("normal", "uniform", "zeros", "ones")


def _check_init(init: object) -> None:
    if init is None or callable(init) or (isinstance(init, str) and init in INITS):
        return
    if not isinstance(init, (int, float)):
        raise UsageError(
            f"init: {shown(init)} is not known",
            fix='use "normal", "uniform", "zeros", "ones", a number or a function of the shape',
        )


def initial_value(t: TensorType, init: Init) -> Tensor:
    """Records the initial value of a tensor of type `t`. Raises UsageError for an unknown `init`,
    ShapeError if its function returns another shape."""
    _check_init(init)
    if callable(init):
        tensor = as_tensor(init(t.shape)).to(t.dtype)
        if tensor.shape != t.shape:
            raise ShapeError(
                f"init: the function gave shape {tensor.shape} for {t.shape}",
                tensor=t,
                fix="return a tensor of the shape it is called with",
            )
        return tensor
    if isinstance(init, (int, float)):
        return functions.full(t.shape, float(init), t.dtype)
    match init:
        case None | "zeros":
            return functions.full(t.shape, 0.0, t.dtype)
        case "ones":
            return functions.full(t.shape, 1.0, t.dtype)
        case "normal":
            return (random.normal(t.shape) * (1.0 / math.sqrt(_fan_in(t)))).to(t.dtype)
        case _:
            bound = 1.0 / math.sqrt(_fan_in(t))
            return (random.uniform(t.shape, low=-bound, high=bound)).to(t.dtype)


def _fan_in(t: TensorType) -> int:
    return max(1, t.shape[-2] if t.rank > 1 else t.size)


# -- changing the layout --------------------------------------------------------------------------
def redistribute(x: Tensor, layout: Layout = None, mesh: Mesh | None = None) -> Tensor:
    """`x` in another layout on its mesh; Tessera derives the collectives from the two layouts.

    `layout` is a text such as "[8@dp, 4]", a ShardSpec or a type; None replicates. Raises
    LayoutError if the layout cannot be read or does not fit the mesh, ShapeError if it is for
    another shape, MeshError if `mesh` is not a Mesh.
    """
    t = as_tensor(x)
    where = mesh_or_none("redistribute", mesh) or t.mesh or settings().mesh
    return functions.relayout(t, layout_type(layout, t.shape, t.dtype, where))
