"""How does each process read what others hold? By a collective that all of them call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..core.devices import device_count, process_count, process_index
from ..core.layout import Factor, TensorType, plain
from ..core.limits import limits
from ..core.mesh import Mesh
from .eager import redistribute_now
from .engine import engine
from .moving import moved
from .tensor import Tensor
from .tree import flatten, tree_map, unflatten


def to_host(tree: Any) -> Any:
    """`tree` with NumPy arrays in place of tensors, in every process, wherever the tensors lie.

    All processes call it with the same tree, as a collective: where one does not, the others wait
    until the limit of collectives and name it. In one process it is `x.numpy()` for each tensor.
    (PyTorch calls it `full_tensor`.)
    """
    return tree_map(lambda x: on_each_host(x).numpy() if isinstance(x, Tensor) else x, tree)


def read_by_all(who: str, tree: Any) -> Any:
    """`tree`, whose tensors every process can read: what the processes of their mesh call for
    `who`, those do too that have no device of it, such as one that is folded onto fewer. They wait
    for the first process that has one, which waits for nobody: a mesh of each process's own is
    read by it alone."""
    if process_count() == 1:
        return tree
    leaves, spec = flatten(tree)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.mesh is not None:
            groups.setdefault(engine().processes(x.mesh), []).append(i)
    for group, at in groups.items():
        for i, x in zip(at, _read(who, group, [leaves[i] for i in at]), strict=True):
            leaves[i] = x
    return unflatten(spec, leaves)


_turns: Counter[tuple[str, tuple[int, ...]]] = Counter()


def _read(who: str, group: tuple[int, ...], xs: list[Tensor]) -> list[Tensor]:
    """`xs`, whose mesh has devices of the processes `group`, where this one can read them."""
    if process_index() in group:
        xs = [*map(on_its_devices, xs)]
    if len(group) == process_count():
        return xs
    _turns[who, group] += 1
    name, turn, limit_s = f"{who}/{group}", _turns[who, group], limits().collective_s
    if process_index() in group:
        if process_index() == group[0]:
            said = [x.numpy().tolist() for x in xs]
            engine().from_first(name, turn, said, limit_s, group[0])
        return xs
    said = engine().from_first(name, turn, None, limit_s, group[0])
    return [_here(v, plain(x.dtype, x.shape)) for v, x in zip(said, xs, strict=True)]


def _here(value: Any, t: TensorType) -> Tensor:
    """A tensor on no mesh, whatever mesh is in force."""
    return Tensor(engine().place(np.asarray(value, t.dtype.numpy).reshape(t.shape), t), t)


def is_here(x: Tensor) -> bool:
    """Whether this process has a device of its mesh."""
    if process_count() == 1 or x.mesh is None:
        return True
    return process_index() in engine().processes(x.mesh)


def on_its_devices(x: Tensor) -> Tensor:
    """`x` where each process that has a device of its mesh can read it: whole, on all of them."""
    t = x.type
    if process_count() == 1 or t.mesh is None or not (t.split_axes or t.partial):
        return x
    return redistribute_now(x, t.complete().replicated())


def value_here(x: Tensor) -> np.ndarray[Any, Any]:
    """The whole value, in each process that has a device of its mesh. What each device has of its
    own comes with a leading dim for each axis, as by `numpy`."""
    t = x.type
    if process_count() > 1 and t.mesh is not None and t.mesh.onto is None and t.varying:
        rows = [(Factor(t.sizes[a], (a,)),) for a in t.varying]  # as the array lies
        x = Tensor(x.stored, t.with_varying(()).with_dims((*rows, *t.dims)))
    return on_its_devices(x).numpy()


def on_each_host(x: Tensor) -> Tensor:
    """`x` where each process can read it: whole, on a device of each."""
    processes = process_count()
    if processes == 1 or x.mesh is None:
        return x
    some = Mesh(("devices",), devices=range(0, device_count(), device_count() // processes))
    return moved(x, x.type.complete().replicated().on(some))
