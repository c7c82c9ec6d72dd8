"""Machines of plans: from a file or a preset, with a chip, for a number of devices.

>>> machine = machine_of("dgx_h100", devices=1024)
>>> machine.size, machine.chip.name
(1024, 'h100')
"""

from __future__ import annotations

from pathlib import Path

from ..core.errors import MeshError
from ..core.machine.chip import CHIPS
from ..core.machine.load import load
from ..core.machine.machine import Machine
from ..core.machine.presets import PRESETS


def machine_from_file(path: str | Path) -> Machine:
    """Returns the machine in the file `path`, or the preset of that name. Raises MeshError if it
    has no chip, or with every fault of the file."""
    machine = load(path)
    if machine.chip is None:
        with_chip = ", ".join(name for name, m in PRESETS.items() if m.chip is not None)
        raise MeshError(
            f"plan: the machine {machine.name} has no chip, so nothing tells how fast it computes",
            fix=f"add the key chip to its file ({', '.join(CHIPS)}, or its own figures), measure it"
            f" with tessera calibrate, or take one of {with_chip}",
        )
    return machine


def machine_of(source: str | Path, devices: int) -> Machine:
    """Returns the machine of `machine_from_file` with as many units of the outermost level as
    `devices` need."""
    machine = machine_from_file(source)
    unit = machine.size // machine.shape[0]
    return machine.of(max(1, -(-devices // unit)))
