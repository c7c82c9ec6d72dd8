"""Export of a checkpoint's weights to a .safetensors or .npz file, by name."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import file_access, library, unfit
from ..core.errors import UsageError
from ..core.files import write_whole
from .listing import ROOT, Root, manifest_of, matches, named, patterns, reader
from .storage import Storage


def export(
    to: str | Path,
    tag: str | None = None,
    root: Root = ROOT,
    *,
    only: str | Sequence[str] = "*",
) -> int:
    """Writes the tensors of a checkpoint that match `only` to `to`, and returns their number.

    `to` is a `.safetensors` or `.npz` file; the optimizer's tensors are left out. Raises UsageError
    if it has another ending or cannot be written, or no name matches, CheckpointError if the
    checkpoint is damaged.
    """
    if not isinstance(to, (str, Path)):
        raise unfit("checkpoint.export", "to", to, "name a .safetensors or a .npz file")
    asked = patterns("checkpoint.export", only)
    path, storage = Path(to), Storage(root)
    if path.suffix not in (".safetensors", ".npz"):
        raise UsageError(
            f"checkpoint.export: {path.name!r} ends in {path.suffix!r}",
            fix="name a .safetensors or a .npz file; it comes before the tag",
        )
    manifest = manifest_of(storage, named(storage, tag))
    source = reader(storage, manifest)
    found = {
        bare: source.read(name)
        for name in manifest.tensors
        for kind, _, bare in [name.partition("/")]
        if kind == "tensors" and matches(name, asked)
    }
    if not found:
        raise UsageError(
            f"checkpoint.export: no tensor of {manifest.tag!r} matches {only!r}",
            fix="`tessera ckpt show` lists their names",
        )
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {n: _numpy_dtype(x) for n, x in found.items()}
        np.savez(buffer, **arrays)
        data = buffer.getvalue()
    else:
        data = library("checkpoint.export", "safetensors.numpy", "hf").save(found)
    with file_access("checkpoint.export", path, "written", "name another file"):
        write_whole(path, data)
    return len(found)


def _numpy_dtype(x: NDArray[Any]) -> NDArray[Any]:
    """`x` in a dtype of NumPy: bf16 becomes f32."""
    return x if x.dtype.kind in "biuf" and x.dtype.isbuiltin else x.astype(np.float32)
