"""How does a copy of a program's state become a checkpoint on the disk, whole or not at all?

The data of all processes are on the disk before the first one writes the manifest, which makes the
checkpoint be there; only then do older ones go.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..core.devices import process_count, process_index
from ..core.errors import BackendError, CheckpointError, TesseraError
from ..core.limits import limits
from ..core.wording import differences
from ..ir.graph.text import size_text
from ..lang.engine import engine
from .listing import Keep, manifests, metrics_text, remove, remove_rest
from .names import NAME
from .pieces import Block, files
from .storage import Storage, together

if TYPE_CHECKING:
    from .manifest import Manifest, Piece, Saved

LIMIT_S = 600.0
"""How long a process may take to write its part."""
SEEN_S = 10.0
"""How long a file that was written may take to be seen by the first process."""
Tell = Callable[[str], None]


@dataclass
class Job:
    """A save, copied to the host: the blocks of this process, and what the manifest says."""

    storage: Storage
    tag: str
    about: dict[str, Any]
    tensors: dict[str, Saved]
    blocks: dict[str, list[Block]]
    keep: Keep | None
    number: int
    tell: Tell | None
    stall_s: float = 0.0
    created_s: float = field(default_factory=time.time)
    leads: bool = field(default_factory=lambda: process_index() == 0)
    """Whether this process writes what is in `storage` once."""
    alone: bool = field(default_factory=lambda: process_count() == 1)
    """Whether no other process has a part of it."""
    alike: dict[str, Any] = field(default_factory=dict)
    """What all processes must say alike."""
    spread: Callable[[dict[str, tuple[int, int]]], None] | None = None
    """Gives the files of all, by key with their process and their bytes, to other storages."""
    there: bool = False
    """Whether it may be that the manifest is written."""


def written(job: Job) -> None:
    """Writes a save. One that fails leaves nothing behind: a disk that is full is not fuller."""
    begin_s = time.perf_counter()
    path = f"checkpoint/{job.number}"
    mine: dict[str, Any] = {"id": secrets.token_hex(6), "created_s": job.created_s, "error": ""}
    mine["alike"] = job.alike
    with ExitStack() as stack:
        try:
            if job.leads:
                found, _ = manifests(job.storage)
                _see_others(job, found)
                mine["sequence"] = 1 + max((m.sequence for m in found), default=0)
                job.storage.make(job.tag)
                stack.enter_context(job.storage.held(job.tag))
        except TesseraError as error:
            mine["error"] = str(error)
        said = _agree(job, path + "/begin", mine, limits().collective_s)
        _see_alike(job, said)
        first = said[0]
        try:
            made = _published(job, path, first)
        except TesseraError:
            if not job.there:
                _left(job, first["id"])
            raise
        if job.leads:
            _after(job, made, time.perf_counter() - begin_s)


def _published(job: Job, path: str, first: dict[str, Any]) -> Manifest:
    """Writes the data of all processes, then the manifest, which is the result."""
    from .manifest import Manifest, Piece

    id = first["id"]
    pieces: list[tuple[str, Piece]] = []
    mine: dict[str, Any] = {"error": ""}
    try:
        pieces = _data(job, id)
        mine["pieces"] = [(name, p.model_dump()) for name, p in pieces]
    except TesseraError as error:
        mine["error"] = str(error)
    writers: dict[str, int] = {}
    for rank, part in enumerate(_agree(job, path + "/data", mine)):
        for name, piece in part["pieces"]:
            job.tensors[name].pieces.append(Piece(**piece))
            writers[piece["file"]] = rank
    mine = {"error": ""}
    made = Manifest(
        id=id, sequence=first["sequence"], created_s=first["created_s"], tensors=job.tensors,
        **job.about,
    )  # fmt: skip
    if job.spread is not None:
        try:
            sizes = made.files().items()
            job.spread({f"{job.tag}/{file}": (writers[file], n) for file, n in sizes})
        except TesseraError as error:
            mine["error"] = str(error)
        _agree(job, path + "/spread", mine)
    job.there = True  # for all that this process knows
    mine["there"] = job.leads
    try:
        if job.leads:
            if job.spread is None:
                _see_files(job, made, writers)
            job.storage.write(f"{job.tag}/{NAME}", made.to_json())
    except TesseraError as error:
        mine = {"error": str(error), "there": _may_be_there(job, id)}
    said = _said(job, path + "/end", mine)
    job.there = any(s["there"] for s in said)
    _see_errors(said)
    if job.alone:
        _MINE.add(id)
    return made


def _may_be_there(job: Job, id: str) -> bool:
    """Whether the manifest that could not be written may have been, all the same."""
    try:
        return id.encode() in (job.storage.read(f"{job.tag}/{NAME}") or b"")
    except TesseraError:
        return True


def _left(job: Job, id: str) -> None:
    """The data of a save that has failed go, as far as they can."""
    with suppress(TesseraError):
        begins = f"{job.tag}/data-{id}-"
        job.storage.delete(k for k in job.storage.listed() if k.startswith(begins))
        job.storage.tidy(job.tag)


def _data(job: Job, id: str) -> list[tuple[str, Piece]]:
    """Writes the blocks of this process; their pieces."""
    found: list[tuple[str, Piece]] = []
    made = files(id, process_index(), job.blocks)
    while several := [*islice(made, 4)]:
        jobs = [partial(job.storage.write, f"{job.tag}/{file}", data) for file, data, _ in several]
        together(jobs)
        found += [p for _, _, own in several for p in own]
    job.blocks.clear()
    return found


_BEGAN_S = time.time()
_MINE: set[str] = set()  # ids of what this process has saved by itself


def _see_others(job: Job, found: Sequence[Manifest]) -> None:
    """Raises CheckpointError where another process of the run has saved what this one would, each
    by itself."""
    if not job.alone or process_count() == 1:
        return
    if any(m.tag == job.tag and m.created_s > _BEGAN_S and m.id not in _MINE for m in found):
        raise CheckpointError(
            f"checkpoint.save: another process of this run has saved {job.tag!r} there",
            root=job.storage.name,
            fix="tensors on a mesh of one process are that one's: give each a root of its own",
            at="",
        )


def _see_alike(job: Job, said: Sequence[dict[str, Any]]) -> None:
    """Raises CheckpointError, in all processes, where they save different things as one."""
    rows = differences({rank: s["alike"] for rank, s in enumerate(said)})
    if rows:
        if job.leads:  # it alone keeps others out of the folder that it made
            _left(job, said[0]["id"])
        raise CheckpointError(
            "checkpoint.save: the processes save one checkpoint, and differ in what it is",
            rows=rows,
            fix="give the same tag and the same tensors in all of them, with numbers that are alike"
            " (a name of the time, or of the process, differs)",
            at="",
        )


def _see_files(job: Job, made: Manifest, writers: Mapping[str, int]) -> None:
    """Raises CheckpointError unless the first process sees the data that others wrote."""
    if job.storage.folder is None:
        return
    end_s = time.monotonic() + SEEN_S
    for file in made.files():
        while not (job.storage.folder / job.tag / file).is_file():
            if time.monotonic() > end_s:
                raise CheckpointError(
                    f"checkpoint.save: {file} of {job.tag!r} is not where the first process writes",
                    rows=[("rank 0", job.storage.folder), (f"rank {writers[file]}", "wrote it")],
                    fix="give all processes one root, in a folder that all hosts see",
                    at="",
                )
            time.sleep(0.1)


def _agree(
    job: Job, path: str, mine: dict[str, Any], limit_s: float = LIMIT_S
) -> Sequence[dict[str, Any]]:
    """What all processes say. Raises CheckpointError, in all of them, if one has failed."""
    said = _said(job, path, mine, limit_s)
    _see_errors(said)
    return said


def _said(
    job: Job, path: str, mine: dict[str, Any], limit_s: float = LIMIT_S
) -> Sequence[dict[str, Any]]:
    if job.alone:
        return [mine]
    try:
        return engine().gather(path, mine, limit_s)
    except BackendError as error:
        raise BackendError(
            f"save: {str(error).splitlines()[0]}",
            fix="call it in every process, not in the first alone: each writes what its devices"
            " hold; if all did, see what that rank did last",
        ) from None


def _see_errors(said: Sequence[dict[str, Any]]) -> None:
    wrong = [(rank, s["error"]) for rank, s in enumerate(said) if s["error"]]
    if wrong:
        rank, error = wrong[0]
        lines = error.splitlines()
        raise CheckpointError(
            error if len(said) == 1 else "\n".join([f"rank {rank}: {lines[0]}", *lines[1:]])
        )


def _after(job: Job, made: Manifest, took_s: float) -> None:
    """The new checkpoint is on the disk: what it replaces goes."""
    remove_rest(job.storage, job.tag, made)
    if job.keep is not None:
        found, _ = manifests(job.storage)
        stay = job.keep.stay(found) | {job.tag}
        gone = [m.tag for m in found if m.tag not in stay]
        for tag in gone:
            remove(job.storage, tag)
        if gone and job.keep.best and job.tell is not None and not job.keep.rated(found):
            job.tell(
                f"checkpoint: {', '.join(gone)} went: none has the metric {job.keep.metric!r},"
                f" by which best={job.keep.best} stay; there are: {metrics_text(found)}"
            )
    if job.tell is not None:
        job.tell(
            f"checkpoint: {job.tag} is saved in {job.storage.name}: {size_text(made.nbytes)} in"
            f" {took_s:.1f} s; training waited {job.stall_s * 1e3:.0f} ms"
        )
