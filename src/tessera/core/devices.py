"""How many devices does this program have? The module that loads the engine gives a function that
counts them."""

from __future__ import annotations

from collections.abc import Callable

from .errors import BackendError, fail

_providers: list[Callable[[], int]] = []


def set_device_provider(provider: Callable[[], int]) -> None:
    """Says how devices are counted. The runtime does this, since only it may ask the engine."""
    _providers[:] = [provider]


def device_count() -> int:
    """How many devices this program has. Raises `BackendError` if nothing can count them."""
    if not _providers:
        raise fail(
            BackendError,
            "device_count: no engine is loaded, so there are no devices to count",
            fix="import tessera, or name the devices: Mesh(['dp'], devices=range(8))",
        )
    return _providers[0]()
