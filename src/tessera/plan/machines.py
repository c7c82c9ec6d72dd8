"""Machines of plans: from a file or a preset, with a chip, for a number of devices.

>>> machine = machine_of("dgx_h100", devices=1024)
>>> machine.size, machine.chip.name
(1024, 'h100')
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

from ..core.devices import recorded_for
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


def cluster_of(source: Machine | str | Path, devices: int = 0) -> Machine:
    """Returns the machine that `source` names: a Machine, a file, a preset, or a preset or its chip
    with a number of devices ("dgx_h100:1024", "h100x1024"). A preset without a number has at least
    `devices`. Raises MeshError if there is no such machine, or if it has no chip.

    >>> cluster_of("h100x1024").size, cluster_of("dgx_h100:16").size
    (1024, 16)
    """
    if isinstance(source, Machine):
        return source
    named = re.fullmatch(r"(\w+?)(?::|x)(\d+)", str(source))
    if named is not None:
        name, count = named[1], int(named[2])
        if not count:
            raise MeshError(f"plan: the cluster {source} has no device", fix=f"write {name}:8")
        return machine_of(name if name in PRESETS else f"dgx_{name}", count)
    machine = machine_from_file(source)
    if machine.size < devices and str(source) in PRESETS:
        return machine_of(source, devices)
    return machine


def as_machine(machine: Machine) -> AbstractContextManager[None]:
    """A context in which programs are recorded as on `machine`: for its number and kind of
    devices."""
    shared = machine.chip is not None and machine.chip.shared
    return recorded_for("cpu" if shared else "gpu", machine.size)
