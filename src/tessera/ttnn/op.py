"""The table of ops: a row for each, and the one caller of all rows.

A row has a name, a body and the body's operands. The body is a function of values that runs on
each device's own parts, as one program. Parameters of the body that are annotated `Value` are
tensors, `Operand` tensors or numbers, `Value | None` tensors that may be left out; all others are
options, which the program is compiled for. `@op` makes a row of an annotated function, `row` of a
function without annotations.

Exactness: a body gets floats as f32, and its result is rounded once to the element type of the
result. With `moves` it only puts elements elsewhere, and gets them as they are. The result has the
element type of the first operand, or float32 if that is of whole numbers and the result is not.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np

from ..core.dtypes import f32
from ..core.layout import TensorType
from ..core.wording import nearest
from ..lang.jit.jit import jit
from ..lang.value.tensor import Tensor as Value
from .args import check_types
from .device import MeshDevice
from .dtypes import DataType, Layout, stored
from .errors import brief, public, wrong
from .mapping import TensorTopology, joint_topology
from .tensor import Tensor

Body = Callable[..., Any]
Operand = Value | float
Defaults = dict[str, Any]
REQUIRED: Any = inspect.Parameter.empty  # the default of an option that has none
OUTPUT_KEYWORDS = ("output_tensor", "optional_output_tensor", "out")
# Every op accepts them. Those of the first line have an effect.
KEYWORDS = frozenset((
    *OUTPUT_KEYWORDS, "dtype", "memory_config", "output_mem_config",
    "program_config", "compute_kernel_config", "core_grid", "queue_id", "cq_id", "sub_core_grids",
    "output_layout", "output_tile", "global_cb", "sub_device_id", "subdevice_id", "use_legacy",
    "optional_input_tensors", "intermediate_tensor", "num_workers", "num_buffers_per_channel",
    "use_multicore", "use_low_perf", "use_pack_untilize", "keep_l1_aligned",
    "fast_and_approximate_mode", "accurate_mode", "vector_mode",
))  # fmt: skip


@dataclass
class Call:
    """The arguments of one call of an op."""

    op: Op
    operands: dict[str, Tensor | list[Tensor]]
    options: dict[str, Any]
    keywords: dict[str, Any]  # those of the op's `keywords`
    extra_args: Sequence[Any]  # behind the last that has a name
    dtype: DataType | Sequence[DataType | None] | None = None  # of the result, or of each
    layout: Layout | None = None
    topology: TensorTopology | None = None
    output: Any = None  # the tensor, or tensors, that the result is written into

    def tensors(self) -> list[Tensor]:
        """The tensors, in their order."""
        return [t for x in self.operands.values() for t in (x if isinstance(x, list) else [x])]


@dataclass(frozen=True, eq=False)
class Op:
    """A row of the table. `prepare` is called with each call before it runs, and `into` names the
    operand that the result is written into."""

    name: str
    body: Body
    parameters: dict[str, inspect.Parameter]  # with the annotations of the public function
    operands: dict[str, Any]  # tensors, and their other type: float, list, or none (Tensor)
    returns: Any = Tensor
    doc: str | None = None
    moves: bool = False
    dtype: DataType | None = None
    layout: Layout | None = None
    into: str = ""
    prepare: Callable[[Call], None] | None = None
    keywords: frozenset[str] = KEYWORDS
    extra_args: bool = False

    @cached_property
    def defaults(self) -> Defaults:
        """The parameters that may be left out."""
        return {k: p.default for k, p in self.parameters.items() if p.default is not REQUIRED}

    @cached_property
    def positional(self) -> list[str]:
        """The parameters that may be given by position."""
        return [k for k, p in self.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def function(self) -> Callable[..., Any]:
        """The public function of the row."""
        options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation=Any)
        parameters = [*self.parameters.values(), options]

        def call(*args: Any, **keywords: Any) -> Any:
            return self.run(self.bound(args, keywords))

        call.__name__ = call.__qualname__ = self.name
        call.__doc__, call.__module__ = self.doc, self.body.__module__
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=self.returns
        )
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        call.op = self  # type: ignore[attr-defined]
        return public(call)

    def bound(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Call:
        """The arguments by their names. Raises TTNNError for a keyword that the op does not have or
        an operand that is no tensor, TypeError or KeyError for too many arguments or too few."""
        arguments, common = dict(zip(self.positional, args)), {}
        if len(args) > len(self.positional) and not self.extra_args:
            raise TypeError("too many arguments")
        for word, value in keywords.items():
            if word in arguments:
                raise TypeError(f"two values for {word}")
            if word in self.parameters:
                arguments[word] = value
            elif word in self.keywords:
                common[word] = value
            else:
                raise unknown_keyword(self.name, word, (*self.parameters, *self.keywords))
        call = Call(self, {}, {}, common, args[len(self.positional) :], layout=self.layout)
        for word in self.parameters:
            value = arguments[word] if word in arguments else self.defaults[word]
            if word not in self.operands:
                call.options[word] = _hashable(value)
            elif isinstance(value, Tensor):
                call.operands[word] = value
            elif value is None and self.defaults.get(word, REQUIRED) is None:
                call.options[word] = None
            elif self.operands[word] is float:
                call.options[word] = _number(self.name, value)
            elif self.operands[word] is list and isinstance(value, list | tuple) and value:
                call.operands[word] = [_tensor(self.name, t) for t in value]
            else:
                _tensor(self.name, value)
        return call

    def run(self, call: Call) -> Any:
        """Runs the op: as one program, which is kept by its options and its operands' types. While
        a trace is captured it is written down too. Raises TTNNError if the operands are not on one
        mesh."""
        name, keywords, tensors = self.name, call.keywords, call.tensors()
        device = device_of(name, tensors)
        if self.prepare is not None:
            self.prepare(call)
            tensors = call.tensors()
        first, values = tensors[0], [t.value for t in tensors]
        memory = keywords.get("memory_config", keywords.get("output_mem_config"))
        layout = keywords.get("layout") or call.layout
        if keywords:
            check_types(name, layout=layout, memory_config=memory, dtype=keywords.get("dtype"))
        outputs = self._outputs(call)
        dtypes = keywords.get("dtype") or call.dtype or self.dtype
        key = (
            self,
            tuple([(k, len(t) if isinstance(t, list) else 0) for k, t in call.operands.items()]),
            tuple(call.options.items()), tuple(dtypes) if isinstance(dtypes, list) else dtypes,
            tuple([first.dtype if t is None else t.dtype for t in outputs]),
            tuple([v.type for v in values]),
        )  # fmt: skip
        count_program(name, device, key)
        call_program, result_dtypes = program(*key)
        results = call_program(*values)
        topology = call.topology or joint_topology([t.topology for t in tensors])
        if len(outputs) < len(results):
            outputs = [None] * len(results)
        written = [
            write(name, output, value)
            if output is not None
            else Tensor.on(
                device, value, first, dtype=dtype, topology=topology,
                layout=layout or first.layout, memory_config_=memory or first.memory_config_,
            )
            for value, output, dtype in zip(results, outputs, result_dtypes)
        ]  # fmt: skip
        device.last = results[0]
        for holder in device.ancestry():
            if holder.capture is not None:
                holder.capture.add(device, call_program, tensors, written)
        return written[0] if self.returns is Tensor else typing.get_origin(self.returns)(written)

    def _outputs(self, call: Call) -> list[Tensor | None]:
        """The tensors that results are written into, or None for a new one."""
        output = call.output
        if self.into:
            output = call.operands.get(self.into)
        elif output is None:
            words = (w for w in OUTPUT_KEYWORDS if call.keywords.get(w) is not None)
            output = call.keywords.get(next(words, ""))
        return [*output] if isinstance(output, list | tuple) else [output]


@lru_cache(maxsize=4096)
def program(
    op: Op, operands: Sequence[tuple[str, int]], options: Sequence[tuple[str, Any]], dtypes: Any,
    defaults: Sequence[DataType], types: tuple[TensorType, ...],
) -> tuple[Callable[..., Any], list[DataType]]:  # fmt: skip
    """The program of an op for operands of `types`, and the element types of its results, which
    are known once it has run. `operands` are names with the length of those that are lists,
    `dtypes` are asked for, `defaults` are those of the outputs or of the first operand."""
    body, moves, positional = op.body, op.moves, op.positional
    result_dtypes: list[DataType] = []

    def local(*values: Value) -> tuple[Value, ...]:
        floats = {v.dtype for v in values if v.dtype.is_float}
        if not moves or len(floats) > 1:
            values = tuple(v.to(f32) if v.dtype in floats - {f32} else v for v in values)
        rest = iter(values)
        arguments = dict(options)
        for word, count in operands:
            arguments[word] = [next(rest) for _ in range(count)] if count else next(rest)
        results = body(*[arguments.pop(p) for p in positional if p in arguments], **arguments)
        results = results if isinstance(results, tuple | list) else (results,)
        asked = dtypes if isinstance(dtypes, tuple) else (dtypes,) * len(results)
        own = defaults if len(defaults) == len(results) else (defaults[0],) * len(results)
        every = [result_dtype(*x) for x in zip(results, asked, own, strict=True)]
        result_dtypes[:] = every
        return tuple(stored(v, dtype) for v, dtype in zip(results, every))

    local.__name__ = local.__qualname__ = op.name
    return jit(local), result_dtypes


def result_dtype(value: Value, asked: DataType | None, default: DataType) -> DataType:
    """The element type of a result: the one that is asked for, or the default; float32 if that is
    of whole numbers and the result is not."""
    fits = default.is_float or not value.dtype.is_float
    return asked or (default if fits else DataType.FLOAT32)


# -- rows -----------------------------------------------------------------------------------------
def op(
    *, internal: Sequence[str] = (), more: Sequence[inspect.Parameter] = (), name: str = "",
    **facts: Any,
) -> Callable[[Body], Any]:  # fmt: skip
    """A row of an annotated function, whose docstring it has. `internal` are parameters of the body
    that `prepare` gives, `more` parameters that it takes; `facts` are fields of `Op`."""

    def decorated(body: Body) -> Any:
        hints, operands, parameters = typing.get_type_hints(body), {}, {}
        for word, p in inspect.signature(body).parameters.items():
            hint = hints[word]
            parts = typing.get_args(hint) or (hint,)
            if Value in parts:
                is_list = typing.get_origin(hint) is Sequence
                operands[word] = float if float in parts else list if is_list else Tensor
                union = reduce(or_, (Tensor if h is Value else h for h in parts))
                hint = Sequence[Tensor] if is_list else union
            parameters[word] = p.replace(annotation=hint)
        parameters |= {p.name: p for p in more}
        for word in internal:
            del parameters[word]
        several = typing.get_origin(hints["return"])
        returns = {list: list[Tensor], tuple: tuple[Tensor, ...]}.get(several, Tensor)
        words = facts.get("keywords", KEYWORDS)
        words = words.difference(OUTPUT_KEYWORDS if "into" in facts else ())
        facts["keywords"] = words.difference(["dtype"] if several else ())
        row = Op(name or body.__name__, body, parameters, operands, returns, body.__doc__, **facts)
        return row.function()

    return decorated


def row(
    name: str, body: Body, *operands: str, options: Defaults | None = None,
    keyword_options: Defaults | None = None, **facts: Any,
) -> Any:  # fmt: skip
    """A row of a function without annotations, whose first arguments are `operands` and the next
    ones `options`, with their defaults; it gets `keyword_options` by name. An operand with `?` at
    its end may be a number."""
    types: dict[str, Any] = {o.rstrip("?"): float if "?" in o else Tensor for o in operands}
    make, options, by_name = inspect.Parameter, options or {}, keyword_options or {}
    parameters = [make(k, _EITHER, annotation=Tensor | t) for k, t in types.items()]
    parameters += [make(k, _EITHER, default=v, annotation=Any) for k, v in options.items()]
    parameters += [make(k, _BY_NAME, default=v, annotation=Any) for k, v in by_name.items()]
    rest = "".join(f", {p}" for p in parameters[len(types) :]).replace(": Any", "")
    doc = f"`{name}` of each element, after broadcasting{rest}."
    return Op(name, body, {p.name: p for p in parameters}, types, doc=doc, **facts).function()


_EITHER, _BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def in_place(function: Any, name: str = "") -> Any:
    """The op `function` with its result written into its first operand."""
    op: Op = function.op
    name, first = name or f"{op.name}_", next(iter(op.operands))
    doc = f"`{op.name}`, written into `{first}`."
    words = op.keywords.difference(OUTPUT_KEYWORDS)
    return replace(op, name=name, into=first, doc=doc, keywords=words).function()


# -- arguments ------------------------------------------------------------------------------------
def _hashable(x: Any) -> Any:
    if isinstance(x, int | float | str):
        return x
    if hasattr(type(x), "tolist"):  # arrays of NumPy and PyTorch
        x = x.tolist()
    return tuple(map(_hashable, x)) if isinstance(x, Iterable) and not isinstance(x, Mapping) else x


def _tensor(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise wrong(
            f"{name}: {brief(x)} is no tensor of ttnn", fix="ttnn.from_torch(array, device=device)"
        )
    return x


def _number(name: str, x: Any) -> float:
    if isinstance(x, np.generic) and x.dtype.kind in "biuf":
        x = x.item()
    if not isinstance(x, int | float):
        raise wrong(
            f"{name}: {brief(x)} is neither a tensor of ttnn nor a number",
            fix="ttnn.from_torch(array, device=device)",
        )
    return x


def unknown_keyword(name: str, word: str, keywords: Iterable[str]) -> Exception:
    """The error for a keyword that a function does not have."""
    return wrong(
        f"{name}: it has no argument {word!r}",
        fix=f"the nearest are {nearest(word, {*keywords}, 4)}",
    )


def check_keywords(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises TTNNError unless all `options`, which `function` got besides its parameters, are
    keywords that every op accepts."""
    for word in options:
        if word not in KEYWORDS:
            parameters = inspect.signature(function).parameters
            raise unknown_keyword(function.__name__, word, (*parameters, *KEYWORDS))


def device_of(name: str, tensors: Sequence[Tensor]) -> MeshDevice:
    """The mesh that the tensors are on. Raises TTNNError if one is not, or on another one. (Whether
    it was reshaped since, their `value` says.)"""
    device = _tensor(name, tensors[0]).device_
    for t in tensors:
        if t.device_ is None or t.value_ is None:
            raise t.absent()
        if t.device_ is not device:
            raise wrong(
                f"{name}: the tensors are on different meshes",
                [("first", device), ("other", t.device_)],
                fix="move one: ttnn.to_device(ttnn.from_device(tensor), device)",
            )
    assert device is not None
    _ = device.mesh  # it is open, or an error says so
    return device


def write(name: str, output: Tensor, value: Value) -> Tensor:
    """Writes `value` into the tensor `output`. Raises TTNNError unless it has its shape and
    type."""
    have = output.value.type
    if (have.shape, have.dtype, have.mesh) != (value.shape, value.dtype, value.mesh):
        raise wrong(
            f"{name}: the result does not fit the tensor that it should be written into",
            [("result", value.type), ("tensor", have)],
            fix="give one of the result's shape and element type",
        )
    output.value_ = value
    return output


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
