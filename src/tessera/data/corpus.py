"""Training text: a directory of text files, or the source of the standard library.

Every machine that runs Python has the second, so a demo needs no download. The files, their order
and the split into training and validation depend on file names and contents alone: files are in the
order of a hash of their names, which is as good as shuffled and equal everywhere.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as root:
...     for name in "abcdefgh":
...         _ = Path(root, name + ".txt").write_text(name * 100)
...     corpus = collect(root, val_fraction=0.25)
>>> len(corpus.train), len(corpus.val), corpus.val_bytes
(6, 2, 200)
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.checks import existing, number
from ..core.errors import UsageError

_STDLIB_TESTS = frozenset({"test", "tests", "idle_test"})
_LARGEST_SHARE = 0.25
"""The largest share of the validation text for one file, if there are smaller ones."""
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Document:
    """One file: its path relative to the root, with / between parts, and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation documents. No file is in both; neither side is empty."""

    name: str
    train: tuple[Document, ...]
    val: tuple[Document, ...]

    @property
    def train_bytes(self) -> int:
        return _bytes(self.train)

    @property
    def val_bytes(self) -> int:
        return _bytes(self.val)


def collect(
    root: str | Path | None = None,
    *,
    max_mb: float = 16.0,
    val_fraction: float = 0.05,
    stdlib_tests: bool = False,
) -> Corpus:
    """The text under `root` (a directory or one file), or of the standard library without one.

    Files that are not UTF-8 text, hidden files and empty files are skipped. Files are taken in hash
    order while they fit into `max_mb` (10^6 bytes); then the first of them that are not too large
    become validation files until they are `val_fraction` of the bytes. A single file is cut at a
    line end. Raises `UsageError` if there is no text.
    """
    number("corpus", "val_fraction", val_fraction, above=0, below=1)
    if root is None:
        base = Path(sysconfig.get_paths()["stdlib"])
        files = _stdlib_files(base, stdlib_tests)
        name = "Python standard library"
    else:
        base = Path(root)
        fix = "name a directory of text files, or leave it out for the standard library"
        existing("corpus", base, fix, folder=True)
        files = _user_files(base)
        name = str(base)
        base = base if base.is_dir() else base.parent
    documents = _read(base, files, int(max_mb * 1e6))
    if not documents:
        raise UsageError(
            f"corpus: no text under {name!r} fits into {max_mb:g} MB",
            fix="name a directory of UTF-8 text files, or raise the size",
        )
    train, val = _split(documents, val_fraction)
    return Corpus(name, train, val)


def _stdlib_files(base: Path, tests: bool) -> Iterator[Path]:
    unwanted = _NOT_STDLIB if tests else _NOT_STDLIB | _STDLIB_TESTS
    return (p for p in base.rglob("*.py") if not unwanted.intersection(p.relative_to(base).parts))


def _user_files(base: Path) -> Iterator[Path]:
    if base.is_file():
        yield base
    for path in base.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(base).parts)
        if path.is_file() and not hidden:
            yield path


def _read(base: Path, files: Iterator[Path], max_bytes: int) -> list[Document]:
    """The documents in hash order, as many as fit into `max_bytes`."""
    named = {path.relative_to(base).as_posix(): path for path in files}
    documents: list[Document] = []
    for name in sorted(named, key=_rank):
        size = named[name].stat().st_size
        if not 0 < size <= max_bytes:
            continue
        raw = named[name].read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            documents.append(Document(name, text))
            max_bytes -= len(raw)
    return documents


def _rank(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _split(
    documents: list[Document], val_fraction: float
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """(training documents, validation documents). Validation documents are whole documents that
    make up the fraction of the bytes, or the end of the only document."""
    want = _bytes(documents) * val_fraction
    if len(documents) == 1:
        only = documents[0]
        cut = _line_end(only.text, int(len(only.text) * (1 - val_fraction)))
        head, tail = only.text[:cut], only.text[cut:]
        if not head or not tail:
            raise UsageError(
                f"corpus: {only.name!r} is too short to be cut into training and validation text",
                fix="name more text",
            )
        return (Document(only.name, head),), (Document(only.name + " (end)", tail),)
    # A large validation file would dominate the validation loss.
    fitting = [d for d in documents if _bytes([d]) <= want * _LARGEST_SHARE] or documents[:-1]
    count, held = 0, 0
    for document in fitting[: len(documents) - 1]:
        if held >= want:
            break
        held += _bytes([document])
        count += 1
    names = {document.name for document in fitting[:count]}
    return tuple(d for d in documents if d.name not in names), tuple(fitting[:count])


def _line_end(text: str, near: int) -> int:
    """The position after the first line end from `near` on, or `near` if there is none."""
    found = text.find("\n", near)
    return near if found < 0 or found + 1 == len(text) else found + 1


def _bytes(documents: tuple[Document, ...] | list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)
