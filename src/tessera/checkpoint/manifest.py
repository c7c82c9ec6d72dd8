"""The manifest of a checkpoint: one JSON file, whose existence makes the checkpoint complete.

It lists the tensors, the file of each piece of them, and the checksums of their bytes. A file is
checked against this model before memory is allocated for it. The model is imported on use: pydantic
takes a quarter of `import tessera`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.dtypes import BY_NAME, DType
from ..core.errors import CheckpointError
from .names import DATA

VERSION = 1
KINDS = ("tensors", "optimizer")  # the first part of each name

_Count = Field(ge=0, lt=1 << 62)
_Counter = Annotated[str, Field(pattern="^(seed|calls|created)$")]
_Word = Annotated[int, Field(ge=0, lt=1 << 32)]


class Piece(BaseModel):
    """A block of a tensor, from the index `start` on, as bytes of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    start: list[int]
    shape: list[int]
    file: str
    offset: int = _Count
    bytes: int = _Count
    crc32: int = _Count

    @property
    def end(self) -> list[int]:
        return [a + n for a, n in zip(self.start, self.shape, strict=True)]


class Saved(BaseModel):
    """A tensor: the name of its dtype, its shape, its layout when it was saved, and its pieces."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: list[int]
    layout: str
    pieces: list[Piece]

    @property
    def kind(self) -> DType:
        return BY_NAME[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.kind.numpy.itemsize


class Manifest(BaseModel):
    """The content of `manifest.json`. `sequence` numbers the checkpoints of a root; `values` are
    saved numbers and texts, `state` is the user's own."""

    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")

    format: Literal["tessera checkpoint"] = "tessera checkpoint"
    version: int = VERSION
    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    tag: str
    sequence: int = _Count
    step: int | None = None
    created_s: float
    mesh: str
    processes: int = Field(ge=1)
    numerics: str
    versions: dict[str, str]
    metrics: dict[str, float]
    random: dict[_Counter, _Word] = Field(min_length=3)
    state: Any = None
    values: dict[str, Any]
    tensors: dict[str, Saved]
    digest: str = ""

    def files(self) -> dict[str, int]:
        """The files of the tensors with their sizes in bytes."""
        found: dict[str, int] = {}
        for t in self.tensors.values():
            for p in t.pieces:
                found[p.file] = max(found.get(p.file, 0), p.offset + p.bytes)
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def to_json(self) -> bytes:
        """The file content, with a digest of all other fields."""
        content = self.model_dump(mode="json", exclude={"digest"})
        return json.dumps({**content, "digest": _digest(content)}, indent=1).encode()


def _digest(content: dict[str, Any]) -> str:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, which was read from `where`.

    Raises CheckpointError if it is no manifest, of a later version, was changed after it was
    written, or is inconsistent.
    """
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("format") != "tessera checkpoint":
            raise ValueError("it is not one that Tessera wrote")
        version = content.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(f"it has version {version}, and this Tessera reads up to {VERSION}")
        digest = content.pop("digest", "")
        if digest != _digest(content):
            raise ValueError("it was changed after it was written: its digest does not fit")
        manifest = Manifest.model_validate({**content, "digest": digest})
        for name in (*manifest.tensors, *manifest.values):
            if name.partition("/")[0] not in KINDS:
                raise ValueError(f"{name!r} is the name of nothing that is saved")
        if twice := manifest.tensors.keys() & manifest.values.keys():
            raise ValueError(f"{min(twice)} is a tensor and a value")
        for name, t in manifest.tensors.items():
            _check(name, t)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise _bad(where, f"{at}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(where, str(error).splitlines()[0]) from None
    return manifest


def _bad(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint: the manifest of {where!r} cannot be used",
        reason=why,
        fix="load another checkpoint: `tessera ckpt ls` shows which are whole",
    )


def _check(name: str, t: Saved) -> None:
    """Raises ValueError unless the pieces of `t` cover each element exactly once."""
    if t.dtype not in BY_NAME:
        raise ValueError(f"{name}: {t.dtype!r} is no dtype")
    size, rank = t.kind.numpy.itemsize, len(t.shape)
    if any(n < 0 for n in t.shape):
        raise ValueError(f"{name}: the shape {t.shape} has a size below 0")
    for p in t.pieces:
        if not DATA.fullmatch(p.file):
            raise ValueError(f"{name}: {p.file!r} is no file of a checkpoint")
        if len(p.start) != rank or len(p.shape) != rank:
            raise ValueError(f"{name}: a piece has another rank")
        if any(a < 0 or n < 1 or a + n > m for a, n, m in zip(p.start, p.shape, t.shape)):
            raise ValueError(f"{name}: a piece lies outside of the shape {t.shape}")
        if p.bytes != math.prod(p.shape) * size:
            raise ValueError(f"{name}: a piece of shape {p.shape} has {p.bytes} bytes")
    if sum(math.prod(p.shape) for p in t.pieces) != math.prod(t.shape) or _overlap(t.pieces):
        raise ValueError(f"{name}: its pieces do not add up to it")


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Returns whether two of `pieces` share an element."""
    rows = sorted(pieces, key=lambda p: p.start)
    if all(a.end[:1] <= b.start[:1] for a, b in pairwise(rows)):
        return False  # in a row along dim 0
    return any(
        all(x < d and y < c for x, c, y, d in zip(a.start, a.end, b.start, b.end, strict=True))
        for i, a in enumerate(rows)
        for b in _from(rows, i, a)
    )


def _from(rows: Sequence[Piece], i: int, a: Piece) -> list[Piece]:
    """The pieces after index `i` that begin before the end of `a` along dim 0."""
    found = []
    for b in rows[i + 1 :]:
        if a.end and b.start[0] >= a.end[0]:
            break
        found.append(b)
    return found
