"""Records of the autotuner: JSON lines in a folder that any number of processes share.

Each process appends to a file of its own, so no line is lost if one is killed. Three kinds of lines
share the `id` of a program: its key (arch, dtype, shape, layout, program, backend, versions), one
sample of a candidate's seconds or its error, and the choice. Lines that cannot be read, and those
of other versions, stay in the files and have no effect.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     records = Records(Path(folder))
...     records.add("0a1b", key={"arch": "cpu"})
...     records.add("0a1b", choices={"block_rows": 256}, time_s=0.5)
...     records.add("0a1b", chosen={"block_rows": 256}, gain=1.2, timed=4)
...     records.close()
...     Records(Path(folder)).choice("0a1b")["chosen"]
{'block_rows': 256}
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

from ..core.files import write_whole
from ..core.value_checks import is_number, is_whole
from .choices import Candidate, Timing, is_known

VERSION = 1
MOST_FILES = 16  # more files than this are merged
_MERGED, _LOCK = "merged.jsonl", ".lock"


def id_of(key: Mapping[str, Any]) -> str:
    """Returns the id of a program: a hash of its key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


class Records:
    """The records in `folder`, which is created at the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[bytes] | None = None

    def lines(self) -> Iterator[bytes]:
        """Yields each line of all files."""
        for _ in range(3):  # another process may merge the files that are listed
            try:
                texts = [p.read_bytes() for p in sorted(self.folder.glob("*.jsonl"))]
                break
            except FileNotFoundError:
                continue
        else:
            texts = []
        for text in texts:
            yield from text.split(b"\n")

    def rows(self, id: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the valid lines, oldest first; with `id` those of one program."""
        mark = b"" if id is None else id.encode()
        found = [
            row for line in dict.fromkeys(self.lines()) if mark in line and (row := _row(line))
        ]
        for row in sorted(found, key=lambda row: row["at"]):
            if id in (None, row["id"]):
                yield row

    def choice(self, id: str) -> dict[str, Any] | None:
        """Returns the latest line with the choice for the program `id`; None without one."""
        rows = [row for row in self.rows(id) if "chosen" in row]
        return rows[-1] if rows else None

    def timings(self, id: str) -> tuple[Timing, ...]:
        """Returns the candidates of the program `id` that were timed, with all their samples."""
        times: dict[str, list[float]] = defaultdict(list)
        for row in self.rows(id):
            if "time_s" in row:
                times[json.dumps(row["choices"])].append(row["time_s"])
        chosen = json.dumps((self.choice(id) or {}).get("chosen"))
        return tuple(
            Timing(json.loads(name), statistics.median(s), None, "", name == chosen)
            for name, s in times.items()
        )

    def failed(self, id: str) -> list[Candidate]:
        """Returns the candidates of the program `id` that failed before."""
        return [row["choices"] for row in self.rows(id) if row.get("error")]

    def add(self, id: str, **row: Any) -> None:
        """Appends a line. Raises OSError if the folder cannot be written."""
        if self._file is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len([*self.folder.glob("*.jsonl")]) > MOST_FILES:
                self.merge()
            name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.jsonl"
            begun = self.folder / f"{name}.part"
            self._file = begun.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # until the process ends: merges leave it out
            begun.rename(self.folder / name)
        line = {"v": VERSION, "id": id, "at": time.time(), **row}
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Closes the file of this process; a later line begins another one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def merge(self) -> None:
        """Moves the lines of files whose processes have ended to one file. At any moment each line
        is in at least one file."""
        with contextlib.ExitStack() as held:
            lock = held.enter_context(open(self.folder / _LOCK, "ab"))
            if not _locks(lock):
                return  # another process merges
            ended = []
            for path in self.folder.glob("*.jsonl"):
                file = held.enter_context(open(path, "rb"))
                if path.name != _MERGED and _locks(file):
                    ended.append(path)
            texts = [p.read_bytes() for p in (self.folder / _MERGED, *ended) if p.exists()]
            lines = dict.fromkeys(line for text in texts for line in text.split(b"\n") if line)
            write_whole(self.folder / _MERGED, b"\n".join(lines) + b"\n")
            for path in ended:
                path.unlink()

    def clear(self) -> int:
        """Deletes the files whose processes have ended, and returns the number of programs that
        had a choice."""
        if not self.folder.is_dir():
            return 0
        count = len({row["id"] for row in self.rows() if "chosen" in row})
        self.merge()
        (self.folder / _MERGED).unlink(missing_ok=True)
        return count

    def table(self) -> list[dict[str, Any]]:
        """Returns the choice of each program, with its key: the rows of `tessera tune --list`."""
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for row in self.rows():
            found[row["id"]].update(
                {k: row[k] for k in ("key", "chosen", "gain", "timed") if k in row}
            )
        return [{"id": id, **row} for id, row in found.items() if {"key", "chosen"} <= row.keys()]


@cache
def records_in(folder: Path) -> Records:
    """Returns the records in `folder` that this process appends to one file."""
    records = Records(folder)
    atexit.register(records.close)
    return records


def _locks(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("id", "error", "pruned"), lambda x: isinstance(x, str)),
    **dict.fromkeys(("at", "time_s", "gain"), is_number),
    **dict.fromkeys(("choices", "chosen"), is_known),
    "key": lambda x: isinstance(x, dict),
    "timed": is_whole,
}


def _row(line: bytes) -> dict[str, Any] | None:
    """Returns the contents of a line; None if it is damaged or of another version."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or row.get("v") != VERSION or not {"id", "at"} <= row.keys():
        return None
    whole = {"time_s": "choices", "error": "choices", "chosen": "gain", "gain": "timed"}
    if any(field in row and other not in row for field, other in whole.items()):
        return None
    return row if all(_FIELDS[k](v) for k, v in row.items() if k in _FIELDS) else None
