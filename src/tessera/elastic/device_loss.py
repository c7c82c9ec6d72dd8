"""Lost devices: the devices that a run cannot use until they come back."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from ..core.checks import whole
from ..core.devices import LOST, device_count, process_count
from ..core.errors import BackendError, UsageError
from ..core.mesh import Mesh
from ..lang.value.checks import mesh_or_none, needed_mesh
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from .refold import folded_to_fit


def drop(device: int) -> None:
    """Simulates the loss of a device, for tests and drills: all data on meshes with it are deleted.

    Operations that need the device raise `ts.DeviceLostError`, until `elastic.restore(device)`. It
    works only in a program of one process: of several, end one (`kill -9`). Raises UsageError
    otherwise, or if there is no such device.
    """
    if process_count() > 1:
        raise UsageError(
            "elastic.drop: a device of another process cannot be dropped",
            fix="end a process of the run, or stop it: tessera run --elastic goes on",
        )
    whole("elastic.drop", "the device", device, 0, device_count() - 1)
    LOST.add(device)
    for t in gc.get_objects():
        # By type, since `isinstance` asks the object, and some objects of other libraries warn.
        if issubclass(type(t), Tensor) and t.mesh is not None and device in t.mesh.physical.ids:
            engine().delete(t._data)


def restore(device: int) -> None:
    """Restores a dropped device; with `rejoin=True` a run takes it back at its next safe point.
    Raises UsageError if it is not lost."""
    if device not in LOST:
        raise UsageError(
            f"elastic.restore: device {device!r} is not lost",
            lost=", ".join(map(str, sorted(LOST))) or "none",
            fix="restore what elastic.drop(device) took away",
        )
    LOST.discard(device)


def fit(mesh: Mesh) -> Mesh:
    """The logical mesh `mesh`, folded onto its available devices, as many as can share its places
    evenly, leading axes first.

    For 8 places, 6 devices would be no faster than 4: some would have two places each. A mesh of 24
    places runs on 8, 6, 4, 3 or 2. Raises MeshError if no device of the mesh is available.

    >>> from tessera import dist, elastic
    >>> elastic.fit(dist.Mesh.parse("dp=16")).physical.size
    8
    """
    mesh = needed_mesh("elastic.fit", mesh_or_none("elastic.fit", mesh))
    return folded_to_fit(mesh, {*range(device_count())} - LOST)


def lost_by(error: BaseException, mesh: Mesh) -> list[int]:
    """The lost devices of `mesh` after `error`: known ones, or after an engine failure those that
    no longer answer."""
    ids = mesh.physical.ids
    if isinstance(error, BackendError) and not LOST.intersection(ids):
        LOST.update(_silent(ids))
    return sorted(LOST.intersection(ids))


def _silent(ids: Iterable[int]) -> list[int]:
    return [i for i in ids if not engine().answers(i)]
