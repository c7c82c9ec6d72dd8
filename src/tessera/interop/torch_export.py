"""Export of PyTorch modules: `torch.export`, decomposed to ATen, read as a `Program`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..core.checks import library
from ..core.dtypes import DType, dtype_of, f32, int32
from ..core.errors import DTypeError, UsageError
from ..lang.foreign.program import Call, Program, Ref
from ..lang.foreign.rules import Rules, stem
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor
from .torch_functions import BOUND, cut_backward, followed_functions

# Where a tensor is and how it lies in memory is the layout's part here.
PLACES = ("device", "layout", "pin_memory", "memory_format", "generator")
WHOLE = "scaled_dot_product_attention"  # ops with this in their names are not decomposed
# Nor are these, of which the decomposition has another gradient than PyTorch's own.
EXACT = ("binary_cross_entropy", "hardsigmoid", "hardswish", "sinc", "std", "std_mean", "xlogy")
_LINE = re.compile(r'File "(.+?)", line (\d+)')


class Argument(NamedTuple):
    """An argument of the exported function: its sizes, where a name stands for one that may vary,
    and its dtype; or a `value`, which is part of the program."""

    name: str
    shape: tuple[int | str, ...] | None
    dtype: DType | None
    value: Any = None


class Source(NamedTuple):
    """The origin of an input of the program: a tensor of the module ("state") or an argument,
    both by name, or a constant of the program."""

    kind: str
    name: str
    value: Any = None


@dataclass(frozen=True, eq=False)
class Exported:
    """A program of a module in one mode. `writes` has for each of its first results the name of the
    buffer that it replaces; the others, as `out_spec` says, are what the module returns."""

    program: Program
    sources: list[Source]
    arguments: list[Argument]
    writes: list[str]
    in_spec: Any
    out_spec: Any
    ranges: dict[str, tuple[float, float]]


def torch_library() -> Any:
    """The module torch. Raises UsageError if it is not installed."""
    return library("from_torch", "torch", "torch")


def export(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any, rules: Rules
) -> Exported:
    """Exports `module` in the mode that it is in. Raises UsageError if PyTorch cannot export it, or
    an op has no rule."""
    torch = torch_library()
    try:
        with warnings.catch_warnings(), followed_functions():
            # PyTorch's own trees and layers
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", r"The tensor attributes self\._flat_weights")
            exported = torch.export.export(
                module, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
            _mark_detached(exported.graph_module)
            table = torch.export.default_decompositions()
            for op in [op for op in table if _is_kept(str(op), rules)]:
                table.pop(op)
            exported = exported.run_decompositions(table)
    except Exception as error:
        raise UsageError(
            f"from_torch: torch.export cannot export {type(module).__name__}",
            rows=[("torch", _first_line(error))],
            fix="change what it names, or give a module whose forward takes and returns tensors",
        ) from error
    found = _read(exported)
    need_rules(found.program, rules)
    return found


def _is_kept(name: str, rules: Rules) -> bool:
    return WHOLE in name or (stem(name) in EXACT and name in rules.table)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


# -- what has no gradient -------------------------------------------------------------------------
@cache
def _stop_gradient() -> Any:
    """An op of PyTorch that marks values without a gradient: its decompositions drop `detach` and
    `torch.no_grad`, as they are for inference."""
    torch = torch_library()
    library = torch.library.Library("tessera", "FRAGMENT")
    library.define("stop_gradient(Tensor x) -> Tensor")
    library.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
    library.impl("stop_gradient", torch.empty_like, "Meta")
    return library, torch.ops.tessera.stop_gradient.default


def _mark_detached(graph_module: Any) -> None:
    torch = torch_library()
    _, stop = _stop_gradient()
    detach = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
    for part in graph_module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            if node.target in detach:
                node.target = stop
            elif "wrap_with_set_grad_enabled" in str(node.target) and node.args[0] is False:
                for result in list(node.users):
                    _stop_after(part.graph, result, stop)
        part.recompile()


def _stop_after(graph: Any, node: Any, stop: Any) -> None:
    """Puts `stop` between `node`, if it is a tensor, and its users."""
    if not hasattr(node.meta.get("val"), "dtype"):
        return
    with graph.inserting_after(node):
        marked = graph.call_function(stop, (node,))
    marked.meta = dict(node.meta)
    node.replace_all_uses_with(marked, delete_user_cb=lambda user: user is not marked)


# -- reading --------------------------------------------------------------------------------------
def _read(exported: Any) -> Exported:
    signature = exported.graph_signature
    placeholders: list[Any] = []
    program = read_graph(exported.graph_module, placeholders)
    sources, arguments = [], []
    for spec, node in zip(signature.input_specs, placeholders, strict=True):
        kind = spec.kind.name
        if kind in ("PARAMETER", "BUFFER"):
            sources.append(Source("state", spec.target))
        elif kind == "CONSTANT_TENSOR":
            value = from_torch_tensor(exported.constants[spec.target])
            sources.append(Source("constant", spec.target, value))
        elif kind == "USER_INPUT":
            sources.append(Source("argument", node.name))
            arguments.append(_argument(spec, node))
        else:
            raise UsageError(
                f"from_torch: an input of the kind {kind} is not known",
                input=spec.target or node.name,
                fix="give a module that needs tensors alone",
            )
    writes = []
    for spec in signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION":
            writes.append(spec.target)
        elif spec.kind.name != "USER_OUTPUT":
            raise UsageError(
                f"from_torch: forward changes {spec.target!r} in place",
                fix="arguments and parameters do not change here: return the new value, or keep it"
                " in a buffer",
            )
    ranges = {
        str(symbol): (float(r.lower), float(r.upper))
        for symbol, r in exported.range_constraints.items()
    }
    spec = exported.call_spec
    return Exported(program, sources, arguments, writes, spec.in_spec, spec.out_spec, ranges)


def _argument(spec: Any, node: Any) -> Argument:
    value = node.meta.get("val")
    if hasattr(value, "shape"):
        shape = tuple(n if isinstance(n, int) else str(n.node.expr) for n in value.shape)
        return Argument(node.name, shape, dtype(value.dtype))
    if hasattr(value, "node"):  # a number that may vary
        return Argument(node.name, None, int32, None)
    return Argument(node.name, None, None, spec.arg.value)


def read_graph(graph_module: Any, placeholders: list[Any] | None = None) -> Program:
    """The graph of an FX module as a program, its inner graphs as programs among the operands.

    Fills `placeholders` with the nodes of its inputs."""
    torch = torch_library()
    values: dict[Any, Any] = {}
    program, count = Program(0), 0

    def new(n: int) -> tuple[int, ...]:
        nonlocal count
        count += n
        return tuple(range(count - n, count))

    def read(x: Any) -> Any:
        if isinstance(x, torch.fx.Node):
            return values[x]
        if isinstance(x, (list, tuple)):
            return (list if isinstance(x, list) else tuple)(read(v) for v in x)
        if isinstance(x, dict):
            return {k: read(v) for k, v in x.items()}
        return constant(x)

    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            values[node] = Ref(*new(1))
            program.inputs += 1
            if placeholders is not None:
                placeholders.append(node)
        elif node.op == "get_attr":
            part = (
                graph_module.get_submodule(node.target)
                if hasattr(getattr(graph_module, node.target, None), "graph")
                else getattr(graph_module, node.target)
            )
            values[node] = read_graph(part) if hasattr(part, "graph") else from_torch_tensor(part)
        elif node.op == "output":
            found = read(node.args[0])
            program.outs = [found] if isinstance(found, Ref) else list(found)
        elif _name(node.target) == "_operator.getitem" and isinstance(
            values.get(node.args[0]), list
        ):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            many = _many(node)
            outs = new(1 if many is None else many)
            refs = [Ref(i) for i in outs]
            values[node] = refs[0] if many is None else refs
            params = {k: read(v) for k, v in node.kwargs.items() if k not in PLACES}
            args = [read(x) for x in node.args]
            if "as_strided" in str(node.target):
                _need_rows(node)
            call = Call(_name(node.target), args, params, outs, line_of(node), module_of(node))
            program.calls.append(cut_backward(program, call) if call.name == BOUND else call)
    return program


def _need_rows(node: Any) -> None:
    """Raises UsageError if `as_strided` counts places in the memory behind a view."""
    x, offset = node.args[0].meta["val"], [*node.args[3:], node.kwargs.get("storage_offset")][0]
    if not x.is_contiguous() or (offset is not None and x.storage_offset() != 0):
        raise UsageError(
            "from_torch: as_strided of a view has no rule here: it reads the memory behind it",
            rows=[("in", line_of(node))],
            fix="call .contiguous().clone() before, or index the tensor",
        )


def _many(node: Any) -> int | None:
    """The number of results of the call of `node`; None if its result is no list."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return len(value)
    picked = [u.args[1] for u in node.users if _name(u.target) == "_operator.getitem"]
    return max(picked) + 1 if picked and value is None else None


def _name(target: Any) -> str:
    if hasattr(target, "_schema"):
        return str(target)
    if hasattr(target, "namespace") and callable(getattr(target, "name", None)):
        return str(target.name())
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def constant(x: Any) -> Any:
    """A constant of a graph: dtypes are ours, and places are None."""
    torch = torch_library()
    if isinstance(x, torch.dtype):
        return dtype(x)
    if isinstance(x, (torch.layout, torch.memory_format, torch.device)):
        return None
    if isinstance(x, torch.SymInt):
        return int(x)
    if isinstance(x, complex):
        raise UsageError("from_torch: complex numbers are not imported", value=x, fix="use floats")
    return x


def dtype(kind: Any) -> DType:
    """Our dtype for PyTorch's; i32 for int64 and int16, f32 for float64. Raises DTypeError if there
    is none."""
    name = str(kind).removeprefix("torch.")
    if name.startswith(("complex", "quint", "qint")):
        raise DTypeError(f"from_torch: {name} is not imported", fix="use floats or whole numbers")
    short = {"int64": int32, "int16": int32, "float64": f32}
    return short[name] if name in short else dtype_of(name)


def from_torch_tensor(t: Any) -> Tensor:
    """The values of a tensor of PyTorch. Raises DTypeError if one does not fit 32 bits."""
    want = dtype(t.dtype)
    t = t.detach().cpu()
    if (want.bytes == 2 and want.is_float) or (want.bytes == 1 and want.is_float):
        torch = torch_library()
        bits = torch.int16 if want.bytes == 2 else torch.uint8
        return as_tensor(t.contiguous().view(bits).numpy().view(want.numpy))
    return as_tensor(np.ascontiguousarray(t.numpy()).reshape(tuple(t.shape))).to(want)


def line_of(node: Any) -> str:
    """The innermost line of the user or of the model's library at which the op was called."""
    torch = torch_library()
    home = torch.__file__.rpartition("/")[0]
    found = _LINE.findall(node.meta.get("stack_trace") or "")
    lines = [(f, n) for f, n in found if not f.startswith((home, "<eval_with_key"))]
    return f"{lines[-1][0].rpartition('/')[2]}:{lines[-1][1]}" if lines else ""


def module_of(node: Any) -> str:
    """The path of the innermost module whose `forward` called the op; "" for the whole."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    path: str = [*stack.values()][-1][0]
    return path


# -- rules that are missing -----------------------------------------------------------------------
def need_rules(program: Program, rules: Rules) -> None:
    """Raises UsageError, in the words of `Rules.find`, for the first call without a rule; it counts
    the others."""
    missing = {c.name: c for c in _calls(program) if c.name not in rules.table}
    if not missing:
        return
    first, *others = missing.values()
    try:
        rules.find(first.name, (), "from_torch", first.line)
    except UsageError as error:
        if others:
            text, sep, fix = str(error.args[0]).rpartition("\n  fix")
            more = f"\n  more : {', '.join(c.name for c in others)}"
            error.args = (f"{text}{more}{sep}{fix}", *error.args[1:])
        raise


def _calls(program: Program) -> Iterator[Call]:
    for call in program.calls:
        yield call
        for x in (*call.args, *call.params.values()):
            if isinstance(x, Program):
                yield from _calls(x)
