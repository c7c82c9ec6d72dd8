"""`ts.debug`: print, check and stop inside a recorded function. Each acts after its call has
run."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from ...core.declared import Called, String
from ...core.errors import GraphError, caller
from ...core.layout import shard_count
from ..math import functions
from ..record.operands import as_tensor, of_floats
from ..record.recorder import current
from ..record.tree import flatten, path_name, paths
from ..value.eager import current_trace
from ..value.host_outputs import HostValue
from ..value.tensor import Tensor


def print(*values: Any, **named: Any) -> None:
    """Prints tensors, dicts and lists of them and other values, also inside recorded functions.

    There it prints once per call, per iteration of a loop, and per device if the devices have
    different values. The line begins with the user's file and line.

    >>> import tessera as ts
    >>> @ts.jit
    ... def double(x):
    ...     ts.debug.print("x is", x)
    ...     return x * 2
    >>> y = double(ts.tensor([1.0, 2.0]))
    x is [1. 2.]
    """
    where = caller()
    tensors: list[Tensor] = []

    def slot(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return _Slot(len(tensors) - 1)
        return _each(slot, value)

    parts = [("", slot(v)) for v in values] + [(f"{k}=", slot(v)) for k, v in named.items()]

    def act(values: Sequence[HostValue]) -> None:
        for place, found in _places(values):
            words = [name + _text(part, found) for name, part in parts]
            head = " ".join(x for x in (f"{where}:" if where else "", place) if x)
            builtins.print(" ".join([head, *words] if head else words))

    current_trace().show(tensors, act)


class _Slot(int):
    """A placeholder for a tensor until its value is known."""


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Applies `change` to each value of a dict, list or tuple; returns any other value as it is."""
    if type(value) is dict:
        return {k: change(v) for k, v in value.items()}
    return type(value)(map(change, value)) if type(value) in (list, tuple) else value


def _text(part: Any, values: Sequence[np.ndarray[Any, Any]]) -> str:
    def filled(x: Any) -> Any:
        return values[x] if isinstance(x, _Slot) else _each(filled, x)

    return str(filled(part))


def _places(values: Sequence[HostValue]) -> list[tuple[str, list[np.ndarray[Any, Any]]]]:
    """Returns (name of a device, its values) for each device if the values differ by device; else
    one pair."""
    varying = [v.type for v in values if v.type.varying]
    axes = tuple(dict.fromkeys(a for t in varying for a in t.varying))
    if not axes:
        return [(next((v.place for v in values), ""), [v.array for v in values])]
    sizes = varying[0].sizes
    rows = []
    for rank in range(shard_count(axes, sizes)):
        own = [v.of(rank, axes, sizes) for v in values]
        rows.append((own[0].place, [v.array for v in own]))
    return rows


Hook = Annotated[Callable[[dict[str, Any]], Any], Called()]


def check_finite(x: Any, name: String = "") -> Any:
    """Returns `x`; after the call it raises GraphError if an element is infinite or NaN.

    `x` is a tensor, an array, a number, or a tree of them. The error has the user's line, the
    number of such elements and the first of them. `ts.debug.nan_origin` finds the first node that
    has them.
    """
    where = caller()
    recorder = current()
    pairs = zip(map(path_name, paths(x)), flatten(x)[0], strict=True)
    floats_of = {name: of_floats(leaf, numbers=True) for name, leaf in pairs}
    floats = {n: t for n, t in floats_of.items() if isinstance(t, Tensor) and t.dtype.is_float}
    scope = recorder.builder.scope if recorder is not None else ""
    flags = [functions.isfinite(t) for t in floats.values()]

    def act(values: Sequence[HostValue]) -> None:
        for flag, (path, leaf) in zip(values, floats.items(), strict=True):
            if flag.array.all():
                continue
            bad = np.argwhere(~flag.array)
            first = bad[0].tolist()
            axes = flag.type.varying  # one leading dim for each axis along which devices differ
            device = " ".join(f"{a}={i}" for a, i in zip(axes, first, strict=False))
            what = ".".join(filter(None, (name, path))) or "a value"
            raise GraphError(
                f"check_finite: {what} has {len(bad)} of {flag.array.size} elements not finite",
                tensor=leaf.type,
                first_at=tuple(first[len(axes) :]),
                device=device,
                scope=scope,
                fix="find where they begin with ts.debug.nan_origin(fn, *args)",
                at=where,
            )

    current_trace().show(flags, act)
    return x


def breakpoint(hook: Hook | None = None, /, **values: Any) -> None:
    """Stops after the call, with the values that these tensors had at this line, as NumPy arrays.

    They are shown in a debugger, or passed as a dict to `hook`. A value that differs by device has
    a leading dim for each mesh axis over which it differs.
    """
    names = list(values)
    where = caller()

    def act(values: Sequence[HostValue]) -> None:
        here = dict(zip(names, (v.array for v in values), strict=True))
        if hook is not None:
            hook(here)
            return
        builtins.print(f"{where or 'here'}: " + ", ".join(here), file=sys.stderr)
        exec("breakpoint()", here)  # so that the debugger has them under their names

    current_trace().show([as_tensor(v) for v in values.values()], act)
