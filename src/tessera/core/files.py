"""Atomic writes of files: written to a temporary file, synced to disk, renamed.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     write_whole(Path(folder, "a", "b.txt"), b"text")
...     Path(folder, "a", "b.txt").read_bytes(), len(list(Path(folder, "a").iterdir()))
(b'text', 1)
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, and creates its folder. If it fails or is interrupted, an existing
    file stays unchanged. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Forces a file's contents, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = ["sync", "write_whole"]
