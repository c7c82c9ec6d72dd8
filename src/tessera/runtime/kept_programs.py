"""Where do compiled programs outlive their process? In a folder of the user, so that a second start
of the same program does not compile it again.

Which program is the same says the engine's own key: its instructions, flags, options, version and
devices. To that comes the processor, as folders may be shared by machines that differ. What is read
is code that this process will run: nobody else may write into the folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
import warnings
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax

from ..core import environment
from ..core.errors import EngineWarning, lines_up
from ..core.files import write_whole
from .compile_once import processor
from .jax_private import keep_programs

MOST_BYTES = 2 << 30
LEAST_S = 0.1  # what compiles faster is not kept
_STALE_S = 3600.0  # how old a file must be that some process began to write, and left
_NAME, _BEGUN = ".program", ".program.part-"


@cache
def folder() -> KeptPrograms | None:
    """The folder that `TESSERA_PROGRAM_CACHE` says; from now on programs are looked up, and kept,
    there. None where it is off, or where the user has named one to jax."""
    named = environment.text(environment.PROGRAM_CACHE)
    off = named.lower() in environment.OFF
    theirs = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if off or theirs or jax.default_backend() not in ("cpu", "gpu"):
        return None
    try:
        place = _own(Path(named).expanduser() if named else _default())
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where home is
        _warn(named, f"{error}; name a folder of your own, or set it to 0")
        return None
    most = environment.number(environment.PROGRAM_CACHE_BYTES, MOST_BYTES)
    kept = KeptPrograms(place, most)
    if not keep_programs(kept, LEAST_S):
        other = f"jax {jax.__version__} keeps them in another way"
        _warn(named, f"{other}; JAX_COMPILATION_CACHE_DIR names a folder to jax itself")
    return kept


def _warn(named: str, why: str) -> None:
    """Says why no programs are kept, where the user has named a folder for them."""
    if named:
        warnings.warn(
            f"{environment.PROGRAM_CACHE}: no programs are kept in {named!r}: {why}",
            EngineWarning,
            stacklevel=lines_up(),
        )


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tessera" / "programs"


def _own(folder: Path) -> Path:
    """`folder`, made where it is missing. Raises OSError where others may write into it, or where
    this process may not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = folder.stat()
    if there.st_uid != os.getuid() or there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others may write into it, and what lies there is run")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError("it is not writable")
    return folder


class KeptPrograms:
    """Bytes by key in `folder`, at most `most_bytes` of them: the least recently used go first.

    Any number of processes may share it, and each may be killed at any moment: a file is there as a
    whole or not at all, and one whose bytes have changed is none.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._path = folder  # as jax names it
        self.most_bytes = most_bytes
        self._written = most_bytes  # since it was last counted: the first time, at once

    def get(self, key: str) -> bytes | None:
        path = self._at(key)
        try:
            found = path.read_bytes()
            sum_, data = found[:4], found[4:]
            if sum_ != _sum(data):
                path.unlink()
                return None
            os.utime(path)
        except OSError:
            return None
        return data

    def put(self, key: str, value: bytes) -> None:
        if len(value) > self.most_bytes // 4:
            return
        if not self._path.is_dir():  # it has gone: a new one would not be ours alone
            return
        try:
            write_whole(self._at(key), _sum(value) + value)
        except OSError:  # a full disk
            return
        self._written += len(value)
        if self._written > self.most_bytes // 16:
            self._written = 0
            self._make_room()

    def _at(self, key: str) -> Path:
        return self._path / (hashlib.sha256(f"{processor()} {key}".encode()).hexdigest() + _NAME)

    def _make_room(self) -> None:
        """Removes the oldest until nine tenths of the limit are left."""
        there, now = [], time.time()
        with suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(OSError):
                    about = entry.stat()
                    if entry.name.endswith(_NAME):
                        there.append((about.st_mtime, about.st_size, entry.path))
                    elif _BEGUN in entry.name and now - about.st_mtime > _STALE_S:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in there)
        if total <= self.most_bytes:
            return
        for _, size, path in sorted(there):
            if total <= self.most_bytes * 9 // 10:
                return
            with suppress(OSError):
                os.unlink(path)
            total -= size


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")
