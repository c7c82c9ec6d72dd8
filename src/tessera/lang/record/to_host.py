"""Reads of tensors by every process: `to_host`, a collective that all processes call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ...core.devices import device_count, process_count, process_index
from ...core.layout import Factor, TensorType, plain
from ...core.limits import limits
from ...core.mesh import Mesh
from ..value.eager import redistribute_now
from ..value.engine import engine
from ..value.tensor import Tensor
from .mesh_transfer import moved
from .tree import flatten, tree_map, unflatten


def to_host(tree: Any) -> Any:
    """`tree` with NumPy arrays in place of tensors, in every process, for tensors on any devices.

    All processes call it with the same tree, as a collective: if one does not, the others wait
    until the limit of collectives and name it. In one process it is `x.numpy()` for each tensor.
    (PyTorch calls it `full_tensor`.)
    """
    return tree_map(lambda x: on_each_host(x).numpy() if isinstance(x, Tensor) else x, tree)


def read_by_all(caller: str, tree: Any) -> Any:
    """Returns `tree` with tensors that every process can read. All processes call it, in the name
    of `caller`. Processes without a device of a tensor's mesh, such as a mesh folded onto fewer
    devices, receive the values from the first process that has one. That process waits for nobody,
    so it can read a mesh of its own alone."""
    if process_count() == 1:
        return tree
    leaves, spec = flatten(tree)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.mesh is not None:
            groups.setdefault(engine().processes(x.mesh), []).append(i)
    for group, at in groups.items():
        for i, x in zip(at, _read(caller, group, [leaves[i] for i in at]), strict=True):
            leaves[i] = x
    return unflatten(spec, leaves)


_read_counts: Counter[tuple[str, tuple[int, ...]]] = Counter()


def _read(caller: str, group: tuple[int, ...], xs: list[Tensor]) -> list[Tensor]:
    """Returns `xs`, whose mesh has devices of the processes `group`, as tensors that this process
    can read."""
    if process_index() in group:
        xs = [*map(on_its_devices, xs)]
    if len(group) == process_count():
        return xs
    _read_counts[caller, group] += 1
    name, turn, limit_s = f"{caller}/{group}", _read_counts[caller, group], limits().collective_s
    if process_index() in group:
        if process_index() == group[0]:
            said = [x.numpy().tolist() for x in xs]
            engine().from_first(name, turn, said, limit_s, group[0])
        return xs
    said = engine().from_first(name, turn, None, limit_s, group[0])
    return [_off_mesh(v, plain(x.dtype, x.shape)) for v, x in zip(said, xs, strict=True)]


def _off_mesh(value: Any, t: TensorType) -> Tensor:
    """Returns a tensor on no mesh, also inside of `with mesh:`."""
    return Tensor(engine().place(np.asarray(value, t.dtype.numpy).reshape(t.shape), t), t)


def is_local(x: Tensor) -> bool:
    """Returns whether this process has a device of the mesh of `x`."""
    if process_count() == 1 or x.mesh is None:
        return True
    return process_index() in engine().processes(x.mesh)


def on_its_devices(x: Tensor) -> Tensor:
    """Returns `x` replicated over its mesh, so that each process with a device of the mesh can read
    it."""
    t = x.type
    if process_count() == 1 or t.mesh is None or not (t.split_axes or t.partial):
        return x
    return redistribute_now(x, t.complete().replicated())


def local_value(x: Tensor) -> np.ndarray[Any, Any]:
    """The whole value, in each process that has a device of the mesh. A value that differs by
    device has a leading dim for each such axis, as from `numpy`."""
    t = x.type
    if process_count() > 1 and t.mesh is not None and t.mesh.onto is None and t.varying:
        rows = [(Factor(t.sizes[a], (a,)),) for a in t.varying]  # the leading dims of the array
        x = Tensor(x.stored, t.with_varying(()).with_dims((*rows, *t.dims)))
    return on_its_devices(x).numpy()


def on_each_host(x: Tensor) -> Tensor:
    """Returns `x` replicated on one device of each process, so that each process can read it."""
    processes = process_count()
    if processes == 1 or x.mesh is None:
        return x
    some = Mesh(("devices",), devices=range(0, device_count(), device_count() // processes))
    return moved(x, x.type.complete().replicated().on(some))
