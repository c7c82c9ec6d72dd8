"""Safe points of a run: the tensors, numbers and loader positions of its state.

A safe point is a checkpoint in the memory of this host, so processes may end and later ones
continue.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.listing import Keep, manifests, reader
from ..checkpoint.saving import Save, taken
from ..checkpoint.storage import Storage
from ..checkpoint.writing import written
from ..core.checks import shown
from ..core.devices import process_index
from ..core.errors import UsageError
from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..core.messages import warn
from ..lang.math import random
from ..lang.record.box import Box
from ..lang.record.offload import where_lies
from ..lang.record.tree import Path as Where
from ..lang.record.tree import tree_update
from ..lang.value.engine import engine
from ..lang.value.host_data import engine_array
from ..lang.value.tensor import Tensor
from ..nn.module import Module
from .hosts import Hosts


def say(text: str) -> None:
    """Logs a warning in the first process."""
    if process_index() == 0:
        warn(f"elastic: {text}")


def steps_text(n: int) -> str:
    return f"{n} step{'s' * (n != 1)}"


MEMORY = Path("/dev/shm")
_PREFIX = "tessera-elastic-"
State = dict[str, Any]


def memory_folder() -> str:
    """A new folder in the memory of this host, or a temporary one if there is no /dev/shm."""
    there = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    where = MEMORY if there else Path(tempfile.gettempdir())
    for old in where.glob(_PREFIX + "*-*"):  # of processes that were killed
        if not _lives(old.name.split("-")[2]):
            shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where)


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


class SnapshotStore:
    """The last safe point of `state`, in `folder`."""

    def __init__(self, folder: str, state: State, is_temporary: bool = False) -> None:
        self.storage, self.state = Storage(folder), state
        self.is_temporary = is_temporary  # True if the folder is deleted with this loop
        self.hosts = None if is_temporary else Hosts(self.storage)

    def keep(self, tag: str, step: int, mesh: Mesh, about: dict[str, Any]) -> None:
        """Stores the current state, after `step` steps, and removes the previous safe point."""
        tensors, values, loaders = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for name, x in named(self.state):
            if _is_array(x):
                tensors[name] = x.now() if isinstance(x, Box) else x
            elif _is_loader(x):
                loaders[name] = x.state_dict()
            else:
                values[name] = x
        what = Save(
            tag, {"tensors": tensors, "values": values}, mesh=mesh, root=self.storage,
            keep=Keep(1), step=step, state={"loaders": loaders, **about},
        )  # fmt: skip
        job = taken(what)
        if self.hosts is not None:
            job.leads, job.spread = self.hosts.leads, self.hosts.spread
        written(job)

    def begin(self) -> Any:
        """The manifest of the last safe point of earlier processes; None if there is none."""
        if self.hosts is None:
            return None
        if text := self.hosts.text():
            say(f"safe points lie {text}")
        late = self.hosts.complete()
        if late is not None:
            say(f"a safe point after {steps_text(late)} is not whole on the hosts that are left")
        return self.last()

    def last(self) -> Any:
        """The manifest of the last safe point; None if there is none."""
        found, _ = manifests(self.storage)
        return found[-1] if found else None

    def put_back(self, where: Callable[[TensorType], TensorType], mesh: Mesh | None = None) -> int:
        """Restores the last safe point into the state and returns its number of steps. `where`
        gives the layout of each tensor; batches of loaders are laid out on `mesh`; the random
        generator is set."""
        manifest = self.last()
        source = reader(self.storage, manifest)
        new: dict[str, Any] = {}
        for name, x in named(self.state):
            if _is_loader(x):
                x.load_state_dict(manifest.state["loaders"][name])
                if mesh is not None and hasattr(x, "resize"):
                    x.resize(mesh)
                new[name] = x
            elif f"tensors/values/{name}" in manifest.values:
                new[name] = manifest.values[f"tensors/values/{name}"]
            elif f"tensors/tensors/{name}" not in manifest.tensors:
                raise UsageError(
                    f"elastic: the safe point after step {manifest.step} has no {name!r}",
                    fix="give elastic.steps the same state each time; keep outside what grows, as a"
                    " log",
                )
            elif isinstance(x, Tensor):
                to = where(x.type.complete())
                fill = partial(source.fill, f"tensors/tensors/{name}")
                t = Tensor(engine().place_blocks(fill, to), to)
                t.name = x.name
                new[name] = where_lies(x, t)
            else:
                new[name] = source.read(f"tensors/tensors/{name}")
        _write(self.state, new)
        random.set_state(manifest.random)
        return int(manifest.step)

    def end(self) -> None:
        if self.is_temporary:
            shutil.rmtree(self.storage.name, ignore_errors=True)


# -- parts of a state -----------------------------------------------------------------------------
def _is_array(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) or engine_array(x)


def _is_loader(x: Any) -> bool:
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def named(state: State) -> list[tuple[str, Any]]:
    """(name, value) for each part of `state` that is kept. Raises UsageError for a value that
    cannot be kept."""
    found: list[tuple[str, Any]] = []

    def take(name: str, x: Any) -> Any:
        found.append((name, x))
        return x

    _go(state, (), take)
    return found


def _write(state: State, new: dict[str, Any]) -> None:
    _go(state, (), lambda name, x: new[name])


def _go(tree: Any, path: Where, f: Callable[[str, Any], Any]) -> Any:
    """Applies `f` to each part of `tree` that is kept; modules, dicts and lists are changed in
    place."""
    name = "/".join(map(str, path))
    if isinstance(tree, Module):

        def tensor(inner: Where, x: Any) -> Any:
            if not _is_array(x):
                return x  # a setting of the module
            made = f("/".join(map(str, (*path, *inner))), x)
            if not isinstance(x, Box) or made is x:
                return made
            x.put(made)
            return x

        return tree_update(tensor, tree)
    if isinstance(tree, (dict, list)):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, x in [*pairs]:
            new = _go(x, (*path, key), f)
            if new is not x:
                tree[key] = new
        return tree
    if isinstance(tree, tuple):
        parts = [_go(x, (*path, i), f) for i, x in enumerate(tree)]
        if all(a is b for a, b in zip(parts, tree, strict=True)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if tree is None or _is_constant(tree):
        return tree
    if _is_array(tree) or _is_loader(tree) or isinstance(tree, (bool, int, float, str)):
        return f(name, tree)
    raise UsageError(
        f"elastic: state[{name!r}] is {shown(tree)}, which cannot be kept",
        fix="give modules, tensors, numbers, texts, and what has state_dict and load_state_dict",
    )


def _is_constant(x: Any) -> bool:
    """Returns whether `x` is a frozen dataclass, such as a configuration, which no step changes."""
    made = getattr(type(x), "__dataclass_params__", None)
    return made is not None and made.frozen
