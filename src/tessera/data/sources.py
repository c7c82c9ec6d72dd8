"""Token sources: arrays, files of tokens, and tables that `tokenize_rows.py` converts to such
files.

Tokens are a `TokenSource`: one long sequence in pieces that are in memory or mapped from files,
with the end of each document if it is known.

>>> source = TokenSource([np.array([1, 2, 0]), np.array([3, 0], np.uint16)], eos=0)
>>> source
TokenSource('tokens', 5 tokens)
>>> row = np.empty(4, np.int32); source.read(1, row); row.tolist()
[2, 0, 3, 0]
>>> source.document_ends().tolist()
[3, 5]
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import existing, shown, unfit
from ..core.errors import UsageError
from ..lang.value.host_data import is_array, is_host_array, lent
from ..lang.value.tensor import Tensor
from .corpus import collect

_SAMPLES, _SAMPLE = 256, 4096  # of a fingerprint: number of samples, tokens of each
_CHUNK = 1 << 24  # tokens compared at once, as a comparison makes an array
_TOP = 2**31 - 1  # tokens are int32
BYTES_END = 256
"""The token that closes a document of bytes: one above the largest byte."""


class TokenSource:
    """Tokens as one long sequence: `pieces` in order, each an array of integers.

    `ends` are the ends of documents (the last is the number of tokens), or `eos` is the token that
    closes a document; with neither there is one stream without documents. Raises UsageError if a
    piece is not a 1-D array of integers, or `ends` do not rise to the number of tokens.
    """

    def __init__(
        self,
        pieces: Sequence[NDArray[Any]],
        ends: NDArray[Any] | None = None,
        eos: int | None = None,
        name: str = "tokens",
    ) -> None:
        if not isinstance(pieces, (list, tuple)):
            raise unfit("TokenSource", "pieces", pieces, "give a list of arrays")
        kept = [_row(piece, name) for piece in pieces if getattr(piece, "shape", ()) != (0,)]
        self.pieces = tuple(kept)
        self.name, self.eos = name, eos
        self._starts = [0, *itertools.accumulate(p.size for p in kept)]
        # Narrow unsigned types never exceed int32, so only others are checked.
        self._wide = any(p.dtype.kind == "i" or p.dtype.itemsize > 2 for p in kept)
        self.ends = None if ends is None else _row(ends, f"{name}, ends").astype(np.int64)
        if self.ends is not None and not (
            (np.diff(self.ends, prepend=0) > 0).all() and self.ends[-1:].sum() == self.size
        ):
            raise UsageError(
                f"{name}: `ends` does not grow up to the number of tokens, {self.size}",
                fix="give for each document the place after its last token",
            )

    def __repr__(self) -> str:
        return f"TokenSource({self.name!r}, {self.size:,} tokens)"

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self._starts[-1]

    def read(self, start: int, out: NDArray[np.int32]) -> None:
        """Fills the array `out` with the tokens from `start` on.

        Raises UsageError if a value cannot be a token.
        """
        i = bisect.bisect_right(self._starts, start) - 1
        done = 0
        while done < out.size:
            at = start + done - self._starts[i]
            part = self.pieces[i][at : at + out.size - done]
            if self._wide and (part.min() < 0 or part.max() > _TOP):
                raise UsageError(
                    f"{self.name}: tokens from {part.min()} to {part.max()} near place "
                    f"{start + done:,}",
                    fix="a token is from 0 to 2**31 - 1; is the dtype of the file right?",
                )
            out[done : done + part.size] = part
            done += part.size
            i += 1

    def document_ends(self) -> NDArray[np.int64]:
        """The position where each document ends; searched by `eos` if `ends` is not known.

        Raises UsageError if neither `ends` nor `eos` is known.
        """
        if self.ends is not None:
            return self.ends
        if self.eos is None:
            raise UsageError(
                f"{self.name}: it is not known where documents end",
                fix="give eos_token, the token that closes a document",
            )
        row_ends = []
        for first, piece in zip(self._starts, self.pieces, strict=False):
            for at in range(0, piece.size, _CHUNK):
                row_ends.append(
                    np.flatnonzero(piece[at : at + _CHUNK] == self.eos) + first + at + 1
                )
        ends = np.concatenate(row_ends) if row_ends else np.zeros(0, np.int64)
        if self.size and not (ends.size and ends[-1] == self.size):
            ends = np.append(ends, self.size)
        self.ends = ends
        return ends

    def part(self, start: int, stop: int) -> TokenSource:
        """The tokens from `start` to `stop`, as a view."""
        pieces = [
            p[max(0, start - a) : max(0, stop - a)]
            for a, p in zip(self._starts, self.pieces, strict=False)
        ]
        ends = self.ends
        if ends is not None:
            ends = ends[(ends > start) & (ends < stop)] - start
            ends = np.append(ends, stop - start) if stop > start else ends
        return TokenSource(pieces, ends, self.eos, self.name)

    def fingerprint(self) -> str:
        """A hash of the tokens: of all up to a million, of evenly spread samples of more.

        The same tokens in other files, or in another dtype, have the same hash.
        """
        h = hashlib.sha256(str(self.size).encode())
        starts: Sequence[int] = range(0, self.size, _SAMPLE)
        if len(starts) > _SAMPLES:
            starts = np.linspace(0, self.size - _SAMPLE, _SAMPLES).astype(np.int64).tolist()
        for start in starts:
            block = np.empty(min(_SAMPLE, self.size - start), np.int32)
            self.read(start, block)
            h.update(block.astype("<i4", copy=False).tobytes())
        return h.hexdigest()[:16]


def _row(x: object, name: str) -> NDArray[Any]:
    if isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype.kind in "iu":
        return x
    kind = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else shown(x)
    raise UsageError(
        f"{name}: tokens cannot be {kind}", fix="give a NumPy array: one row of whole numbers"
    )


def _on_host(x: Any) -> NDArray[Any]:
    """The array `x` of any library as a NumPy array."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, Tensor):
        return x.numpy()
    return lent(x, "dataloader") if is_host_array(x) else np.asarray(x)


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings for reading files: `dtype` of .bin files, `split` and `column` of tables, and the
    tokenizer of text. `read` are the settings that were used so far."""

    dtype: Any = None
    column: str | None = None
    split: str | None = None
    tokenizer: Any = None
    eos: int | None = None
    cache: str | Path = "runs/.cache"
    read: set[str] = field(default_factory=set, compare=False)

    def take(self, key: str) -> Any:
        """The setting `key`, which counts as used from now on."""
        self.read.add(key)
        return getattr(self, key)


TOKEN_FILES = (".npy", ".bin")
TABLE_FILES = (".parquet", ".arrow", ".feather")


def open_source(data: Any, how: Reading) -> TokenSource:
    """The tokens of `data`: None (the standard library), an array, a source, a path or several, a
    `datasets.Dataset` or a dict of them by split. Raises UsageError if the argument is none of
    these or cannot be read."""
    if data is None:
        source = standard_library()
    elif isinstance(data, TokenSource):
        source = data
    elif isinstance(data, Tensor) or is_array(data):
        source = TokenSource([_on_host(data)], name="array")
    elif isinstance(data, (str, Path)):
        source = _open_path(Path(data), how)
    elif isinstance(data, (list, tuple)) and data and not any(x is None for x in data):
        source = _joined([open_source(part, how) for part in data])
    else:
        # A circle: what it writes is read by the sources of this file.
        from .tokenize_rows import convert_dataset, is_dataset

        if not is_dataset(data):
            raise unfit(
                "dataloader",
                "data",
                data,
                "give a path, a list of paths, an array of tokens, a TokenSource or a "
                "datasets.Dataset; leave it out for the standard library's text",
            )
        source = convert_dataset(data, how)
    if how.eos is not None and source.eos != how.eos:
        source = TokenSource(source.pieces, source.ends, how.eos, source.name)
    if source.size == 0:
        raise UsageError(f"{source.name}: there are no tokens", fix="name other data")
    return source


def standard_library() -> TokenSource:
    """The source text of Python's standard library as bytes, each file closed by token 256.

    It is the default without `data`: 257 tokens, on every machine, equal for one Python release.
    """
    corpus = collect()
    texts = [d.text.encode() for d in (*corpus.train, *corpus.val)]
    row = np.frombuffer(b"".join(t + b"\0" for t in texts), np.uint8).astype(np.uint16)
    ends = np.cumsum([len(t) + 1 for t in texts])
    row[ends - 1] = BYTES_END
    return TokenSource([row], ends, BYTES_END, corpus.name)


def _open_path(path: Path, how: Reading) -> TokenSource:
    """The tokens of a file, or of all files of a folder in the order of their names. Raises
    UsageError if a file holds neither tokens nor tables."""
    if path.is_dir():
        from .tokenize_rows import convert_folder, is_dataset_folder

        if is_dataset_folder(path):
            return convert_folder(path, how)
        files = sorted(p for p in path.iterdir() if p.suffix in TOKEN_FILES + TABLE_FILES)
        if not files:
            raise UsageError(
                f"dataloader: {str(path)!r} holds no file of tokens",
                fix="name a folder with " + ", ".join(TOKEN_FILES + TABLE_FILES) + " files, or "
                "one that datasets.save_to_disk wrote",
            )
        return _joined([_open_path(p, how) for p in files], str(path))
    existing("dataloader", path, "name a file or a folder that does")
    match path.suffix:
        case ".npy":
            return TokenSource([_npy(path)], name=str(path))
        case ".bin":
            return TokenSource([_raw(path, how.take("dtype"))], name=str(path))
        case ".parquet" | ".arrow" | ".feather":
            from .tokenize_rows import convert_file

            return convert_file(path, how)
        case _:
            raise UsageError(
                f"dataloader: {str(path)!r} is of no kind that is known",
                fix="name a file that ends in " + ", ".join(TOKEN_FILES + TABLE_FILES),
            )


def _joined(parts: Sequence[TokenSource], name: str = "") -> TokenSource:
    pieces = [piece for part in parts for piece in part.pieces]
    name = name or ", ".join(part.name for part in parts)
    eos = {part.eos for part in parts}
    known = eos.pop() if len(eos) == 1 else None
    if any(part.ends is None for part in parts):
        return TokenSource(pieces, None, known, name)
    starts = np.cumsum([0, *(part.size for part in parts)])
    ends = [part.document_ends() + start for part, start in zip(parts, starts, strict=False)]
    return TokenSource(pieces, np.concatenate(ends), known, name)


def _npy(path: Path) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"dataloader: {str(path)!r} is not a .npy file that can be mapped: {error}",
            fix="write it with np.save: one row of uint16 or uint32",
        ) from None
    return found


def _raw(path: Path, dtype: Any) -> NDArray[Any]:
    """The tokens of a file without a header, stored as `dtype`; mapped, so that pages are read on
    use."""
    if dtype is None:
        raise UsageError(
            f"dataloader: {str(path)!r} does not say the dtype of its tokens",
            fix='give data_dtype="uint16" or "uint32"',
        )
    size = path.stat().st_size
    if size % np.dtype(dtype).itemsize:
        raise UsageError(
            f"dataloader: {str(path)!r} has {size:,} bytes, no whole number of {dtype}",
            fix="give the data_dtype that it was written with",
        )
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)
