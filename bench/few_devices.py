"""The number of virtual devices in a script: as many as its program uses (docs/meshes.md)."""

from __future__ import annotations

import os

from tessera.core import environment
from tessera.runtime.devices import start


def start_few(devices: int) -> None:
    """Starts the backend with `devices` devices, unless the environment sets their number."""
    os.environ.setdefault(environment.DEVICES, str(devices))
    start(devices)
