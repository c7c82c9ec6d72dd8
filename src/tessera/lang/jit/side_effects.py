"""Warnings if a function draws random numbers of Python, NumPy or PyTorch while it is recorded.

The program has such numbers as constants.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ...core.errors import TraceWarning, caller, lines_up
from ..record.static_arguments import cache_key
from ..value.engine import engine
from .argument_updates import Variables
from .guards import contents


def states(variables: Variables) -> dict[str, object]:
    """Returns the state of each generator of random numbers, by name."""
    with suppress(ImportError):  # plans work without an engine
        engine()  # loading it draws from NumPy, so it is loaded before the states are read
    return {label: ask() for label, ask in _sources(variables)}


def drawn(before: Mapping[str, object], variables: Variables) -> list[str]:
    """Returns a warning for each generator whose state is not as in `before`."""
    now = states(variables)
    return [
        f"draws from {label} while it is recorded; later calls use the same numbers: use ts.random,"
        " or give what is drawn as an argument"
        for label, state in before.items()
        if now[label] != state
    ]


def warn(function: str, rows: Iterable[str], warned: set[str]) -> None:
    """Warns of each of `rows` that is not in `warned`, in the name of the function `function`."""
    for row in rows:
        if row not in warned:
            warned.add(row)
            text = f"{function} ({caller() or 'here'}) {row}"
            warnings.warn(text, TraceWarning, stacklevel=lines_up())


def _sources(variables: Variables) -> Iterable[tuple[str, Callable[[], object]]]:
    """Returns (name, a function that returns its state) for each generator of random numbers."""
    out: dict[int, tuple[str, Callable[[], object]]] = {
        id(random): ("random", random.getstate),
        id(np.random): ("np.random", lambda: cache_key(np.random.get_state(legacy=False))),
    }
    torch = sys.modules.get("torch")
    if (own := getattr(torch, "default_generator", None)) is not None:
        out[id(torch)] = "torch", lambda: bytes(own.get_state().numpy())
    for place, value in zip(variables.places, variables.values, strict=True):
        for x in contents(value)[0]:
            if (ask := _asked(x)) is not None:
                out.setdefault(id(x), (place.label, ask))
    return out.values()


def _asked(x: Any) -> Callable[[], object] | None:
    if isinstance(x, np.random.Generator):
        return lambda: cache_key(x.bit_generator.state)
    if isinstance(x, np.random.RandomState):
        return lambda: cache_key(x.get_state(legacy=False))
    return x.getstate if isinstance(x, random.Random) else None
