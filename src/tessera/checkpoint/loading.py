"""Loading of checkpoints onto any mesh, in any layout: each device reads its own blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Timer
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.checks import unfit
from ..core.declared import Flag
from ..core.devices import process_count, process_index
from ..core.dtypes import DType, dtype_of
from ..core.errors import CheckpointError, UsageError, warn_no_effect
from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..core.wording import digest, nearest
from ..lang.math import random
from ..lang.math.create import tensor
from ..lang.parallel.flat_state import flat_states
from ..lang.record.box import Box, fits
from ..lang.record.offload import where_lies
from ..lang.record.operands import as_tensor
from ..lang.record.tree import flatten, tree_fill, unflatten
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from ..nn.module import Module
from ..nn.module_tree import put_buffer
from .listing import ROOT, Root, manifest_of, matches, named, patterns, reader
from .pieces import Reader
from .saving import advice_of, leaves, no_folder, not_recorded, wait
from .storage import Storage

if TYPE_CHECKING:
    from .manifest import Manifest

SHOWN_AFTER_S = 2.0  # a load that takes longer shows a bar


@dataclass(frozen=True)
class Checkpoint:
    """The result of `load`. `tensors` and `optimizer` are the trees that were given to it, filled,
    or dicts by name; `step`, `metrics` and `state` are as they were saved."""

    tag: str
    tensors: Any
    optimizer: Any
    step: int | None
    metrics: dict[str, float]
    state: Any
    manifest: Manifest
    _unread_trees: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """The trees that could not be filled in place and have not been read here yet."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("tensors", "optimizer"):
            object.__getattribute__(self, "_unread_trees").discard(name)
        return object.__getattribute__(self, name)

    def __getitem__(self, name: object) -> NoReturn:
        raise UsageError(
            "checkpoint.load gives one value, which is no dict and no tuple",
            fix="write found = checkpoint.load(...), then found.tensors, found.optimizer",
        )

    def __del__(self) -> None:
        for name in () if sys.is_finalizing() else self.__dict__.get("_unread_trees", ()):
            warn_no_effect(
                f"checkpoint.load: {name}",
                "what it was given cannot be changed, and what was loaded was never read",
                means="what was given has the values of before",
                fix=f"write {name} = checkpoint.load(...).{name}, or give a dict",
            )


def load(
    tag: str | None = None,
    tensors: Any = None,
    optimizer: Any = None,
    root: Root = ROOT,
    *,
    only: str | Sequence[str] | None = None,
    dtype: Any = None,
    restore_random: Flag = True,
) -> Checkpoint:
    """The checkpoint `tag` below `root`; without a tag the latest complete one.

    `tensors` (a module or a tree of tensors) and `optimizer` (a tree) give the targets: each tensor
    is loaded in the layout, on the mesh and in the dtype of the one at its place (in host memory if
    that one is there), and each process reads only the blocks that its devices hold. Without them
    the results are dicts by name, whose tensors have no mesh.

    The targets are filled: modules, weights, dicts, lists and dataclasses have the new values
    afterwards; so does a model, through its `parameters()` or its `state_dict()`, and a graph
    function, through its `.parameters`. A tuple, a frozen dataclass or a single tensor cannot
    change: the new one is only in the result, and an OptionWarning is given if it is not read
    there.

    `only` are patterns of names, such as "blocks.*"; all other tensors are unchanged. `dtype` is
    the dtype of all floats. With `restore_random` the state of the random generator is restored.
    Raises CheckpointError, with the names, if the checkpoint does not exist, is damaged or does not
    fit.
    """
    not_recorded("checkpoint.load")
    no_folder("checkpoint.load", optimizer)
    want = None if dtype is None else dtype_of(dtype)
    if want is not None and not want.is_float:
        raise unfit("checkpoint.load", "dtype", dtype, "it is that of all floats: give one of them")
    wait()
    storage = Storage(root)
    asked = () if only is None else patterns("checkpoint.load", only)

    def run() -> Checkpoint:
        return loaded(storage, named(storage, tag), tensors, optimizer, asked, want, restore_random)

    return run() if process_count() == 1 else _in_all(run, tensors, optimizer)


def _in_all(run: Callable[[], Checkpoint], tensors: Any, optimizer: Any) -> Checkpoint:
    """Returns the result of `run()`. Raises CheckpointError in all processes of a mesh if one of
    them cannot read its blocks, so that a fallback to an earlier checkpoint happens in all of
    them."""
    checkpoint, wrong = None, None
    try:
        checkpoint = run()
    except CheckpointError as error:
        wrong = error
    rows = [*leaves("tensors", tensors), *leaves("optimizer", optimizer)]
    for mesh in _meshes(rows):
        told = "; ".join(line.strip() for line in str(wrong or "none").splitlines()[:4])
        try:
            fix = "mend it, or load an earlier one in all of them"
            engine().alike("checkpoint.load", mesh, {"error": told}, fix)
        except UsageError as error:
            wrong = wrong or CheckpointError(str(error), at="")
    if wrong is not None:
        raise wrong
    assert checkpoint is not None
    return checkpoint


def _meshes(rows: Sequence[tuple[str, Any]]) -> list[Mesh]:
    """The meshes of the tensors among `rows`, each once."""
    every = dict.fromkeys(x.mesh for _, x in rows if isinstance(x, Tensor))
    return [mesh for mesh in every if mesh is not None]


def loaded(
    storage: Storage,
    tag: str,
    tensors: Any,
    optimizer: Any,
    only: Sequence[str] = (),
    want: DType | None = None,
    restore_random: bool = True,
    fill: bool = True,
) -> Checkpoint:
    """`load` for a storage and a tag; `want` is the dtype of all floats. Without `fill` only a
    module is filled, and other trees are new in the result."""
    manifest = manifest_of(storage, tag)
    _see_patterns(manifest, only)
    read = _Read(manifest, reader(storage, manifest), only, want, fill)
    trees = {"tensors": tensors, "optimizer": optimizer}
    rows = {kind: read.rows(kind, like) for kind, like in trees.items()}
    for kind, pairs in rows.items():
        if only and pairs and not any(read.wanted(name) for name, _ in pairs):
            warn_no_effect(
                f"checkpoint.load: {kind}",
                f"only={[*only]} names nothing of it",
                means="what was given has the values of before",
                fix=f"leave it out, or name a part of it too, such as {pairs[0][0]!r}",
            )
    if process_count() > 1:
        _see_alike(read, [row for pairs in rows.values() for row in pairs])
    with read.bar:
        new = {kind: read.tree(kind, like, rows[kind]) for kind, like in trees.items()}
    if restore_random:
        random.set_state(manifest.random)
    lost = {k for k, like in trees.items() if fill and like is not None and new[k] is not like}
    checkpoint = Checkpoint(
        manifest.tag, new["tensors"], new["optimizer"], manifest.step, manifest.metrics,
        manifest.state, manifest,
    )  # fmt: skip
    checkpoint._unread_trees.update(lost)
    for flat in flat_states([*trees.values()] if fill else []):
        flat.unread = True
    return checkpoint


def _see_patterns(manifest: Manifest, only: Sequence[str]) -> None:
    """Raises UsageError for a pattern that matches no name."""
    names = [*manifest.tensors, *manifest.values]
    for p in only:
        if not any(matches(name, [p]) for name in names):
            bare = [name.partition("/")[2] for name in names]
            raise UsageError(
                f"checkpoint.load: only: no name in {manifest.tag!r} is like {p!r}",
                names=nearest(p, bare, 3),
                fix='a name as it is, or with "*" for any letters: only="blocks.*"',
            )


def _see_alike(read: _Read, rows: Sequence[tuple[str, Any]]) -> None:
    """Raises UsageError if the processes of a mesh would load different checkpoints or names."""
    facts = {
        "checkpoint": f"{read.manifest.tag} (id {read.manifest.id})",
        "names": digest([name.partition("/")[2] for name, _ in rows if read.wanted(name)]),
    }
    fix = "name the same tag and names in all of them, in a folder that all see"
    for mesh in _meshes(rows):
        engine().alike("checkpoint.load", mesh, facts, fix)


def _put(old: Any, new: Any) -> Any:
    """The replacement of the leaf `old`: a weight itself, filled with `new`, or else `new`. A
    module or graph function that holds `old` as a weight or buffer gets the new value too."""
    if new is old or not isinstance(old, Tensor):
        return new
    if isinstance(old, Box):
        old.put(new)
        return old
    if new.dtype is old.dtype:
        if isinstance(old.box, Box) and old.box.now() is old:
            old.box.put(new)
        put_buffer(old, new)
    return new


class _Bar:
    """A progress bar of `total` bytes, shown only after a while, with progress within tensors; only
    the first process shows it."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._shown = Progress(console=Console(stderr=True, quiet=process_index() > 0))
        self._task = self._shown.add_task("checkpoint: loading", total=total)
        self._later = Timer(SHOWN_AFTER_S, self._shown.start)
        self._later.daemon = True

    def __enter__(self) -> None:
        self._later.start()

    def __exit__(self, *_: object) -> None:
        self._later.cancel()
        self._later.join()
        if self._shown.live.is_started:
            self._shown.stop()

    def add(self, nbytes: int) -> None:
        self._shown.advance(self._task, nbytes)


class _Read:
    def __init__(
        self,
        manifest: Manifest,
        source: Reader,
        only: Sequence[str],
        want: DType | None,
        fill: bool,
    ) -> None:
        self.manifest, self.source, self.only, self.want = manifest, source, only, want
        self.fill = fill
        self.bar = _Bar(sum(t.nbytes for n, t in manifest.tensors.items() if self.wanted(n)))

    def rows(self, kind: str, like: Any) -> Sequence[tuple[str, Any]]:
        """(name, leaf) of each leaf of `like`. Raises CheckpointError if they do not fit the
        checkpoint."""
        found: Sequence[tuple[str, Any]] = leaves(kind, like)
        if isinstance(like, Module):
            found = self._of_all_names(kind, like, found)
        if like is not None:
            fix = 'give what it was saved from, or load a part: only="blocks.*"'
            if kind == "optimizer":
                fix = (
                    "give the state as it was saved; for another optimizer or dtype load the model"
                    " alone, then state = optimizer.init(model)"
                )
            self._see_names(kind, found, advice_of(like, fix))
        return found

    def _of_all_names(
        self, kind: str, like: Module, rows: Sequence[tuple[str, Any]]
    ) -> Sequence[tuple[str, Any]]:
        """`rows`, with a tensor of several names under those that the checkpoint has."""
        also: dict[int, list[str]] = {}
        for name, p in (
            *like.named_parameters(remove_duplicate=False),
            *like.named_buffers(remove_duplicate=False),
        ):
            also.setdefault(id(p), []).append(f"{kind}/{name}")
        by_name = {n: names for names in also.values() for n in names}
        found = []
        for name, x in rows:
            here = [n for n in by_name.get(name, ()) if n in self.manifest.tensors]
            found += [(n, x) for n in here or [name]]
        return found

    def tree(self, kind: str, like: Any, rows: Sequence[tuple[str, Any]]) -> Any:
        if like is None:
            return self._by_name(kind)
        new = [self._leaf(name, x) for name, x in rows]
        if isinstance(like, Module):
            self._see_dtypes(
                [(n, x.box if isinstance(x, Tensor) and x.box is not None else x) for n, x in rows],
                new,
            )
            like.load_state_dict({n.partition("/")[2]: x for (n, _), x in zip(rows, new)})
            return like
        if not self.fill:
            return unflatten(flatten(like)[1], new)
        self._see_dtypes(rows, new)
        return tree_fill(like, iter([_put(x, value) for (_, x), value in zip(rows, new)]))

    def _see_dtypes(self, rows: Sequence[tuple[str, Any]], new: Sequence[Any]) -> None:
        """Raises DTypeError if a weight would get another dtype."""
        for (name, x), value in zip(rows, new):
            if isinstance(x, Box) and isinstance(value, Tensor):
                fits(f"checkpoint.load: {name}", x, value, "leave dtype= out, or load by name")

    def _by_name(self, kind: str) -> Any:
        """A dict by name, or the value itself if the tree was saved as a single leaf."""
        found: dict[str, Any] = {}
        for name in (*self.manifest.tensors, *self.manifest.values):
            _, _, bare = name.partition("/")
            if name.partition("/")[0] != kind or not self.wanted(name):
                continue
            if name in self.manifest.values:
                found[bare] = self.manifest.values[name]
                continue
            saved = self.manifest.tensors[name]
            found[bare] = tensor(self.source.read(name, dtype=self._dtype(saved.kind)))
            self.bar.add(saved.nbytes)
        return found.get("", found)

    def wanted(self, name: str) -> bool:
        return not self.only or matches(name, self.only)

    def _dtype(self, kind: DType) -> DType:
        return self.want if self.want is not None and kind.is_float else kind

    def _see_names(self, kind: str, rows: Sequence[tuple[str, Any]], fix: str) -> None:
        """Raises CheckpointError that lists names that are missing, not asked for, or of another
        shape."""
        have = {n for n in (*self.manifest.tensors, *self.manifest.values) if self.wanted(n)}
        asked = {name: x for name, x in rows if self.wanted(name)}
        wrong = [*self._misfits(asked, have)]
        more = (n for n in have - asked.keys() if n.partition("/")[0] == kind)
        wrong += [(n, "is not asked for") for n in more]
        if wrong:
            raise CheckpointError(
                f"checkpoint.load: {len(wrong)} of {kind} do not fit {self.manifest.tag!r}",
                rows=[(n.partition("/")[2] or n, why) for n, why in sorted(wrong)[:5]],
                fix=fix,
            )

    def _misfits(self, asked: dict[str, Any], available: set[str]) -> Iterator[tuple[str, str]]:
        for name, x in asked.items():
            if name not in available:
                yield name, "is not in the checkpoint"
            elif name in self.manifest.tensors:
                shape = tuple(self.manifest.tensors[name].shape)
                if getattr(x, "shape", None) != shape:
                    yield name, f"has shape {shape}, not {getattr(x, 'shape', 'that of a number')}"
            elif hasattr(x, "shape"):
                yield name, f"is {self.manifest.values[name]!r}, and no tensor"

    def _leaf(self, name: str, like: Any) -> Any:
        if not self.wanted(name):
            return like
        if name in self.manifest.values:
            return self.manifest.values[name]
        saved, base = self.manifest.tensors[name], as_tensor(like).type
        to = base.with_dtype(self._dtype(base.dtype))
        if to.dtype.is_float != saved.kind.is_float:
            raise UsageError(
                f"checkpoint.load: {name} was saved as {saved.dtype}, and cannot be {to.dtype}",
                fix="give a tensor of its kind",
            )
        made = where_lies(like, Tensor(self._data(name, to), to))
        self.bar.add(saved.nbytes)
        return made

    def _data(self, name: str, to: TensorType) -> Any:
        return engine().place_blocks(partial(self.source.fill, name), to)
