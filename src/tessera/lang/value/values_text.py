"""Text of a tensor: its values, abridged as NumPy abridges them, then its type.

Only the elements that the text shows are read, each from a device that holds it; nothing
communicates.

>>> import tessera as ts
>>> ts.tensor([[1.0, 2.0], [3.0, 4.5]])
Tensor([[1. , 2. ],
        [3. , 4.5]], f32[2, 2])
>>> ts.reshape(ts.arange(4096), (64, 64))
Tensor([[   0,    1,    2, ...,   61,   62,   63],
        [  64,   65,   66, ...,  125,  126,  127],
        [ 128,  129,  130, ...,  189,  190,  191],
        ...,
        [3904, 3905, 3906, ..., 3965, 3966, 3967],
        [3968, 3969, 3970, ..., 4029, 4030, 4031],
        [4032, 4033, 4034, ..., 4093, 4094, 4095]], i32[64, 64])
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...core.brief import is_brief
from ...core.devices import process_count
from ...core.errors import DeviceLostError, DonatedError
from ...core.locks import put_back
from ...ops.create import full
from .eager import EAGER, current_trace
from .engine import engine
from .tensor import Tensor, method


@method("__repr__")
def values_text(x: Tensor) -> str:
    """Returns the values of `x`, abridged by NumPy's print options, then its type and its name.

    Of a pending sum the terms are read, and added on the host. There is the type alone while a
    function is recorded, and for a value that cannot be read here, with the reason: it is large and
    not made yet, it was donated, or other processes hold a part of what would be shown. No process
    waits for another one.
    """
    now = x.now()
    if is_brief() or now._trace is not None or current_trace() is not EAGER:
        return _type_text(x, "")
    shown = _shown(now)
    if isinstance(shown, str):
        return _type_text(x, shown)
    return _with_type(shown, x.shape, _named(x))


def _type_text(x: Tensor, why: str) -> str:
    label = f" {x.name!r}" if x.name else ""
    return f"<Tensor{label} {x.type}{_where(x)}{why and ', '}{why}>"


def _where(x: Tensor) -> str:
    return f" on {x.mesh.text()}" if x.mesh is not None else ""


def _named(x: Tensor) -> str:
    return f"{x.type}{_where(x)}" + (f", {x.name!r}" if x.name else "")


def _shown(x: Tensor) -> np.ndarray[Any, Any] | str:
    """Returns the array whose text is that of `x`, or the reason why there is none."""
    try:
        try:
            return _edges(x)
        except DonatedError:
            with put_back():
                return _edges(x)
    except DonatedError:
        return "donated"
    except DeviceLostError:
        return "on a device that is lost"


def _edges(x: Tensor) -> np.ndarray[Any, Any] | str:
    t, alone = x.type, process_count() == 1
    if t.varying:
        return f"different along {', '.join(t.varying)}"
    edge, cut = _cut(t.shape)
    at = [
        np.concatenate([np.arange(edge), np.arange(n - edge, n)]) if short else np.arange(n)
        for n, short in zip(t.shape, cut, strict=True)
    ]
    found = _constant(x, [len(i) for i in at])
    if found is None:
        recipe = x._recipe if x._data is None else None
        if x._data is None and not (alone or t.mesh is None):
            return "not made yet"
        if recipe is not None and not recipe.of_host:
            if any(cut):
                return "not made yet"
            data = recipe(t)  # its layout stays open
        else:
            data = x.stored
        found = engine().picked(data, t, at)
    if found is None:
        return "of which other processes hold a part"
    for dim, short in enumerate(cut):
        if short:  # one item more than the edges, in whose place NumPy writes ...
            found = np.insert(found, edge, np.zeros((), found.dtype), axis=dim)
    return found


def _cut(shape: tuple[int, ...]) -> tuple[int, list[bool]]:
    """Returns the number of items that NumPy shows at an edge, and whether it cuts each dim."""
    options: Any = np.get_printoptions()
    edge = options["edgeitems"]
    abridged = math.prod(shape) > options["threshold"]
    return edge, [abridged and n > 2 * edge for n in shape]


def _constant(x: Tensor, shape: list[int]) -> np.ndarray[Any, Any] | None:
    """Returns an array of the number that fills `x`, if it is filled with one and not made yet."""
    made = x._history
    if x._data is not None or made is None or made.op != full.name:
        return None
    return np.full(shape, made.attrs["value"], x.dtype.numpy)


def _with_type(values: np.ndarray[Any, Any], shape: tuple[int, ...], type: str) -> str:
    """Returns the text of `values`, abridged if NumPy abridges arrays of `shape`."""
    options: Any = np.get_printoptions()
    if values.dtype.kind == "V":  # the narrow floats, which NumPy does not align
        values = values.astype(np.float32)
    threshold = 0 if any(_cut(shape)[1]) else math.prod(shape) + 1
    text = np.array2string(values, separator=", ", prefix="Tensor(", threshold=threshold)
    last = len(text) - text.rfind("\n") - 1
    wide = last + len(type) + 3 + (len("Tensor(") if "\n" not in text else 0)
    gap = "\n       " if wide > options["linewidth"] else " "
    return f"Tensor({text},{gap}{type})"
