"""How many virtual devices does a script start? As many as its program uses (docs/meshes.md)."""

from __future__ import annotations

import os

from tessera.core import environment
from tessera.runtime.devices import start


def start_few(devices: int) -> None:
    """Starts the backend with so many, unless the environment says how many."""
    os.environ.setdefault(environment.DEVICES, str(devices))
    start(devices)
