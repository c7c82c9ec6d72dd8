"""How many devices does this program have, in how many processes? The module that loads the engine
gives functions that count them."""

from __future__ import annotations

from collections.abc import Callable

from .errors import BackendError, fail

Count = Callable[[], int]
_providers: list[tuple[Count, Count]] = []


def set_device_provider(devices: Count, processes: Count) -> None:
    """Says how devices and processes are counted. The runtime does this, since only it may ask the
    engine."""
    _providers[:] = [(devices, processes)]


def device_count() -> int:
    """How many devices this program has. Raises `BackendError` if nothing can count them."""
    if not _providers:
        raise fail(
            BackendError,
            "device_count: no engine is loaded, so there are no devices to count",
            fix="import tessera, or name the devices: Mesh(['dp'], devices=range(8))",
        )
    return _providers[0][0]()


def process_count() -> int:
    """How many processes run this program together; 1 where nothing counts them."""
    return _providers[0][1]() if _providers else 1
