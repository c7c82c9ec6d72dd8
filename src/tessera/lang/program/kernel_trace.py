"""Recording of kernels that are written in Python: each op on tiles becomes a statement of Tile IR.

A value is a tensor whose ops the `KernelTrace` turns into statements. Indices and conditions are
values too: as long as ops only combine them with each other and with sizes they are expressions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from ...core.checks import unfit
from ...core.dtypes import DType, bool_, f32, int32
from ...core.errors import ShapeError, TesseraError, UsageError, caller
from ...core.value_checks import is_number, is_whole
from ...ir.tile.body import (
    Loop,
    Op,
    Statement,
    When,
    every,
    located,
)
from ...ir.tile.index import Index, Test, parts
from ...ir.tile.op import Type
from ...ir.tile.ops import op_of
from ...ir.tile.tidy import reads
from ...ops.create import iota
from ...ops.op import infer, op_named
from ..math.matmul import plain_form
from ..value.eager import current_trace
from ..value.tensor import Tensor
from .kernel_values import EXPRESSIONS, Value, shape_text, size_text

EACH = {
    name: name
    for name in (
        "add", "sub", "mul", "div", "neg", "abs", "exp", "log", "tanh", "sqrt", "rsqrt", "erf",
        "sigmoid", "lt", "le", "gt", "ge", "eq", "ne", "where",
    )
} | {
    "maximum": "max", "minimum": "min", "logical_and": "and", "logical_or": "or",
    "logical_not": "not",
}  # fmt: skip


class KernelTrace:
    """The trace of a kernel's body. `sizes` are those that expressions read, `taken` the names that
    a loop's index cannot have."""

    def __init__(self, name: str, sizes: Mapping[str, int], taken: Iterable[str]) -> None:
        self.name, self.sizes, self.taken = name, sizes, {*taken}
        self._blocks: list[list[Statement]] = [[]]  # those that are open, the innermost last
        self.places: dict[int, str] = {}  # the user's lines by their numbers
        self._counts: dict[str, Op] = {}  # counts along a dim, by their values
        self.first: dict[str, str] = {}  # carried value → its first value
        self._count = 0

    @property
    def block(self) -> list[Statement]:
        """The statements of the innermost open block."""
        return self._blocks[-1]

    # ---- the protocol of traces ----------------------------------------------------------------
    def apply(self, op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        with self.naming():
            return [self._applied(op, [self.own(a) for a in args], attrs)]

    def value(self, t: Tensor) -> NoReturn:
        if current_trace() is not self:
            self.check(t)
        known = t.known if isinstance(t, Value) else None
        fix = "compute with it in the kernel, and read outputs after the call"
        if isinstance(known, Test):
            fix = "write with ts.kernel.when(condition): ..., or ts.where; join by & and |, not and"
        elif known is not None:
            fix = "repeat with ts.kernel.loop; choose with ts.kernel.when or ts.where"
        what = f"{self.name}: {known or 'a tile'} has no value while the kernel is recorded"
        raise UsageError(what, fix=fix)

    def show(self, tensors: Sequence[Tensor], act: Callable[[Sequence[Any]], None]) -> None:
        self.value(tensors[0])

    def check(self, t: Tensor) -> NoReturn:
        raise UsageError(
            f"a value of the kernel {self.name} is used outside of it",
            tensor=t.type,
            fix="store it in an output of the kernel, and use what the call returns",
        )

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A context that adds the user's line to errors."""
        try:
            yield
        except TesseraError as error:
            raise located(error, at=caller()) from None

    def own(self, t: Tensor) -> Value:
        """`t` as a value of this kernel. Raises UsageError if it is none."""
        if isinstance(t, Value) and t._trace is self:
            if not any(t.block is block for block in self._blocks):
                raise UsageError(
                    f"{self.name}: a value is used outside of the loop or condition that made it",
                    value=t.known or t.type,
                    fix="carry it out of the loop, or store it there",
                )
            return t
        number = t._host_values
        if number is not None and not t.ndim:  # in ts.where(c, 1.0, 0.0)
            return self.full(number.item(), t.dtype, ())
        raise UsageError(
            f"{self.name}: a tensor from outside is used in a kernel",
            tensor=t.type,
            fix='make it an argument, with a reference: bias="in f32[N] tiles [BN]"',
        )

    # ---- ops -----------------------------------------------------------------------------------
    def _applied(self, op: str, values: list[Value], attrs: dict[str, Any]) -> Value:
        kind = Test if op.startswith("logical") else Index
        if op in EXPRESSIONS and all(isinstance(v.known, kind) for v in values):
            return self._expression(op, values)
        if op in EACH:
            infer(op_named(op), tuple(v.type for v in values), attrs)  # checks them as elsewhere
            made = self._started(op, values)
            return self._each(EACH[op], values) if made is None else made
        match op:
            case "stop_gradient" | "save_for_backward":
                return values[0]
            case "full":
                return self.full(attrs["value"], attrs["dtype"], attrs["shape"])
            case "iota":
                made = self._add("iota", shape=shape_text(attrs["shape"]), dim=str(attrs["dim"]))
                return made if attrs["dtype"] is int32 else self._cast(made, attrs["dtype"])
            case "cast":
                return self._cast(values[0], attrs["dtype"])
            case "reshape":
                return self._reshaped(values[0], attrs["shape"])
            case "broadcast_to":
                return self._spread(values[0], attrs["shape"])
            case "transpose":
                return self._transposed(values[0], attrs["perm"])
            case "contract":
                return self._product(values, attrs["index"])
            case "sum" | "max" | "min":
                out = self.held(values[0])
                for dim in sorted(attrs["dims"], reverse=True):
                    out = self._add(op, out, dim=str(dim))
                return out
        raise UsageError(
            f"{self.name}: a kernel has no {op}",
            rows=[
                *((f"x{n}", v.type) for n, v in enumerate(values)),
                ("it has", f"{', '.join(EACH)}, @, sum, max, min, full, arange, casts"),
            ],
            fix="compute it from these, or outside of the kernel",
        )

    def index(self, known: Index | Test) -> Value:
        """The value of an index or a condition."""
        made = self.made_value(Type(int32 if isinstance(known, Index) else bool_, ()))
        made.known = known
        return made

    def _expression(self, op: str, values: list[Value]) -> Value:
        text = EXPRESSIONS[op].format(*(v.known for v in values))
        compares = "=" in text or "<" in text or ">" in text
        made = self.index(Test(text) if compares else Index(text))
        made.parts = (op, values)
        return made

    def _started(self, op: str, values: list[Value]) -> Value | None:
        """The sum of a count along a dim and an index, which is a count with another start."""
        orders = {"add": (values, values[::-1]), "sub": (values,)}.get(op, ())
        for line, index in orders:
            made = self._counts.get(line.text)
            if made is not None and isinstance(index.known, Index):
                first, by = made.attr("start"), index.known.text
                start = EXPRESSIONS[op].format(first or 0, by) if first or op == "sub" else by
                return self._add("iota", **{**dict(made.attrs), "start": Index(start).text})
        return None

    def _each(self, name: str, values: Sequence[Value]) -> Value:
        """An op on each element. Values of one dim become rows beside those of two, and a number
        stays one if a value is beside it."""
        rank = max(v.ndim for v in values)
        args = [v if v.ndim in (0, rank) else self._reshaped(v, (1, *v.shape)) for v in values]
        first = int(name == "where")
        alone = all(v.is_number for v in args[first:])
        return self._add(
            name,
            *(
                v if v.is_number and n >= first and not (alone and n == first) else self.held(v)
                for n, v in enumerate(args)
            ),
        )

    def full(self, value: float, dtype: DType, shape: tuple[int, ...]) -> Value:
        """A tile of one number; without dims the number itself."""
        is_int = isinstance(value, int) or not dtype.is_float
        text = str(int(value)) if is_int else repr(float(value))
        if shape:
            return self._add("full", shape=shape_text(shape), value=text, dtype=dtype.name)
        made = self.made_value(Type(dtype, ()), text)
        if dtype is int32:
            made.known = Index(size_text(int(value) if not isinstance(value, int) else value))
        return made

    def held(self, v: Value) -> Value:
        """The value with a name in the kernel."""
        if v.turned is not None:
            raise UsageError(
                f"{self.name}: a transpose is only for products",
                x=v.type,
                fix="write x @ y.T; elsewhere load the tile in the order that is needed",
            )
        if v.is_number:
            return self._add("full", shape="", value=v.text, dtype=v.dtype.name)
        if v.parts is not None and isinstance(v.known, Test):
            return self._each(EACH[v.parts[0]], v.parts[1])
        if v.known is not None:
            return self._add(
                "sum", self._add("iota", shape="1", dim="0", start=v.known.text), dim="0"
            )
        return v

    def _cast(self, v: Value, dtype: DType) -> Value:
        return self._add("cast", self.held(v), to=dtype.name)

    def _reshaped(self, v: Value, shape: tuple[int, ...]) -> Value:
        """A value in a shape that differs by dims of size 1."""
        long = [n for n in v.shape if n != 1]
        if v.shape == shape:
            return v
        if len(long) > 1 or len(shape) > 2 or long != [n for n in shape if n != 1]:
            raise ShapeError(
                f"{self.name}: reshape of {list(v.shape)} to {list(shape)} in a kernel",
                x=v.type,
                fix="a kernel only adds and drops dims of size 1; load tiles of the shape needed",
            )
        v = self.held(v)
        made = self._counts.get(v.text)
        if made is not None and shape:
            dim, sizes = next((d for d, n in enumerate(shape) if n != 1), 0), ["1"] * len(shape)
            sizes[dim] = parts(made.attr("shape"))[int(made.attr("dim"))]
            attrs = {**dict(made.attrs), "shape": ",".join(sizes), "dim": str(dim)}
            return self._add("iota", **attrs)
        while v.ndim > min(len(shape), 1):
            v = self._add("sum", v, dim=str(v.shape.index(1)))
        if not v.ndim:
            return self._spread(v, shape)
        return v if len(shape) == 1 else self._add("row" if shape[0] == 1 else "col", v)

    def _spread(self, v: Value, shape: tuple[int, ...]) -> Value:
        pick = self.full(1, bool_, shape)
        v = self.held(v)
        return self._each("where", [pick, v, v])

    def _transposed(self, v: Value, perm: tuple[int, ...]) -> Value:
        if perm == tuple(range(v.ndim)):
            return v
        shape = tuple(v.shape[d] for d in perm)
        if 1 in shape or v.turned is not None:
            return self._reshaped(v, shape) if v.turned is None else v.turned
        made = self.made_value(Type(v.dtype, shape))
        made.turned = self.held(v)
        return made

    def _product(self, values: list[Value], index: str) -> Value:
        """A product of two matrices, in f32; that of i8 in i32."""
        left, _, right = plain_form(index, [v.shape for v in values]).index.partition("->")
        out, groups = right.split(), [g.split() for g in left.split(",")]
        pairs = list(zip(groups, values, strict=True))
        for (a, x), (b, y) in (pairs, pairs[::-1]) if len(pairs) == 2 else ():
            if not len(a) == len(b) == len(out) == 2 or out[0] not in a or out[1] not in b:
                continue
            if {*a} - {out[0]} == {*b} - {out[1]}:
                turned = (x.turned is not None, y.turned is not None)
                flags = zip("ab", (a[0] != out[0], b[1] != out[1]), turned, strict=True)
                text = ",".join(name for name, is_set, other in flags if is_set != other)
                sides = (self.held(v if v.turned is None else v.turned) for v in (x, y))
                return self._add("dot", *sides, transpose=text)
        raise ShapeError(
            f"{self.name}: a kernel has no product {index!r}",
            rows=[(f"x{n}", v.type) for n, v in enumerate(values)],
            fix="a kernel multiplies two values of two dims, also transposed: x @ y.T",
        )

    # ---- statements ----------------------------------------------------------------------------
    def line(self) -> int:
        """The number of the user's line."""
        at = caller()
        number = at.rpartition(":")[2]
        if not number.isdecimal():
            return 0
        self.places[int(number)] = at
        return int(number)

    def made_value(self, type: Type, text: str = "") -> Value:
        """The value named `text`, made in the open block."""
        return Value(self, self.block, type, text)

    def fresh(self) -> str:
        """A new name."""
        self._count += 1
        return f"%v{self._count}"

    def _add(self, name: str, *args: Value, **attrs: str) -> Value:
        types = [v.text if v.is_number else Type(v.dtype, v.shape) for v in args]
        made = op_of(name, attrs).infer(types, attrs, self.sizes)
        texts = tuple(v.text for v in args)
        s = Op(self.fresh(), name, texts, tuple(attrs.items()), line=self.line())
        if name == iota.name:
            self._counts[s.result] = s
        self.block.append(s)
        return self.made_value(made, s.result)

    def indices(self, name: str, at: Sequence[object]) -> tuple[Index, ...]:
        """The indices of a place. Raises UsageError for what is none."""
        return tuple(self.bound(name, part) for part in at)

    def bound(self, name: str, n: object) -> Index:
        """An index or a bound as an expression."""
        if isinstance(n, Value) and isinstance(self.own(n).known, Index):
            return cast(Index, n.known)
        if is_whole(n):
            return Index(size_text(n))
        raise unfit(name, "an index", n, "use whole numbers, sizes and indices, with + - * // %")

    @contextmanager
    def _nested(self) -> Iterator[list[Statement]]:
        """A context whose statements are those of a block of their own."""
        self._blocks.append([])
        try:
            yield self.block
        finally:
            self._blocks.pop()

    @contextmanager
    def when(self, condition: object) -> Iterator[None]:
        """A context whose statements run if the condition holds."""
        known = condition.known if isinstance(condition, Value) else None
        if isinstance(condition, bool):
            known = Test(f"{int(condition)} == 1")
        if not isinstance(known, Test):
            fix = "compare indices: with ts.kernel.when(s > 0): ...; of tiles choose with ts.where"
            raise unfit("kernel.when", "the condition", condition, fix)
        line = self.line()
        with self._nested() as body:
            yield
        self.block.append(When(known, tuple(body), line=line))

    def loop(self, bounds: object, body: Callable[..., Any], carries: tuple[Any, ...]) -> Any:
        """Records a loop; see `ts.kernel.loop`."""
        low, high = bounds if isinstance(bounds, tuple) and len(bounds) == 2 else (0, bounds)
        ends = self.bound("kernel.loop", low), self.bound("kernel.loop", high)
        line = self.line()
        with self.naming():
            first = [self.held(self._number(v)) for v in carries]
        name = self._index_name(body)
        self.taken.add(name)
        with self._nested() as block:
            inside = [self.made_value(Type(v.dtype, v.shape), self.fresh()) for v in first]
            given = body(self.index(Index(name)), *inside)
            new = given if isinstance(given, tuple) else () if given is None else (given,)
            if len(new) != len(first):
                what = f"kernel.loop: the body returns {len(new)} values, {len(first)} are carried"
                raise UsageError(what, fix="return the next value of each carried one, in order")
            with self.naming():
                after = [self.held(self._number(v)) for v in new]
        self.taken.remove(name)
        read = {v.text for v in after}.union(*(reads(s, self.first) for s in every(tuple(block))))
        for c, v in zip(inside, first, strict=True):
            if v.text in read:  # in the text its name is that of the carried value
                v = self._each("and" if v.dtype is bool_ else "max", [v, v])
            read.add(v.text)
            self.first[c.text] = v.text
        out = tuple([self.made_value(Type(v.dtype, v.shape), self.fresh()) for v in first])
        results, carried, last = (tuple(v.text for v in vs) for vs in (out, inside, after))
        self.block.append(Loop(results, name, *ends, carried, tuple(block), last, line=line))
        return None if not out else out[0] if len(out) == 1 else out

    def _number(self, v: object) -> Value:
        if isinstance(v, Tensor):
            return self.own(v)
        if is_number(v):
            return self.full(v, int32 if is_whole(v) else f32, ())
        raise unfit("kernel.loop", "a carried value", v, "carry tiles and numbers")

    def _index_name(self, body: Callable[..., Any]) -> str:
        """The name of a loop's index: that of the body's first parameter, if it is free."""
        try:
            name = next(iter(inspect.signature(body).parameters), "k")
        except (TypeError, ValueError):
            name = "k"
        while name in self.taken:
            name += "_"
        return name
