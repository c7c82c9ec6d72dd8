"""Compilation cache on disk: a second start of the same program does not compile it again.

The key is the engine's own (instructions, flags, options, version and devices), and the processor,
as machines that differ may share a folder. The process runs the code that it reads, so no other
user may be able to write into the folder.
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
LEAST_S = 0.1  # programs that compile faster are not cached
_STALE_S = 3600.0  # age of a partly written file after which its writer counts as ended
_NAME, _BEGUN = ".program", ".program.part-"


@cache
def folder() -> KeptPrograms | None:
    """Returns the cache of `TESSERA_PROGRAM_CACHE`'s folder; from now on programs are looked up and
    stored there. None if it is off, or if the user has given jax a cache folder."""
    named = environment.text(environment.PROGRAM_CACHE)
    off = named.lower() in environment.OFF
    theirs = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if off or theirs or jax.default_backend() not in ("cpu", "gpu"):
        return None
    try:
        place = _private_folder(
            Path(named).expanduser() if named else environment.cache_folder() / "programs"
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _warn(named, f"{error}; name a folder of your own, or set it to 0")
        return None
    most = environment.number(environment.PROGRAM_CACHE_BYTES, MOST_BYTES)
    programs = KeptPrograms(place, most)
    if not keep_programs(programs, LEAST_S):
        other = f"jax {jax.__version__} keeps them in another way"
        _warn(named, f"{other}; JAX_COMPILATION_CACHE_DIR names a folder to jax itself")
    return programs


def _warn(named: str, why: str) -> None:
    """Warns that no programs are cached, if the user has named a folder."""
    if named:
        warnings.warn(
            f"{environment.PROGRAM_CACHE}: no programs are kept in {named!r}: {why}",
            EngineWarning,
            stacklevel=lines_up(),
        )


def _private_folder(folder: Path) -> Path:
    """Returns `folder`, created if missing. Raises OSError if others may write into it, or this
    process may not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = folder.stat()
    if there.st_uid != os.getuid() or there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others may write into it, and what lies there is run")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError("it is not writable")
    return folder


class KeptPrograms:
    """Bytes by key in `folder`, at most `most_bytes`; the least recently used are deleted first.

    Any number of processes may share the folder and be killed at any moment: files appear whole or
    not at all, and a file with a wrong checksum is deleted.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._path = folder  # the attribute that jax reads
        self.most_bytes = most_bytes
        self._written = most_bytes  # since the last count; so the first `put` counts

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
        if not self._path.is_dir():  # removed meanwhile; a new one might be writable for others
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
        """Deletes the least recently used files until nine tenths of the limit are left."""
        stored, now = [], time.time()
        with suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(OSError):
                    about = entry.stat()
                    if entry.name.endswith(_NAME):
                        stored.append((about.st_mtime, about.st_size, entry.path))
                    elif _BEGUN in entry.name and now - about.st_mtime > _STALE_S:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in stored)
        if total <= self.most_bytes:
            return
        for _, size, path in sorted(stored):
            if total <= self.most_bytes * 9 // 10:
                return
            with suppress(OSError):
                os.unlink(path)
            total -= size


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")
