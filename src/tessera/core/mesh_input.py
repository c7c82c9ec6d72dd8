"""Checks of the arguments of `Mesh`.

Axes, a shape and devices have many spellings; here each becomes a tuple or a `MeshError`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from .errors import MeshError
from .value_checks import is_whole

# A nested list has no finite type; its contents are checked at run time.
Devices: TypeAlias = Sequence[Any] | np.ndarray[Any, Any] | int | None
Shape: TypeAlias = Mapping[str, int] | Sequence[int] | int | None


def checked_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the axes as a tuple. Raises MeshError if they are not identifiers or not
    distinct."""
    if not isinstance(axes, str | list | tuple):
        raise MeshError(
            f"Mesh: axes cannot be {axes!r}",
            fix="pass a list or tuple of names, for instance ['dp', 'tp']",
        )
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names:
        raise MeshError(
            "Mesh: a mesh needs at least one axis",
            fix="name the axes, for instance Mesh(['dp', 'tp'], devices=range(8))",
        )
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise _wrong(
                names,
                f"axis name {name!r} is not an identifier",
                "use letters, digits and _, for instance 'dp'"
                if isinstance(name, str)
                else 'names come first: dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})',
            )
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise _wrong(
            names,
            f"{_repeated('axis', 'axes', twice)} named twice",
            "give each axis a name of its own",
        )
    return names


def _wrong(axes: Iterable[object], message: str, fix: str, **more: object) -> MeshError:
    return MeshError(f"Mesh: {message}", rows=[("axes", names_text(axes)), *more.items()], fix=fix)


def checked_shape(axes: tuple[str, ...], shape: Shape) -> tuple[int, ...] | None:
    """Returns the size of each axis, in the order of `axes`; None without a shape. Raises MeshError
    if it has other axes, another number of sizes, or a size below 1."""
    if shape is None:
        return None
    if isinstance(shape, Mapping):
        unknown = [repr(axis) for axis in shape if axis not in axes]
        missing = [repr(axis) for axis in axes if axis not in shape]
        if unknown or missing:
            wrong = [f"names {', '.join(unknown)}, which the mesh lacks"] if unknown else []
            wrong += [f"leaves out {', '.join(missing)}"] if missing else []
            raise _wrong(
                axes,
                f"shape {', and '.join(wrong)}",
                "give a size for each axis and for nothing else",
                shape=str(dict(shape)),
            )
        sizes = [shape[axis] for axis in axes]
    else:
        if is_whole(shape):
            shape = (shape,)
        if not _is_list(shape):
            raise _wrong(
                axes,
                f"shape cannot be {shape!r}",
                "pass a size for each axis: a dict by name, or a tuple in axis order",
            )
        sizes = list(shape)
        if len(sizes) != len(axes):
            raise _wrong(
                axes,
                f"shape has {len(sizes)} sizes for {len(axes)} axes",
                "give one size for each axis",
                shape=str(tuple(sizes)),
            )
    for axis, size in zip(axes, sizes):
        if not is_whole(size) or size < 1:
            raise _wrong(
                axes,
                f"axis {axis!r} has size {size!r}",
                "make every size a whole number of at least 1",
                shape=str(tuple(sizes)),
            )
    return tuple(int(size) for size in sizes)


def checked_devices(
    axes: tuple[str, ...], devices: Devices, dims: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Returns the flat ids, and the shape of their nesting (None if they were flat)."""
    if (
        dims is None
        and isinstance(devices, list | tuple)
        and 1 < len(devices) == len(axes)
        and all(is_whole(n) and n > 0 for n in devices)
    ):
        numbers = ", ".join(map(str, devices))
        raise _wrong(
            axes,
            f"are {numbers} the devices, or their number along each axis?",
            f"pass shape=({numbers}) for numbers; for devices, pass their shape beside them",
        )
    if devices is None:
        if dims is None:
            raise _wrong(
                axes,
                "neither devices nor a shape are given",
                "pass devices=range(8), or shape={...}, or use ts.mesh.auto()",
            )
        return tuple(range(math.prod(dims))), None
    if isinstance(devices, np.ndarray):
        devices = devices.tolist()
    if is_whole(devices):
        devices = range(int(devices))
    if not _is_list(devices):
        raise _wrong(
            axes,
            f"devices cannot be {devices!r}",
            "pass a count, a range, a list of ids, or a nested list",
        )
    flat: list[Any] = list(devices)
    nested: list[int] = []
    while flat and any(_is_list(entry) for entry in flat):
        lengths = {len(entry) if _is_list(entry) else -1 for entry in flat}
        if len(lengths) != 1:
            found = " and ".join("none" if n < 0 else str(n) for n in sorted(lengths))
            raise _wrong(
                axes,
                f"the nested device list is ragged: lengths {found} at depth {len(nested) + 1}",
                "make the lists of one depth equally long",
            )
        nested.append(lengths.pop())
        flat = [device for entry in flat for device in entry]
    if nested and len(nested) + 1 != len(axes):
        raise _wrong(
            axes,
            f"devices are nested {len(nested) + 1} deep for {len(axes)} "
            f"{'axis' if len(axes) == 1 else 'axes'}",
            "nest the list once for each axis, or pass a flat list and shape=",
        )
    shape = (len(flat) // math.prod(nested), *nested) if nested and all(nested) else None
    return _checked_ids(axes, flat), shape


def _checked_ids(axes: tuple[str, ...], flat: Iterable[object]) -> tuple[int, ...]:
    """Returns the device ids in their order. Raises MeshError if one is not an integer, is below 0,
    or occurs twice."""
    ids: list[int] = []
    for device in flat:
        if not is_whole(device):
            raise _wrong(
                axes,
                f"device id {device!r} is not a whole number",
                "name devices by their ids: 0, 1, 2, ...",
            )
        ids.append(int(device))
    if not ids:
        raise _wrong(
            axes, "there are no devices", "pass at least one device, for instance devices=range(1)"
        )
    if min(ids) < 0:
        raise _wrong(
            axes,
            f"device id {min(ids)} is negative",
            "name devices by their ids: 0, 1, 2, ...",
            devices=shortened_ids(ids),
        )
    if len(set(ids)) != len(ids):
        twice = sorted(device for device, n in Counter(ids).items() if n > 1)
        raise _wrong(
            axes,
            f"{_repeated('device', 'devices', twice)} named twice",
            "name each device once",
            devices=shortened_ids(ids),
        )
    return tuple(ids)


@lru_cache(maxsize=256)
def balanced(count: int, parts: int) -> tuple[int, ...]:
    """Returns `count` as a product of `parts` factors with the least sum, larger factors first.

    >>> balanced(48, 3), balanced(16, 2), balanced(7, 2)
    ((4, 4, 3), (4, 4), (7, 1))
    """
    divisors = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    divisors = sorted({*divisors, *(count // d for d in divisors)})

    def search(remaining: int, parts: int, most: int) -> tuple[int, ...] | None:
        """Returns the best non-increasing factors of `remaining`, none above `most`, if there are
        any."""
        if parts == 1:
            return (remaining,) if remaining <= most else None
        best: tuple[int, ...] | None = None
        for first in divisors:
            if first > most or first**parts < remaining:  # the largest is at least the mean
                continue
            if remaining % first == 0:
                tail = search(remaining // first, parts - 1, first)
                if tail is not None and (best is None or first + sum(tail) < sum(best)):
                    best = (first, *tail)
        return best

    found = search(count, parts, count)
    assert found is not None, "count × 1 × 1 ... is always a factorisation"
    return found


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple | range | np.ndarray)


def names_text(names: Iterable[object]) -> str:
    """Returns axis names as a message shows them: ('dp', 'tp')."""
    return str(tuple(names))


def times(shape: Sequence[int]) -> str:
    """Returns a shape as a message shows it: 2 × 4."""
    return " × ".join(map(str, shape))


def shortened_ids(ids: Sequence[int]) -> str:
    """Returns device ids as text, the first 16 of many."""
    shown = ", ".join(map(str, ids[:16]))
    return f"[{shown}]" if len(ids) <= 16 else f"[{shown}, ... {len(ids)} in all]"


def ids_text(ids: Sequence[int], between: str = ",") -> str:
    """Returns all of `ids` as text; runs of five or more with one step as first..last or
    first..last:step.

    >>> ids_text(range(512)), ids_text([0, 8, 16, 24, 32, 33]), ids_text([0, 2, 4], ", ")
    ('0..511', '0..32:8,33', '0, 2, 4')
    """
    texts: list[str] = []
    at = 0
    while at < len(ids):
        step = ids[at + 1] - ids[at] if at + 1 < len(ids) else 1
        end = at + 1
        while end < len(ids) and ids[end] - ids[end - 1] == step:
            end += 1
        if end - at < 5 or step < 1:
            end = at + 1
        by = "" if step == 1 else f":{step}"
        texts.append(str(ids[at]) if end == at + 1 else f"{ids[at]}..{ids[end - 1]}{by}")
        at = end
    return between.join(texts)


def ids_of(text: str) -> tuple[int, ...]:
    """Returns the ids whose `ids_text` is `text`. Raises ValueError if it is no such text.

    >>> ids_of("0..32:8,33")
    (0, 8, 16, 24, 32, 33)
    """
    ids: list[int] = []
    for part in text.split(","):
        first, dots, rest = part.partition("..")
        last, _, step = rest.partition(":")
        ids += range(int(first), int(last) + 1, int(step or 1)) if dots else [int(first)]
    return tuple(ids)


def devices_text(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _repeated(one: str, many: str, names: Sequence[object]) -> str:
    listed = ", ".join(map(repr, names))
    return f"{one} {listed} is" if len(names) == 1 else f"{many} {listed} are"
