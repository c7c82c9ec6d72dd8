"""Loops over the leading dim of tensors, and over numbers: `scan` and `fori_loop`.

A loop's body is recorded once. Its gradient is a second loop; `policy` chooses the values that the
first loop stores for it (passes/loops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from ...core.checks import whole
from ...core.declared import Flag
from ...core.dtypes import int32
from ...core.errors import ShapeError, UsageError
from ...core.layout import dim_axes, without
from ...core.value_checks import is_whole
from ..math.functions import arange, concat, relayout, reshape, stack
from ..math.shape import sliced
from ..record.operands import as_tensor, emit_many
from ..record.recorder import current
from ..record.tree import Spec, flatten, tree_map, unflatten
from ..value.checks import asked_function
from ..value.tensor import Tensor
from .iteration import Call, Policy, called, finished, length_of, settled, tensors
from .regions import region
from .while_loop import while_loop

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")


def scan(
    body: Callable[[C, X], tuple[C, Y]],
    carry: C,
    xs: X = None,  # type: ignore[assignment]  # X is None then
    *,
    length: int | None = None,
    reverse: Flag = False,
    policy: Policy = "save",
    unroll: int | bool = 1,
    name: str = "scan",
) -> tuple[C, Y]:
    """Runs `carry, y = body(carry, x)` for each slice x of `xs` along dim 0, as `jax.lax.scan`.

    Returns (the last carry, the ys stacked along a new dim 0). `carry`, `xs` and `y` are trees of
    tensors; without `xs` there are `length` iterations, whose x is None. The carry keeps one
    structure, up to the order of dict keys; the body may use tensors from outside. `unroll`
    iterations are written out in each turn of the loop; with True all are, without a loop (random
    numbers stay the same, except in reverse). `policy` chooses the values that the forward loop
    stores for the backward pass:

    - "save": those that the gradient reads, or the fewest bytes from which they follow elementwise.
    - "recompute": only the carries; the body is computed again.
    - "products": the carries and the results of matrix products and of inner loops.
    - "together": none; the gradient of a scalar carry is computed in the forward loop.

    Raises UsageError if `policy` is unknown, `unroll` is no number of iterations or the body does
    not return a pair; ShapeError if the tensors of `xs` differ in length or from `length`, or the
    carry changes its shape, dtype or structure.
    """
    body = asked_function("scan", "the body", body)
    start, carry_spec = tensors(carry)
    rows, xs_spec = flatten(xs)
    rows = [_unsplit_first(as_tensor(t)) for t in rows]
    count = _length(rows, length)
    block = unroll_of("scan", unroll, count)

    def call(c: Sequence[Tensor], x: Sequence[Tensor]) -> Any:
        return body(unflatten(carry_spec, c), unflatten(xs_spec, x))

    if block > 1:
        run = partial(
            _Blocks(call, carry_spec, block, reverse, policy, name).run, start, rows, count
        )
        # At once it is one program, whose random numbers are those of a loop.
        ends, ys = region(name, run, "save") if current() is None else run()
    else:
        iteration = settled(name, call, carry_spec, start, rows)
        ends, ys = finished(iteration, start, rows, count, reverse, policy)
    return unflatten(carry_spec, ends), ys


def unroll_of(name: str, unroll: int | bool, count: int) -> int:
    """The number of iterations of one turn of a loop of `count` iterations."""
    if isinstance(unroll, bool):
        return count if unroll else 1
    return min(whole(name, "unroll", unroll, 1), max(count, 1))


def _length(rows: Sequence[Tensor], length: int | None) -> int:
    if length is None:
        return length_of("scan", rows, "give length=n for n iterations")
    whole("scan", "length", length, 0)
    if rows and length_of("scan", rows) != length:
        raise ShapeError(
            f"scan: there are other rows than {length}",
            rows=[(f"x{i}", t.type) for i, t in enumerate(rows)],
            fix="leave out length: it is that of xs",
        )
    return length


def _unsplit_first(t: Tensor) -> Tensor:
    if not t.ndim:
        return t
    d = t.type.dims[0]
    first = without(d, dim_axes(d), t.type.sizes)
    return relayout(t, t.type.with_dims((first, *t.type.dims[1:])))


class _Blocks:
    """A loop whose turns have `block` iterations each, written out; what is left over is written
    out after the loop, or before one in reverse."""

    def __init__(
        self, call: Call, carry_spec: Spec, block: int, reverse: bool, policy: str, name: str
    ) -> None:
        self.call, self.carry_spec, self.block = call, carry_spec, block
        self.reverse, self.policy, self.name = reverse, policy, name
        self.y_spec: Spec = None

    def run(
        self, start: Sequence[Tensor], rows: Sequence[Tensor], count: int
    ) -> tuple[list[Tensor], Any]:
        """Returns (the last carry, the stacked ys) of `count` iterations."""
        turns, left = divmod(count, self.block)
        if turns == 1:
            turns, left = 0, count
        inside = count - left
        spans = [(0, inside), (inside, count)]
        carry, found = list(start), dict[int, list[Tensor]]()
        for first, last in reversed(spans) if self.reverse else spans:
            if first == last:
                continue
            part = [_rows(t, first, last) for t in rows]
            run = self.looped if first == 0 and turns else self.written
            carry, found[first] = run(carry, part, last - first)
        columns = zip(*(found[k] for k in sorted(found)), strict=True)
        ys = [concat(list(parts), 0) if len(parts) > 1 else parts[0] for parts in columns]
        return carry, unflatten(self.y_spec, ys)

    def looped(
        self, carry: list[Tensor], rows: Sequence[Tensor], count: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        turns = count // self.block
        blocks = [reshape(t, (turns, self.block, *t.shape[1:])) for t in rows]

        def turn(c: Sequence[Tensor], xs: Sequence[Tensor]) -> Any:
            ends, ys = self.written(c, xs, self.block)
            return unflatten(self.carry_spec, ends), ys

        iteration = settled(self.name, turn, self.carry_spec, carry, blocks)
        ends, ys = finished(iteration, carry, blocks, turns, self.reverse, self.policy)
        return ends, [reshape(t, (count, *t.shape[2:])) for t in ys]

    def written(
        self, carry: Sequence[Tensor], rows: Sequence[Tensor], count: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns (the carry, the stacked ys) of iterations that are written out."""
        slices = [emit_many("unstack", t) for t in rows]
        found: list[list[Tensor]] = [[]] * count
        now = list(carry)
        alone = self.policy in ("save", "together")
        for i in reversed(range(count)) if self.reverse else range(count):
            xs = [parts[i] for parts in slices]

            def one(c: list[Tensor] = now, xs: list[Tensor] = xs) -> Any:
                ends, ys, self.y_spec = called(self.call, self.carry_spec, c, xs)
                return ends, [as_tensor(y) for y in ys]

            now, found[i] = one() if alone else region(self.name, one, self.policy)
        return now, [stack(list(column)) for column in zip(*found, strict=True)]


def _rows(t: Tensor, first: int, last: int) -> Tensor:
    return t if last - first == t.shape[0] else sliced(t, {0: (first, last, 1)})


def fori_loop(
    lower: Any,
    upper: Any,
    body: Callable[[Tensor, C], C],
    init: C,
    *,
    unroll: int | bool = 1,
    policy: Policy = "save",
) -> C:
    """Runs `value = body(i, value)` from `init` on for i from `lower` to `upper` - 1, as
    `jax.lax.fori_loop`.

    `init` and the results of `body` are trees of tensors of one structure, with the same shapes and
    dtypes; i is an int32 tensor. If both bounds are Python integers, the loop is a `ts.scan`, with
    its gradient, `policy` and `unroll`. If one is a tensor it is a `ts.while_loop`, which has no
    gradient.

    Raises UsageError if `body` is no function, or `policy` or `unroll` are given where the number
    of iterations is not known; ShapeError if `body` changes a shape, a dtype or the structure, or a
    bound is not one integer.

    >>> import tessera as ts
    >>> ts.fori_loop(0, 5, lambda i, v: v * 2 + i, ts.tensor(1)).item()
    58
    """
    body = asked_function("fori_loop", "the body", body)
    if is_whole(lower) and is_whole(upper):
        count = upper - lower
        if count <= 0:
            return tree_map(as_tensor, init)  # type: ignore[no-any-return]
        steps = arange(lower, upper, dtype=int32)
        return scan(
            lambda v, i: (body(i, v), ()), init, steps, policy=policy, unroll=unroll,
            name="fori_loop",
        )[0]  # fmt: skip
    if policy != "save" or (unroll is not False and unroll != 1):
        raise UsageError(
            "fori_loop: `policy` and `unroll` need a known number of iterations",
            bounds=f"{lower}, {upper}",
            fix="leave them out, or give Python integers as bounds",
        )
    first, last = (_bound(x) for x in (lower, upper))
    value = tree_map(as_tensor, init)
    return while_loop(lambda v: v[0] < last, lambda v: (v[0] + 1, body(*v)), (first, value))[1]  # type: ignore[no-any-return]


def _bound(x: Any) -> Tensor:
    t = as_tensor(x)
    if not t.dtype.is_int or t.shape:
        raise ShapeError(
            "fori_loop: a bound is not one integer",
            bound=t.type,
            fix="give one, such as x.argmax()",
        )
    return t.to(int32)
