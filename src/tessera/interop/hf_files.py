"""Folders of safetensors files, whole or in shards: reading of blocks, writing of shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from ..core.checks import file_access, library, unfit
from ..core.dtypes import DType, dtype_of
from ..core.errors import UsageError
from ..core.files import sync
from ..lang.record.first_process import by_first
from .slices import Array, Get

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
STORED = {"F32": "f32", "BF16": "bf16", "F16": "f16", "F64": "float64"}
"""The supported dtypes of weights, by their names in a safetensors file."""


def safetensors_library() -> Any:
    """The `safetensors` module. Raises UsageError if it is not installed."""
    library("checkpoint", "safetensors.numpy", "hf")
    return library("checkpoint", "safetensors", "hf")


def read_json(
    path: Path, name: str = "load_hf", needs: str = "config.json and model.safetensors"
) -> dict[str, Any]:
    """The object in a JSON file of a folder that `needs` these files, read for the function `name`.
    Raises UsageError if it has none."""
    try:
        with file_access(name, path, "read", f"give a folder with {needs}"):
            found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(
            f"{name}: {str(path)!r} is not JSON: {error}", fix="fetch or save the folder anew"
        ) from None
    if isinstance(found, dict):
        return found
    raise UsageError(f"{name}: {str(path)!r} holds no JSON object", fix="fetch the folder anew")


def path_of(name: str, folder: object, fix: str = "give a path") -> Path:
    """The path `folder`, an argument of the function `name`. Raises UsageError if it is no path."""
    if isinstance(folder, (str, Path)) and str(folder) and "\0" not in str(folder):
        return Path(folder)
    raise unfit(name, "the folder", folder, fix)


def described(source: object) -> tuple[dict[str, Any], Path | None]:
    """(content of config.json, folder; None for a config without weights). Such a config is a file,
    a mapping, or a config of transformers. Raises UsageError if it cannot be read."""
    said = (
        source.to_dict() if hasattr(source, "to_dict") and not isinstance(source, type) else source
    )
    if isinstance(said, Mapping):
        return json.loads(json.dumps(dict(said), default=str)), None
    path = path_of("load_hf", source, "give a path, or a config of transformers")
    if path.is_file():
        return read_json(path), None
    return read_json(path / CONFIG), path


def config_dtype(raw: Mapping[str, Any]) -> DType:
    """The dtype of weights by config.json. Raises DTypeError if it is unknown."""
    found = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return dtype_of(str(found).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its shape, its dtype by the name in the file, and `get`, which reads a
    block."""

    shape: tuple[int, ...]
    stored: str
    get: Get

    @property
    def dtype(self) -> DType:
        return dtype_of(STORED[self.stored])


class Weights:
    """The tensors of a folder by name; a context manager that keeps their files open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        safetensors = safetensors_library()
        with ExitStack() as stack:
            for file in self._files():
                try:
                    one = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
                    for name in one.keys():  # noqa: SIM118  (it is no mapping)
                        self.entries[name] = _entry(one.get_slice(name))
                except (OSError, safetensors.SafetensorError) as error:
                    raise UsageError(
                        f"load_hf: {str(file)!r} cannot be read: {error}",
                        fix="fetch or save the folder anew",
                    ) from None
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _files(self) -> list[Path]:
        """The safetensors files of the folder: those in its index, or the single one. Raises
        UsageError if there is neither."""
        if (self.folder / INDEX).is_file():
            found = read_json(self.folder / INDEX).get("weight_map")
            if isinstance(found, dict) and all(isinstance(f, str) for f in found.values()):
                return [self.folder / f for f in sorted(set(found.values()))]
            raise UsageError(
                f"load_hf: {str(self.folder / INDEX)!r} has no weight_map",
                fix="fetch or save the folder anew",
            )
        if (self.folder / WEIGHTS).is_file():
            return [self.folder / WEIGHTS]
        raise UsageError(
            f"load_hf: {str(self.folder)!r} holds neither {WEIGHTS} nor {INDEX}",
            fix="save it with transformers: model.save_pretrained(folder)",
        )


def _entry(part: Any) -> Entry:
    return Entry(tuple(part.get_shape()), part.get_dtype(), lambda at: part[at])


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written: its size, and `make`, which returns it in the first process."""

    nbytes: int
    make: Callable[[], Array | None]


def write_model(
    label: str,
    path: Path,
    tensors: Mapping[str, Outgoing],
    config: Mapping[str, Any],
    shard_bytes: int,
) -> None:
    """Writes weights and config.json to the folder `path` of the first process, which appear when
    all are complete. `label` names the caller in errors."""
    part = by_first(label, lambda: _begun(path))
    try:
        write_weights(label, part or path, tensors, shard_bytes)
        by_first(label, lambda: _finished(part or path, path, config))
    finally:  # of a disk that is full, or an interrupt
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _begun(path: Path) -> Path:
    """A temporary folder in `path` for the files until they are complete. Raises UsageError if
    there is a model already."""
    safetensors_library()
    existing = sorted(p.name for p in (path / CONFIG, *path.glob("*.safetensors*")) if p.exists())
    if existing:
        whole = "a model already" if CONFIG in existing else f"weights without a {CONFIG}"
        raise UsageError(
            f"save_hf: {str(path)!r} holds {whole}",
            known=", ".join(existing[:3]),
            fix="name another folder, or empty this one",
        )
    with file_access("save_hf", path, "written", "name another folder"):
        for old in path.glob(".part-*"):
            if _ended(old.name.removeprefix(".part-")):
                shutil.rmtree(old, ignore_errors=True)
        part = path / f".part-{os.getpid()}"
        part.mkdir(parents=True)
    return part


def _ended(pid: str) -> bool:
    """Returns whether the save of process `pid` was killed; an earlier save of this process has
    ended."""
    return pid.isdecimal() and (int(pid) == os.getpid() or not Path("/proc", pid).exists())


def _finished(part: Path, path: Path, config: Mapping[str, Any]) -> None:
    """Moves the files of `part` to `path`, config.json last: it makes the folder a model. All other
    files and names are synced to disk before."""
    with file_access("save_hf", path, "written", "name another folder"):
        write_json(part / CONFIG, config)
        *weights, last = sorted(part.iterdir(), key=lambda p: p.name == CONFIG)
        for file in (*weights, last):
            sync(file)
        for file in weights:
            os.replace(file, path / file.name)
        sync(path)
        os.replace(last, path / CONFIG)
        part.rmdir()
        sync(path)


def write_weights(
    label: str, folder: Path, tensors: Mapping[str, Outgoing], shard_bytes: int
) -> None:
    """Writes one file, or shards of at most `shard_bytes` (or one tensor) with their index, into
    `folder` of the first process. `label` names the caller in errors."""
    shards = list(_shards(tensors, shard_bytes))
    files = [
        WEIGHTS if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    for file, names in zip(files, shards, strict=True):
        arrays = {name: tensors[name].make() for name in names}
        by_first(label, partial(_write_shard, folder, file, arrays))
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        where = {n: f for f, names in zip(files, shards, strict=True) for n in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        by_first(label, partial(_write_index, folder, index))


def _write_shard(folder: Path, file: str, arrays: Mapping[str, Array | None]) -> None:
    with file_access("save_hf", folder, "written", "name another folder"):
        save = safetensors_library().numpy.save_file
        save(arrays, folder / file, metadata={"format": "pt"})


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    with file_access("save_hf", folder, "written", "name another folder"):
        write_json(folder / INDEX, index)


def _shards(tensors: Mapping[str, Outgoing], most: int) -> Iterable[list[str]]:
    shard: list[str] = []
    used = 0
    for name, t in tensors.items():
        if shard and used + t.nbytes > most:
            yield shard
            shard, used = [], 0
        shard.append(name)
        used += t.nbytes
    yield shard


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
