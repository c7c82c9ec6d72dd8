"""How does each process read what others hold? By a collective that all of them call."""

from __future__ import annotations

from typing import Any

from ..core.devices import device_count, process_count
from ..core.mesh import Mesh
from .moving import moved
from .tensor import Tensor
from .tree import tree_map


def to_host(tree: Any) -> Any:
    """`tree` with NumPy arrays in place of tensors, in every process, wherever the tensors lie.

    All processes call it with the same tree, as a collective: where one does not, the others wait
    until the limit of collectives and name it. In one process it is `x.numpy()` for each tensor.
    (PyTorch calls it `full_tensor`.)
    """
    return tree_map(lambda x: on_each_host(x).numpy() if isinstance(x, Tensor) else x, tree)


def read_by_all(tree: Any) -> Any:
    """`tree`, whose tensors every process can read as far as those with their devices can.

    What lies on a mesh without a device of some process, such as one that is folded onto fewer, is
    brought to a device of each: all processes call it then, as a collective. All else stays.
    """
    if process_count() == 1:
        return tree
    each = device_count() // process_count()

    def brought(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.mesh is None:
            return x
        has = {i // each for i in x.mesh.physical.device_ids}
        return x if len(has) == process_count() else on_each_host(x)

    return tree_map(brought, tree)


def on_each_host(x: Tensor) -> Tensor:
    """`x` where each process can read it: whole, on a device of each."""
    processes = process_count()
    if processes == 1 or x.mesh is None:
        return x
    some = Mesh(("devices",), devices=range(0, device_count(), device_count() // processes))
    return moved(x, x.type.complete().replicated().on(some))
