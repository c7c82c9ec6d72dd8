"""Asynchronous saves of checkpoints: copied to the host at once, written by a thread.

A save has the state after the last step before the call. Training waits until it is copied to host
memory; a thread writes it (`writing.py`).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from ..core.checks import flag, unfit, whole
from ..core.context import settings
from ..core.declared import Flag
from ..core.devices import process_count, process_index
from ..core.errors import DTypeError, TesseraError, UsageError
from ..core.mesh import Mesh
from ..core.messages import tell as log
from ..core.messages import warn
from ..core.version import VERSION
from ..core.wording import digest
from ..lang.math import random
from ..lang.record.offload import back
from ..lang.record.operands import as_tensor
from ..lang.record.recorder import current
from ..lang.record.to_host import read_by_all
from ..lang.record.tree import flatten, paths
from ..lang.value.checks import mesh_or_none
from ..lang.value.eager import redistribute_now
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from ..nn.module import Module
from .listing import ROOT, Keep, Root, keep_of, numbers, see_metric, tag_of
from .pieces import Block
from .storage import Storage, begun
from .writing import Job, Tell, written

if TYPE_CHECKING:
    from .manifest import Saved


@dataclass(frozen=True)
class Save:
    """The arguments of `save`. `tell` receives a line with the outcome."""

    tag: str
    tensors: Any
    optimizer: Any = None
    mesh: Mesh | None = None
    root: Root | Storage = ROOT
    keep: int | Keep | None = None
    step: Any = None
    metrics: Mapping[str, Any] | None = None
    state: Any = None
    tell: Tell | None = None


@dataclass
class _Writer:
    """The writer thread, which writes one save after the other."""

    pool: ThreadPoolExecutor | None = None
    waiting: list[tuple[str, Future[None]]] = field(default_factory=list)
    count: int = 0
    failed: bool = False  # after the last line of the program

    def give(self, job: Job) -> None:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "tessera-checkpoint")
            atexit.register(self.end)
        self.waiting.append((job.tag, begun(self.pool, partial(written, job))))

    def check(self, most: int) -> None:
        """Raises the error of a failed save; waits until at most `most` saves are pending."""
        while self.waiting and (len(self.waiting) > most or self.waiting[0][1].done()):
            _, done = self.waiting.pop(0)
            done.result()

    def end(self) -> None:
        """Writes pending saves at the end of the program."""
        for _, error in failures(wait=True):
            warn(str(error))
            self.failed = True

    def fail(self) -> None:
        """Ends the process with status 1 if a save failed; runs last at exit, so that its caller
        learns of the failure."""
        if self.failed:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            # SystemExit in an exit handler does not set the status.
            os._exit(1)


_WRITER = _Writer()
# Exit handlers run in reverse order, so `fail` runs after `end`, which is registered later.
atexit.register(_WRITER.fail)
AHEAD = 1
"""The number of saves that may wait for the current one: each holds a copy in host memory."""


def save(
    tag: str,
    tensors: Any,
    optimizer: Any = None,
    atomic: bool = True,
    async_io: Flag = True,
    mesh: Mesh | None = None,
    root: Root = ROOT,
    keep: int | Keep | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    state: Any = None,
    quiet: Flag = False,
) -> None:
    """Saves a checkpoint called `tag` below `root`, a folder or "gs://..." or "s3://...".

    `tensors` is a module or a tree of tensors, `optimizer` a tree of tensors, numbers and texts. A
    save also has the state of the random generator, `step`, `metrics` (numbers) and `state`,
    further values of your own (JSON), such as `loader.state_dict()`. It is the state after the last
    step before the call. With `async_io` a thread writes, and training continues once all is copied
    to the host; an error is raised by the next `save`, or by `wait`; after the last line of a
    program it makes the exit status 1. Each process must call it and writes its own blocks; tensors
    on a mesh of one process are saved by that process alone, below a separate root. `metrics` and
    `state` are those of the first process.

    The checkpoint appears atomically, complete or not at all. `atomic=False` is an error. `keep` (a
    number of checkpoints, or a `checkpoint.Keep`) removes older ones once the new one is on disk.
    `mesh` is the mesh that the manifest names, by default that of the tensors. Raises UsageError if
    an argument cannot be saved or `metrics` lack the one by which `keep` rates, CheckpointError if
    an earlier save has failed or `root` cannot be used (guide 2, 5.1).
    """
    fourth: Any = atomic
    if isinstance(fourth, (str, os.PathLike)):
        raise unfit(
            "checkpoint.save", "atomic", atomic, f"give a folder by name: root={str(fourth)!r}"
        )
    if not flag("checkpoint.save", "atomic", atomic):
        raise UsageError(
            "checkpoint.save: every checkpoint is atomic",
            fix="leave out atomic=False: it would save nothing",
        )
    not_recorded("checkpoint.save")
    no_folder("checkpoint.save", optimizer)
    tag_of(tag)
    all_leaves = leaves("tensors", tensors) + leaves("optimizer", optimizer)
    if all(x is None or isinstance(x, (bool, int, float, str)) for _, x in all_leaves):
        fix = 'give a module or a tree of tensors, such as {"w": w}; numbers alone go into state='
        raise unfit("checkpoint.save", "tensors", tensors, fix)
    tell = None if quiet else log
    see_metric(keep_of(keep), numbers(metrics))
    start(Save(tag, tensors, optimizer, mesh, root, keep, step, metrics, state, tell))
    if not async_io:
        _WRITER.check(0)


def start(save: Save) -> None:
    """`save` with `async_io`, from a `Save`."""
    begin_s = time.perf_counter()
    _WRITER.check(AHEAD)
    group = _holders(save) if process_count() > 1 else ()
    if len(group) == 1 and group != (process_index(),):
        return  # another process has all of it and saves alone
    job = taken(save, alone=len(group) == 1)
    job.stall_s = time.perf_counter() - begin_s
    _WRITER.give(job)


def _holders(save: Save) -> tuple[int, ...]:
    """The processes whose devices hold the tensors that are on a mesh."""
    found = [x for tree in (save.tensors, save.optimizer) for _, x in leaves("tensors", tree)]
    meshes = dict.fromkeys(x.mesh for x in found if isinstance(x, Tensor) and x.mesh is not None)
    return tuple(sorted({rank for mesh in meshes for rank in engine().processes(mesh)}))


def taken(save: Save, alone: bool = False) -> Job:
    """A save, copied to the host, for `written`; `alone` if no other process has a part of it.
    Raises UsageError if a value cannot be saved."""
    from importlib.metadata import version

    from .manifest import Saved

    tag_of(save.tag)
    policy = keep_of(save.keep)
    count = read_by_all("step", save.step)
    count = count.item() if isinstance(count, Tensor) else count  # a state's "step"
    step = None if count is None else whole("checkpoint.save", "step", count, 0)
    if policy is not None and policy.every is not None and step is None:
        raise unfit("checkpoint.save", "step", None, f"say it: every={policy.every} asks for it")
    named, values = _leaves(save.tensors, save.optimizer)
    where = mesh_or_none("checkpoint.save", save.mesh) or next(
        (t.mesh for t in named.values() if t.mesh is not None), None
    )
    about = {
        "tag": save.tag, "step": step, "mesh": where.text() if where is not None else "",
        "processes": 1 if alone else process_count(), "numerics": settings().program.determinism,
        "versions": {"tessera": VERSION, **{name: version(name) for name in ("jax", "numpy")}},
        "metrics": numbers(save.metrics), "random": random.state(), "values": values,
        "state": _json(save.state),
    }  # fmt: skip
    _WRITER.count += 1
    saved: dict[str, Saved] = {}
    blocks: dict[str, list[Block]] = {}
    alone = alone or process_count() == 1
    of_host = 0  # a checksum of tensors without a mesh, one per process
    for i, (name, t) in enumerate(named.items()):
        t = back(t)
        t = _complete(Tensor(engine().alive(t.stored, t.type), t.type))
        saved[name] = Saved(dtype=t.dtype.name, shape=[*t.shape], layout=str(t.type), pieces=[])
        blocks[name] = engine().blocks(t.stored, t.type, process_index() if alone else i)
        if t.mesh is None and not alone:
            of_host = crc32(t.numpy().tobytes(), of_host)
    alike = {
        "tag": save.tag,
        "tensors": digest([f"{n.partition('/')[2]} {s.dtype}{s.shape}" for n, s in saved.items()]),
        "values of no mesh": f"{crc32(json.dumps([of_host, values]).encode()):08x}",
    }
    storage = save.root if isinstance(save.root, Storage) else Storage(save.root)
    return Job(
        storage, save.tag, about, saved, blocks, policy, _WRITER.count, save.tell,
        leads=alone or process_index() == 0, alone=alone, alike=alike,
    )  # fmt: skip


def wait() -> None:
    """Returns when all saves are on disk. Raises CheckpointError if one has failed."""
    _WRITER.check(0)


def failures(wait: bool = False) -> list[tuple[str, TesseraError]]:
    """(tag, error) of saves that failed since the last call; with `wait`, after all pending ones.
    Their errors are then not raised by `save` or `wait`."""
    found = []
    while _WRITER.waiting and (wait or _WRITER.waiting[0][1].done()):
        tag, done = _WRITER.waiting.pop(0)
        try:
            done.result()
        except TesseraError as error:
            found.append((tag, error))
    return found


def pending() -> int:
    """The number of unfinished saves."""
    return sum(not done.done() for _, done in _WRITER.waiting)


# -- leaves of a save -----------------------------------------------------------------------------
def _leaves(tensors: Any, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, other values by name). Raises UsageError for a leaf that cannot be
    saved."""
    named, values = dict[str, Tensor](), dict[str, Any]()
    for kind, tree in (("tensors", tensors), ("optimizer", optimizer)):
        for name, x in leaves(kind, tree):
            if isinstance(x, (Tensor, np.ndarray, np.generic)) or hasattr(x, "__dlpack__"):
                _see_digits(name, x)
                named[name] = as_tensor(x)
            elif x is None or isinstance(x, (bool, int, float, str)):
                values[name] = x
            else:
                raise unfit("checkpoint.save", name, x, advice_of(tree, _instead(x)))
    return named, values


def _see_digits(name: str, x: Any) -> None:
    """Raises DTypeError if `x` is float64 and not exact in f32, in which it would be saved."""
    if isinstance(x, Tensor) or not str(getattr(x, "dtype", "")).endswith("float64"):
        return
    wide = np.asarray(x)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    if not np.array_equal(wide, narrow, equal_nan=True):
        raise DTypeError(
            f"checkpoint.save: {name} has digits of float64, and would be saved as f32",
            fix="round it first: x.astype(np.float32); a number is saved whole: float(x)",
        )


def _instead(x: object) -> str:
    """A fix for errors: a value to save in place of `x`."""
    if hasattr(x, "init") and hasattr(x, "update"):
        return "give the optimizer's state: what its init(weights) made, or the last step"
    if callable(getattr(x, "state_dict", None)):
        return "give what its state_dict() gives: tensors as tensors=, a position as state="
    return "save tensors, numbers and texts; give other things to state= as JSON"


def not_recorded(name: str) -> None:
    """Raises UsageError inside a recorded function."""
    if current() is not None:
        raise UsageError(
            f"{name}: inside of a compiled function it runs once, when that is recorded",
            fix="call it outside, with what the function returns",
        )


def no_folder(name: str, optimizer: object) -> None:
    """Raises UsageError if a folder is given as the optimizer's state."""
    if isinstance(optimizer, (str, os.PathLike)):
        raise unfit(name, "optimizer", optimizer, f"give a folder by name: root={str(optimizer)!r}")


def leaves(kind: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names: "tensors/blocks.0.up"."""
    if tree is None:
        return []
    tree = tree.state_dict() if isinstance(tree, Module) else tree
    names = ["/".join((kind, *map(str, path))) for path in paths(tree)]
    if len({*names}) < len(names):
        twice = next(n for n, count in Counter(names).items() if count > 1)
        raise UsageError(
            f"checkpoint: {twice!r} is the name of two values",
            fix='rename a key: a name has all keys on the way to a value, with "/" between them',
        )
    return [*zip(names, flatten(tree)[0], strict=True)]


def advice_of(tree: Any, otherwise: str) -> str:
    """A fix for errors, if a value of `tree` cannot be saved or does not fit: a module within a
    tree gives all its attributes, under other names than those of its weights."""
    inner = tree.values() if isinstance(tree, Mapping) else tree
    if isinstance(inner, (list, tuple)) or isinstance(tree, Mapping):
        for x in inner:
            if isinstance(x, Module):
                return "give the state_dict() of a module that is within a tree; a load fills it"
            otherwise = advice_of(x, otherwise)
    return otherwise


def _complete(t: Tensor) -> Tensor:
    to = t.type.complete()
    return t if to == t.type else redistribute_now(t, to)


def _json(state: Any) -> Any:
    odd: list[object] = []

    def unknown(x: object) -> None:
        odd.append(x)
        raise TypeError(f"it holds an object of type {type(x).__name__}")

    try:
        return json.loads(json.dumps(state, default=unknown))  # with NaN and inf, as metrics
    except (TypeError, ValueError) as error:
        what = f"checkpoint.save: state cannot be written as JSON: {error}"
        raise UsageError(what, fix=_as_json(*odd)) from None


def _as_json(x: object = None) -> str:
    """A fix for errors: a value in place of `x`, which JSON cannot represent."""
    if callable(getattr(x, "state_dict", None)):
        return "give what its state_dict() gives"
    return "give dicts, lists, texts and numbers; tensors go into tensors= or optimizer="
