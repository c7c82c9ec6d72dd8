"""What does a function do while it is recorded that its later calls will not do again?

It draws from Python's or NumPy's random numbers, takes the next item of an iterator, reads the
clock, or changes a list from outside. The program has what came of it as a constant, and nobody
would see that: so it is said.
"""

from __future__ import annotations

import inspect
import os
import random
import secrets
import sys
import time
import types
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import numpy as np

from ..core.errors import TraceWarning, caller, lines_up
from ..ir.graph.node import Node
from .captured_code import names_in, variables
from .captured_places import Looked
from .engine import engine
from .host_data import is_host_array
from .record import Recorder
from .static_arguments import kept

_CLOCKS = {
    "now", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "time_ns", "today", "utcnow",
}  # fmt: skip
# What gives other numbers each time, and has no state to be looked at.
_ENTROPY = (
    (os, {"urandom"}), (uuid, {"uuid1", "uuid4"}),
    (secrets, {"choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"}),
)  # fmt: skip
_GROWING = (list, set, deque, bytearray)
_DRAWN = "use ts.random, or give what is drawn as an argument"


def _drawn_from(label: str) -> str:
    return f"draws from {label} while it is recorded; later calls use the same numbers: {_DRAWN}"


class Once:
    """What there is to be drawn from before `fn` is recorded, which finds `looked` outside."""

    def __init__(self, fn: Any, looked: Looked) -> None:
        self._fn, self._looked = fn, looked
        with suppress(ImportError):  # a plan goes without it
            engine()  # now: as it is loaded, NumPy's numbers are drawn from
        self._before = [(label, ask, ask()) for label, ask in _sources(looked)]

    def done(self, after: Looked) -> list[str]:
        """What was done once, with the way out of each."""
        rows = [_drawn_from(label) for label, ask, was in self._before if ask() != was]
        code = _code(self._fn)
        if code is not None and (source := _entropy(code)):
            rows.append(_drawn_from(source))
        if code is not None and "next" in names_in(code.__code__):
            rows += [
                f"takes from the iterator {place.label} while it is recorded; later calls use the"
                " same item: take it before the call, and give it as an argument"
                for place, x, _ in self._looked.values()
                if isinstance(x, Iterator)
            ]
        if code is not None and (clock := _clock(code)):
            rows.append(
                f"reads the clock ({clock}) while it is recorded; later calls use the same time:"
                " read it outside, around the call"
            )
        for name, (place, x, mark) in self._looked.items():
            now = after.get(name)
            grows = isinstance(x, _GROWING) or is_host_array(x)
            if grows and now is not None and now[1] is x and now[2] != mark:
                rows.append(
                    f"changes {place.label}, from outside, while it is recorded; later calls do not"
                    " do it again: return what goes there, and put it there after the call"
                )
        return rows


def unused(recorder: Recorder, results: Iterable[Node]) -> list[str]:
    """What to say of what was made in vain in the place of an old value; `results` are used."""
    ends, nodes = set(results), recorder.builder.nodes
    last = {arg: i for i, n in enumerate(nodes) for arg in n.args}
    return [
        said
        for made, place, said in recorder.renewed
        if not any(n in ends or last.get(n, -1) >= place for n in made)
    ]


def warn(who: str, rows: Iterable[str], known: set[str]) -> None:
    """Warns of each of `rows` that is not `known`, of the function `who`."""
    for row in rows:
        if row not in known:
            known.add(row)
            text = f"{who} ({caller() or 'here'}) {row}"
            warnings.warn(text, TraceWarning, stacklevel=lines_up())


def _sources(looked: Looked) -> Iterable[tuple[str, Callable[[], object]]]:
    """(name, what tells its state) of all that can be drawn from."""
    out: dict[int, tuple[str, Callable[[], object]]] = {
        id(random): ("random", random.getstate),
        id(np.random): ("np.random", lambda: kept(np.random.get_state(legacy=False))),
    }
    torch = sys.modules.get("torch")
    if (own := getattr(torch, "default_generator", None)) is not None:
        out[id(torch)] = "torch", _bytes_of(own)
    for place, x, _ in looked.values():
        ask = _asked(x)
        if ask is not None:
            out.setdefault(id(x), (place.label, ask))
    return out.values()


def _asked(x: Any) -> Callable[[], object] | None:
    if isinstance(x, np.random.Generator):
        return lambda: kept(x.bit_generator.state)
    if isinstance(x, np.random.RandomState):
        return lambda: kept(x.get_state(legacy=False))
    if isinstance(x, random.Random):
        return x.getstate
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Generator", None)
    return _bytes_of(x) if kind is not None and isinstance(x, kind) else None


def _bytes_of(generator: Any) -> Callable[[], bytes]:
    """What tells the state of a generator of PyTorch."""
    return lambda: bytes(generator.get_state().numpy())


def _code(fn: Any) -> types.FunctionType | None:
    """The function whose code runs when `fn` is called."""
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    if not isinstance(fn, types.FunctionType):
        fn = inspect.unwrap(type(fn).__call__)
    return fn if isinstance(fn, types.FunctionType) else None


def _entropy(f: types.FunctionType) -> str:
    """How `f` names the source of `_ENTROPY` that it draws from; "" if it draws from none."""
    names = set(names_in(f.__code__))
    for place in variables(f):
        x = place.now()
        for module, inside in _ENTROPY:
            if x is module and names & inside:
                return f"{place.label}.{min(names & inside)}"
            if any(x is getattr(module, n) for n in inside):
                return place.label
    return ""


def _clock(f: types.FunctionType) -> str:
    """How `f` names the clock that it reads; "" if it reads none."""
    names = set(names_in(f.__code__))
    for place in variables(f):
        x = place.now()
        if x is time and not names & (set(vars(time)) - {"time"}):
            return "time.time"
        if (x is time or x is datetime or x is sys.modules["datetime"]) and names & _CLOCKS:
            return f"{place.label}.{min(names & _CLOCKS)}"
        if x is not None and any(x is getattr(time, n, None) for n in ("time", *_CLOCKS)):
            return place.label
    return ""
