"""The arguments that carry a partial sum through an op, from the op's rule.

An op is linear in some arguments if its rule takes them partial over an axis, gives a result that
is partial over it, and changes no other part of a layout. Answers are cached, because they depend
on types alone and layers repeat themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from ..core.errors import TesseraError
from ..core.layout import TensorType, same_type
from ..core.reshard import completed, device_wire_bytes
from ..ir.graph.node import Node
from ..ops.op import Op, infer
from ..ops.redistribute import all_reduce

Types = tuple[TensorType, ...]


def is_partial(t: TensorType, axis: str) -> bool:
    """Returns whether `t` is a partial sum over `axis`."""
    return bool(t.partial) and (axis, "sum") in t.partial


@lru_cache(maxsize=1 << 14)
def in_form(t: TensorType, axis: str, partial: bool) -> TensorType:
    """`t` as a partial sum over `axis`, or complete."""
    if is_partial(t, axis) is partial:
        return t
    return t.with_partial((*t.partial, (axis, "sum"))) if partial else completed(t, (axis,))


@lru_cache(maxsize=1 << 14)
def sum_bytes(t: TensorType, axis: str) -> int:
    """The bytes that a device receives if a partial sum of type `t` is completed over `axis`."""
    ends = in_form(t, axis, True), in_form(t, axis, False)
    return device_wire_bytes(all_reduce.name, (axis,), *ends)


def carriers(n: Node, axis: str, at: tuple[int, ...]) -> tuple[int, ...]:
    """The positions of the arguments with which `n` is partial over `axis`; () if its layout does
    not allow both forms. `at` are the arguments that may be partial, at least one."""
    attrs = tuple(n.attrs.items())
    ins = tuple([a.type for a in n.args])
    try:
        hash(attrs)
    except TypeError:  # an attribute that cannot be hashed
        return _carriers.__wrapped__(n.kind, ins, n.type, attrs, axis, at)
    return _carriers(n.kind, ins, n.type, attrs, axis, at)


@lru_cache(maxsize=1 << 14)
def _carriers(
    op: Op,
    ins: Types,
    out: TensorType,
    attrs: tuple[tuple[str, Any], ...],
    axis: str,
    at: tuple[int, ...],
) -> tuple[int, ...]:
    def formed(some: Collection[int]) -> Types:
        return tuple([in_form(t, axis, i in some) for i, t in enumerate(ins)])

    def inferred(some: Collection[int]) -> tuple[Types, TensorType] | None:
        """Returns the types if the arguments `some` are partial; None if the op refuses."""
        if any(axis not in ins[i].sizes or _is_taken(ins[i], axis) for i in some):
            return None
        try:
            got = infer(op, formed(some), dict(attrs))
        except TesseraError:
            return None
        return got.wants, got.outs[0]

    def fits(some: tuple[int, ...]) -> bool:
        got = inferred(some)
        if got is None or is_partial(got[1], axis) != bool(some):
            return False
        kept = all(map(same_type, got[0], formed(some)))
        return kept and in_form(got[1], axis, False) is in_form(out, axis, False)

    if _is_taken(out, axis) or not fits(()):
        return ()
    if is_partial(out, axis):
        own = tuple([i for i, t in enumerate(ins) if is_partial(t, axis)])
        return own if own and fits(own) else ()
    wants, _ = inferred(range(len(ins))) or ((), None)
    joint = tuple([i for i, t in enumerate(wants) if is_partial(t, axis)])
    # Of a product of two partial values the larger one stays partial.
    one = sorted(at, key=lambda i: -ins[i].local_bytes)
    return next((some for some in (at, joint, *((i,) for i in one)) if some and fits(some)), ())


def _is_taken(t: TensorType, axis: str) -> bool:
    """Returns whether `axis` splits `t`, or reduces it by a maximum or minimum."""
    return axis in t.split_axes or dict(t.partial).get(axis, "sum") != "sum"
