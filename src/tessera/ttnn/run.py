"""How does an op of TT-NN run? As one program of Tessera's on each device's own parts.

An op is a function of values. It gets floats as f32 and its result is rounded to the element type
of the result: what an op does within is never narrower. (Ops that only move elements get them as
they are.) The program is kept by the op, its options
and its operands' types. While a trace is captured, what runs is written down too (trace.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from ..core.checks import shown
from ..core.dtypes import f32
from ..core.layout import TensorType
from ..core.wording import nearest
from ..lang.jit import jit
from ..lang.tensor import Tensor as Value
from .asked import kinds
from .configs import MemoryConfig
from .device import MeshDevice
from .dtypes import DataType, Layout, stored
from .faults import wrong
from .mapping import TensorTopology, joint
from .tensor import Tensor

Body = Callable[..., Any]
B = TypeVar("B", bound=Body)
Options = tuple[tuple[str, Any], ...]


_MOVES: set[Body] = set()


def moves(body: B) -> B:
    """`body`, which puts elements elsewhere and computes none: they stay as wide as they are, in
    memory and between devices."""
    _MOVES.add(body)
    return body


@lru_cache(maxsize=4096)
def program(
    body: Body,
    options: Options,
    given: tuple[DataType | None, ...],
    own: tuple[DataType, ...],
    types: tuple[TensorType, ...],
) -> Callable[..., Any]:
    """The program of `body` with its options, for operands of `types`; `kind` says of `given` and
    `own` which element types its results have."""

    def op(*values: Value) -> tuple[Value, ...]:
        floats = {v.dtype for v in values if v.dtype.is_float}
        if body not in _MOVES or len(floats) > 1:
            values = tuple(v.to(f32) if v.dtype in floats - {f32} else v for v in values)
        found = body(*values, **dict(options))
        many = found if isinstance(found, tuple | list) else (found,)
        every = zip(many, given, own, strict=True)
        return tuple(stored(v, kind(v, asked, have)) for v, asked, have in every)

    op.__name__ = op.__qualname__ = body.__name__
    return jit(op)


def kind(value: Value, asked: DataType | None, own: DataType) -> DataType:
    """The element type of a result: what is asked for, or the operands' own; float32 where that is
    of whole numbers and the result is not."""
    fits = own.is_float or not value.dtype.is_float
    return asked or (own if fits else DataType.FLOAT32)


def run_many(
    name: str,
    body: Body,
    tensors: Sequence[Tensor],
    dtype: DataType | Sequence[DataType | None] | None = None,
    memory_config: MemoryConfig | None = None,
    layout: Layout | None = None,
    topology: TensorTopology | None = None,
    output: Tensor | Sequence[Tensor] | None = None,
    count: int = 1,
    **options: Any,
) -> list[Tensor]:
    """The `count` results of `body` on `tensors`, which are on one mesh.

    `dtype`, `layout` and `memory_config` are by default those of the first operand; of whole
    numbers a result with a fraction is of float32. With `output` the result is written into that
    tensor, whose element type is then the default. Raises TTNNError if the operands are not on one
    mesh.
    """
    device = device_of(name, tensors)
    kinds(name, layout=layout, memory_config=memory_config)
    outputs: Sequence[Tensor | None] = (
        [output] if isinstance(output, Tensor) else output or [None] * count
    )
    asked = dtype if isinstance(dtype, list | tuple) else [dtype] * count
    for one in asked:
        kinds(name, dtype=one)
    given = tuple(asked)
    own = tuple(tensors[0].dtype if o is None else o.dtype for o in outputs)
    static = tuple(sorted(options.items()))
    values = [t.value for t in tensors]
    key = (body, static, given, own, tuple(v.type for v in values))
    count_program(name, device, key)
    call = program(*key)
    results = call(*values)
    lies = topology or joint([t.topology for t in tensors])
    made = []
    for value, wanted, have, into in zip(results, given, own, outputs, strict=True):
        made.append(
            write(name, into, value)
            if into is not None
            else Tensor.on(
                device, value, tensors[0], dtype=kind(value, wanted, have), topology=lies,
                layout=layout or tensors[0].layout,
                memory_config_=memory_config or tensors[0].memory_config_,
            )
        )  # fmt: skip
    device.last = results[0]
    for holder in device.ancestry():
        if holder.capture is not None:
            holder.capture.add(device, call, tensors, made)
    return made


def run(name: str, body: Body, tensors: Sequence[Tensor], *given: Any, **options: Any) -> Tensor:
    """The one result of `body` on `tensors`; as `run_many`."""
    return run_many(name, body, tensors, *given, **options)[0]


def write(name: str, into: Tensor, value: Value) -> Tensor:
    """Writes `value` into the tensor `into`. Raises TTNNError unless it has its shape and type."""
    have = into.value.type
    if (have.shape, have.dtype, have.mesh) != (value.shape, value.dtype, value.mesh):
        raise wrong(
            f"{name}: the result does not fit the tensor that it should be written into",
            [("result", value.type), ("tensor", have)],
            fix="give one of the result's shape and element type",
        )
    into.value_ = value
    return into


def brief(x: object) -> str:
    """What an argument is, in a line: of an array its type and shape."""
    shape = getattr(x, "shape", None)
    return shown(x) if shape is None else f"{type(x).__name__}{[*shape]}"


def device_of(name: str, tensors: Sequence[Tensor]) -> MeshDevice:
    """The mesh that the tensors are on. Raises TTNNError if one is not, or on another one. (Whether
    it was reshaped since, their `value` says.)"""
    for t in tensors:
        if not isinstance(t, Tensor):
            raise wrong(
                f"{name}: {brief(t)} is no tensor of ttnn",
                fix="ttnn.from_torch(array, device=device)",
            )
    found = tensors[0].device_
    for t in tensors:
        if t.device_ is None or t.value_ is None:
            raise t.absent()
        if t.device_ is not found:
            raise wrong(
                f"{name}: the tensors are on different meshes",
                [("first", found), ("other", t.device_)],
                fix="move one: ttnn.to_device(ttnn.from_device(tensor), device)",
            )
    assert found is not None
    _ = found.mesh  # it is open, or an error says so
    return found


def count_program(name: str, device: MeshDevice, key: Any) -> None:
    """Counts a program as one of the device's, and of the meshes that it is a part of."""
    for holder in device.ancestry():
        if key in holder.programs:
            continue
        if not holder.misses_allowed:
            raise wrong(
                f"{name}: it has not run with such arguments, and the device allows no new program",
                [("device", holder)],
                fix="run it once before device.set_program_cache_misses_allowed(False)",
            )
        if holder.caches:
            holder.programs.add(key)


# Keywords that say how, and never what: they are accepted by every op.
HOW = {
    "memory_config", "program_config", "compute_kernel_config", "core_grid", "queue_id", "cq_id",
    "sub_core_grids", "output_tensor", "optional_output_tensor", "output_mem_config",
    "output_layout", "output_tile", "global_cb", "sub_device_id", "subdevice_id", "use_legacy",
    "optional_input_tensors", "intermediate_tensor", "num_workers", "num_buffers_per_channel",
    "use_multicore", "use_low_perf", "use_pack_untilize", "keep_l1_aligned",
    "fast_and_approximate_mode", "accurate_mode", "vector_mode", "out",
}  # fmt: skip


_INTO = "output_tensor", "optional_output_tensor", "out"


def how(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What of `options` reaches `run`. Raises TTNNError for a keyword that no op has."""
    unknown = [k for k in options if k not in HOW]
    if unknown:
        code = sys._getframe(1).f_code  # the function that was called
        own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        like = nearest(unknown[0], {*own, *HOW}, 4)
        raise wrong(f"{name}: it has no argument {unknown[0]!r}", fix=f"the nearest are {like}")
    into = next((options[k] for k in _INTO if options.get(k) is not None), None)
    memory = options.get("memory_config", options.get("output_mem_config"))
    kinds(name, memory_config=memory)
    return {"output": into, "memory_config": memory}
