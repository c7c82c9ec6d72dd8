"""Device and process counts, given by the module that loads the engine; and lost devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from .errors import BackendError, DeviceLostError

Count = Callable[[], int]
Place = Callable[[], tuple[int, int]]
Kind = Callable[[], str]
_providers: list[tuple[Count, Place, Kind]] = []


def set_device_provider(
    devices: Count, processes: Place = lambda: (0, 1), kind: Kind = lambda: "cpu"
) -> None:
    """Sets the functions that return the number of devices, (index, count) of this process, and the
    kind of devices. The runtime calls this, since only it may ask the engine."""
    _providers[:] = [(devices, processes, kind)]


def device_count() -> int:
    """Returns the number of devices of this program. Raises `BackendError` if no engine is
    loaded."""
    if _planned and _planned[-1][1]:
        return _planned[-1][1]
    if not _providers:
        raise BackendError(
            "device_count: no engine is loaded, so there are no devices to count",
            fix="import tessera, or name the devices: Mesh(['dp'], devices=range(8))",
        )
    return _providers[0][0]()


LOST: set[int] = set()
"""The ids of the devices that this program has lost."""


def need_devices(program: str, ids: Iterable[int]) -> None:
    """Raises DeviceLostError if `program` needs one of the devices `ids` that was lost."""
    gone = sorted(LOST.intersection(ids))
    if gone:
        raise DeviceLostError(
            f"{program}: {devices_text(gone)} lost",
            fix="go on with the others: `for step in elastic.steps(...): with step: ...` inside"
            " `with dist.elastic():`",
        )


def devices_text(ids: Sequence[int]) -> str:
    """Returns devices in words, with the verb.

    >>> devices_text([3]), devices_text([3, 5])
    ('device 3 is', 'devices 3, 5 are')
    """
    text = ", ".join(map(str, ids))
    return f"device {text} is" if len(ids) == 1 else f"devices {text} are"


def process_index() -> int:
    """Returns the index of this process among those that run the program, from 0; 0 if it runs
    alone. Process 0 prints and writes files.

    >>> process_index(), process_count()
    (0, 1)
    """
    return _providers[0][1]()[0] if _providers else 0


def platform() -> str:
    """Returns the kind of devices on which programs run: "cpu", "gpu" or "tpu". Starts none of
    them.

    >>> platform()
    'cpu'
    """
    if _planned:
        return _planned[-1][0]
    return _providers[0][2]() if _providers else "cpu"


_planned: list[tuple[str, int]] = []


@contextmanager
def recorded_for(kind: str, devices: int = 0) -> Iterator[None]:
    """Lets functions that are planned inside be recorded as for devices of this kind, which need
    not be there: with the sizes of blocks and the kernels of that kind. Nothing is called inside.
    `devices` is their number; 0: as many as there are.

    >>> with recorded_for("gpu", 1024):
    ...     platform(), device_count()
    ('gpu', 1024)
    """
    _planned.append((kind, devices))
    try:
        yield
    finally:
        _planned.pop()


def planned_kind() -> str:
    """Returns the kind of devices of `recorded_for`; "" outside of it."""
    return _planned[-1][0] if _planned else ""


def process_count() -> int:
    """Returns the number of processes that run this program; 1 if it runs alone."""
    return _providers[0][1]()[1] if _providers else 1
