"""Writing of a checkpoint to disk, complete or not at all.

The data of all processes are on disk before the first one writes the manifest, which makes the
checkpoint complete; only then are older ones removed.
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
from ..lang.value.engine import engine
from .listing import Keep, manifests, metrics_text, remove, remove_leftovers
from .names import NAME
from .pieces import Block, files
from .storage import Storage, together

if TYPE_CHECKING:
    from .manifest import Manifest, Piece, Saved

LIMIT_S = 600.0
"""The time limit for a process to write its part."""
VISIBLE_FILES_S = 10.0
"""The time limit for a written file to become visible to the first process."""
Tell = Callable[[str], None]


@dataclass
class Job:
    """A save, copied to the host: the blocks of this process, and the facts for the manifest."""

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
    """True if this process writes the files that `storage` has once."""
    alone: bool = field(default_factory=lambda: process_count() == 1)
    """True if no other process has a part of it."""
    alike: dict[str, Any] = field(default_factory=dict)
    """The facts that must be equal in all processes."""
    spread: Callable[[dict[str, tuple[int, int]]], None] | None = None
    """Copies the files of all processes, by key with their process and bytes, to other storages."""
    may_be_written: bool = False
    """True once the manifest may have been written."""


def written(job: Job) -> None:
    """Writes a save. A failed save leaves no files, so that it does not fill the disk."""
    begin_s = time.perf_counter()
    path = f"checkpoint/{job.number}"
    mine: dict[str, Any] = {"id": secrets.token_hex(6), "created_s": job.created_s, "error": ""}
    mine["alike"] = job.alike
    with ExitStack() as stack:
        try:
            if job.leads:
                manifests_before, _ = manifests(job.storage)
                _see_others(job, manifests_before)
                mine["sequence"] = 1 + max((m.sequence for m in manifests_before), default=0)
                job.storage.make(job.tag)
                stack.enter_context(job.storage.held(job.tag))
        except TesseraError as error:
            mine["error"] = str(error)
        reports = _agree(job, path + "/begin", mine, limits().collective_s)
        _see_alike(job, reports)
        first = reports[0]
        try:
            manifest = _published(job, path, first)
        except TesseraError:
            if not job.may_be_written:
                _delete_failed_save(job, first["id"])
            raise
        if job.leads:
            _after(job, manifest, time.perf_counter() - begin_s)


def _published(job: Job, path: str, first: dict[str, Any]) -> Manifest:
    """Writes the data of all processes, then the manifest, and returns it."""
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
    manifest = Manifest(
        id=id, sequence=first["sequence"], created_s=first["created_s"], tensors=job.tensors,
        **job.about,
    )  # fmt: skip
    if job.spread is not None:
        try:
            sizes = manifest.files().items()
            job.spread({f"{job.tag}/{file}": (writers[file], n) for file, n in sizes})
        except TesseraError as error:
            mine["error"] = str(error)
        _agree(job, path + "/spread", mine)
    job.may_be_written = True  # for all that this process knows
    mine["there"] = job.leads
    try:
        if job.leads:
            if job.spread is None:
                _see_files(job, manifest, writers)
            job.storage.write(f"{job.tag}/{NAME}", manifest.to_json())
    except TesseraError as error:
        mine = {"error": str(error), "there": _may_be_written(job, id)}
    reports = _gathered(job, path + "/end", mine)
    job.may_be_written = any(s["there"] for s in reports)
    _see_errors(reports)
    if job.alone:
        _MINE.add(id)
    return manifest


def _may_be_written(job: Job, id: str) -> bool:
    """Returns whether the manifest may have been written in spite of an error."""
    try:
        return id.encode() in (job.storage.read(f"{job.tag}/{NAME}") or b"")
    except TesseraError:
        return True


def _delete_failed_save(job: Job, id: str) -> None:
    """Deletes the data of a failed save, as far as possible."""
    with suppress(TesseraError):
        begins = f"{job.tag}/data-{id}-"
        job.storage.delete(k for k in job.storage.listed() if k.startswith(begins))
        job.storage.tidy(job.tag)


def _data(job: Job, id: str) -> list[tuple[str, Piece]]:
    """Writes the blocks of this process and returns their pieces."""
    found: list[tuple[str, Piece]] = []
    made = files(id, process_index(), job.blocks)
    while several := [*islice(made, 4)]:
        jobs = [partial(job.storage.write, f"{job.tag}/{file}", data) for file, data, _ in several]
        together(jobs)
        found += [p for _, _, own in several for p in own]
    job.blocks.clear()
    return found


_BEGAN_S = time.time()
_MINE: set[str] = set()  # ids of saves of this process alone


def _see_others(job: Job, manifests: Sequence[Manifest]) -> None:
    """Raises CheckpointError if another process of the run has saved the same tag alone."""
    if not job.alone or process_count() == 1:
        return
    if any(m.tag == job.tag and m.created_s > _BEGAN_S and m.id not in _MINE for m in manifests):
        raise CheckpointError(
            f"checkpoint.save: another process of this run has saved {job.tag!r} there",
            root=job.storage.name,
            fix="tensors on a mesh of one process are that one's: give each a root of its own",
            at="",
        )


def _see_alike(job: Job, reports: Sequence[dict[str, Any]]) -> None:
    """Raises CheckpointError, in all processes, if they save different things as one checkpoint."""
    rows = differences({rank: s["alike"] for rank, s in enumerate(reports)})
    if rows:
        if job.leads:  # it alone keeps others out of the folder that it made
            _delete_failed_save(job, reports[0]["id"])
        raise CheckpointError(
            "checkpoint.save: the processes save one checkpoint, and differ in what it is",
            rows=rows,
            fix="give the same tag and the same tensors in all of them, with numbers that are alike"
            " (a name of the time, or of the process, differs)",
            at="",
        )


def _see_files(job: Job, manifest: Manifest, writers: Mapping[str, int]) -> None:
    """Raises CheckpointError unless the first process sees the files that others wrote."""
    if job.storage.folder is None:
        return
    end_s = time.monotonic() + VISIBLE_FILES_S
    for file in manifest.files():
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
    """The reports of all processes. Raises CheckpointError, in all of them, if one has failed."""
    said = _gathered(job, path, mine, limit_s)
    _see_errors(said)
    return said


def _gathered(
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


def _see_errors(reports: Sequence[dict[str, Any]]) -> None:
    wrong = [(rank, s["error"]) for rank, s in enumerate(reports) if s["error"]]
    if wrong:
        rank, error = wrong[0]
        lines = error.splitlines()
        raise CheckpointError(
            error if len(reports) == 1 else "\n".join([f"rank {rank}: {lines[0]}", *lines[1:]]),
            at="",
        )


def _after(job: Job, manifest: Manifest, took_s: float) -> None:
    """Removes what the new checkpoint replaces, once it is on disk."""
    remove_leftovers(job.storage, job.tag, manifest)
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
            f"checkpoint: {job.tag} is saved in {job.storage.name}: {size_text(manifest.nbytes)} in"
            f" {took_s:.1f} s; training waited {job.stall_s * 1e3:.0f} ms"
        )
