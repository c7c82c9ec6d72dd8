"""Pieces of tensors in files: writing in pieces of a few megabytes, and reading of any part.

A piece is a block that one device had, or some rows of it. A file has many pieces, each with its
own checksum; a reader takes the pieces that intersect the part that it needs.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.dtypes import DType
from ..core.errors import CheckpointError
from ..lang.value.engine import Parts

if TYPE_CHECKING:
    from .manifest import Manifest, Piece, Saved

FILE_BYTES = 32 << 20  # a file ends with the piece that fills it
READ_CACHE_BYTES = 256 << 20  # of files that a reader holds

Block = tuple[tuple[int, ...], NDArray[Any]]
"""The start indices of a part of a tensor, and its values."""


def files(
    id: str, process: int, tensors: Mapping[str, Iterable[Block]]
) -> Iterator[tuple[str, bytes, list[tuple[str, Piece]]]]:
    """Yields the files that hold `tensors`: (name, bytes, pieces with the names of their
    tensors)."""
    from .manifest import Piece

    count, parts, size = 0, list[memoryview](), 0
    pieces: list[tuple[str, Piece]] = []
    for name, blocks in tensors.items():
        for start, x in _rows(blocks):
            raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
            piece = Piece(
                start=list(start), shape=list(x.shape), file=_name(id, process, count),
                offset=size, bytes=len(raw), crc32=zlib.crc32(raw),
            )  # fmt: skip
            parts.append(raw)
            pieces.append((name, piece))
            size += len(raw)
            if size >= FILE_BYTES:
                yield _name(id, process, count), b"".join(parts), pieces
                count, parts, pieces, size = count + 1, [], [], 0
    if pieces:
        yield _name(id, process, count), b"".join(parts), pieces


def _name(id: str, process: int, count: int) -> str:
    return f"data-{id}-{process:05d}-{count:05d}.bin"


def _rows(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yields `blocks` in parts of at most the file size."""
    for start, x in blocks:
        if x.size:
            yield from _cut(start, x, 0)


def _cut(start: tuple[int, ...], x: NDArray[Any], dim: int) -> Iterator[Block]:
    """Yields rows of `x` along `dim`; a row that is too large is cut along the next dim."""
    if x.nbytes <= FILE_BYTES or dim == x.ndim:
        yield start, x
        return
    most = max(1, FILE_BYTES // (x.nbytes // x.shape[dim]))
    for i in range(0, x.shape[dim], most):
        part = x[(*[slice(None)] * dim, slice(i, i + most))]
        yield from _cut((*start[:dim], start[dim] + i, *start[dim + 1 :]), part, dim + 1)


Fetch = Callable[[str, int], bytes | None]
"""A function from a name to the file's bytes, None if there is no file. A file larger than expected
is cut one byte after the expected size, to bound memory."""


class Reader:
    """Parts of the tensors of a checkpoint, from the files that `fetch` returns. Raises
    CheckpointError, with file and tensor, if a byte is not the one that was saved."""

    def __init__(self, manifest: Manifest, fetch: Fetch) -> None:
        self.manifest, self._fetch = manifest, fetch
        self._sizes = manifest.files()
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def read(
        self, name: str, cut: tuple[slice, ...] = (), dtype: DType | None = None
    ) -> NDArray[Any]:
        """The part `cut` of a tensor (default: all of it) as `dtype` (default: the saved dtype). It
        allocates memory for that part and for cached files only."""
        t = self.manifest.tensors[name]
        bounds = [s.indices(n)[:2] for s, n in zip(cut or _all(t), t.shape, strict=True)]
        try:
            out = np.empty(
                [b - a for a, b in bounds], (dtype or t.kind).numpy
            )  # memory is taken on writing
        except (MemoryError, ValueError):
            raise CheckpointError(
                f"checkpoint: there is no memory for {name} of {self.manifest.tag!r}",
                type=f"{t.dtype}{t.shape}",
                bytes=f"{t.nbytes:,}",
                fix="give a tensor that lies split over devices, or load a part: only=...",
            ) from None
        self.fill(name, [(tuple(slice(*b) for b in bounds), out)])
        return out

    def fill(self, name: str, parts: Parts) -> None:
        """Writes parts of a tensor into the arrays beside them, in their dtypes. Each file is read
        once for all parts."""
        t = self.manifest.tensors[name]
        for piece in t.pieces:
            x = None
            for cut, out in parts:
                low = [max(s.start, a) for s, a in zip(cut, piece.start, strict=True)]
                high = [min(s.stop, b) for s, b in zip(cut, piece.end, strict=True)]
                if any(a >= b for a, b in zip(low, high, strict=True)):
                    continue
                x = self.piece(name, t, piece) if x is None else x
                into = tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, cut))
                part = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.start))
                out[into] = x[part]

    def piece(self, name: str, t: Saved, piece: Piece) -> NDArray[Any]:
        """A piece, with its checksum verified."""
        raw = memoryview(self._file(piece.file, name))[piece.offset : piece.offset + piece.bytes]
        if len(raw) != piece.bytes or zlib.crc32(raw) != piece.crc32:
            part = f"bytes {piece.offset} to {piece.offset + piece.bytes}"
            raise self._damaged(piece.file, name, f"{part} are not those that were saved")
        return np.frombuffer(raw, t.kind.numpy).reshape(piece.shape)

    def check(self) -> int:
        """Verifies all pieces and returns the number of bytes."""
        by_file: dict[str, list[tuple[str, Saved, Piece]]] = {}
        for name, t in self.manifest.tensors.items():
            for p in t.pieces:
                by_file.setdefault(p.file, []).append((name, t, p))
        for rows in by_file.values():
            for name, t, p in rows:
                self.piece(name, t, p)
        return sum(self._sizes.values())

    def _file(self, file: str, name: str) -> bytes:
        with self._lock:
            found = self._files.get(file)
            if found is None:
                found = self._fetch(file, self._sizes[file])
                if found is None:
                    raise self._damaged(file, name, "the file is missing")
                size = self._sizes[file]
                if len(found) != size:
                    has = f"more than {size} bytes" if len(found) > size else f"{len(found)} bytes"
                    why = f"it has {has}" + f", not {size}" * (len(found) < size)
                    raise self._damaged(file, name, why)
                self._files[file] = found
                self._held += len(found)
                while self._held > READ_CACHE_BYTES and len(self._files) > 1:
                    self._held -= len(self._files.popitem(last=False)[1])
            self._files.move_to_end(file)
            return found

    def _damaged(self, file: str, name: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint: {self.manifest.tag!r} is damaged",
            file=file,
            tensor=name,
            reason=why,
            fix="load an earlier one: `tessera ckpt ls` shows which there are",
        )


def _all(t: Saved) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in t.shape)
