"""What is on disk after a crash? A whole checkpoint or none: a folder that appears at once.

A checkpoint is a folder `step-00001000` with `weights.safetensors`, `optimizer.safetensors` and
`state.json` (the step, the configuration, the random state, the loader's position). It is written
under another name, forced to disk, and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checks import file_access, library, unfit, whole
from ..core.errors import UsageError, fail
from ..core.files import sync, write_whole
from ..lang import random
from ..lang.create import tensor
from ..lang.first_process import by_first, to_first
from ..lang.operands import as_tensor
from ..lang.tensor import Tensor
from ..lang.tree import flatten, paths
from .config import TrainingConfig, checked
from .memory import offload

State = dict[str, Any]
FOLDER = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` found; `loader` is the data's position, None where none was saved."""

    step: int
    weights: dict[str, Tensor]
    optimizer_state: State
    loader: Any


def save_checkpoint(
    weights: Mapping[str, Tensor],
    optimizer_state: State,
    step: int,
    folder: str | Path | None = None,
    loader: Any = None,
) -> Path:
    """Writes a checkpoint of `step` and gives its folder.

    It goes below `folder`, or the configuration's `checkpoint_folder`; of older ones there,
    `keep_checkpoints` stay. `loader` has a `state_dict()`, or is such a value. Each tensor is
    gathered to this host. Of several processes all call it, and the first one writes; its errors
    are raised in all. Raises UsageError if the folder cannot be written, or without the
    `safetensors` library.
    """
    number = whole("save_checkpoint", "the step", step, 0)
    c = optimizer_state.get("config") if isinstance(optimizer_state, dict) else None
    if not isinstance(c, TrainingConfig):
        fix = "give what initialize_optimizer_state(weights, config) made"
        raise unfit("save_checkpoint", "optimizer_state", optimizer_state, fix)
    position = loader.state_dict() if hasattr(loader, "state_dict") else loader
    about = {
        "format": 1, "step": number, "config": asdict(c), "random": random.state(),
        "loader": position,
    }  # fmt: skip
    root = Path(folder or c.checkpoint_folder)
    made = root / f"step-{number:08d}"
    label = f"save_checkpoint {str(made)!r}"
    part = by_first(label, lambda: _begun(root, made))
    try:
        for name, tree in (("weights", weights), ("optimizer", optimizer_state)):
            arrays = {n: to_first(t) for n, t in _flat(tree).items()}
            file = (part or root) / f"{name}.safetensors"
            by_first(label, partial(_write_tensors, file, arrays))
        by_first(label, lambda: _finished(part or root, made, about, c.keep_checkpoints))
    finally:  # of a disk that is full, or an interrupt
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    return made


def checkpoints(folder: str | Path) -> list[int]:
    """The steps whose checkpoints are in `folder`, in order."""
    root = Path(folder)
    names = (FOLDER.match(p.name) for p in root.iterdir()) if root.is_dir() else ()
    return sorted(int(m[1]) for m in names if m)


def load_checkpoint(
    folder: str | Path,
    step: int | None = None,
    *,
    like: tuple[Mapping[str, Tensor], State] | None = None,
) -> Checkpoint:
    """The checkpoint of `step`, or the latest, and the random state of its time.

    `like` gives weights and optimizer state whose layouts are taken; without it tensors have no
    mesh. Raises UsageError if there is no checkpoint, or if `like` has other names or shapes.
    """
    found = checkpoints(folder)
    if not found or (step is not None and step not in found):
        raise fail(
            UsageError,
            f"load_checkpoint: {str(folder)!r} has no checkpoint"
            + (f" of step {step}" if step else ""),
            [("steps there", ", ".join(map(str, found)) or "none")],
            fix="name a folder that save_checkpoint wrote to",
        )
    path = Path(folder) / f"step-{found[-1] if step is None else step:08d}"
    about = json.loads((path / "state.json").read_text(encoding="utf-8"))
    config = checked(about["config"])
    weights = _read_tensors(path / "weights.safetensors")
    flat = _read_tensors(path / "optimizer.safetensors")
    if like is not None:
        weights, flat = _like(weights, _flat(like[0])), _like(flat, _flat(like[1]))
    state: State = {"config": config}
    for name, t in flat.items():
        kind, _, of = name.partition("/")
        if of:
            state.setdefault(kind, {})[of] = t
        else:
            state[kind] = t
    if config.offload_optimizer_state:
        state = offload(state)
    random.set_state(about["random"])
    return Checkpoint(about["step"], weights, state, about["loader"])


def _flat(tree: Any) -> dict[str, Tensor]:
    """Tensors by path, its parts joined by "/": names of weights have dots."""
    named = zip(paths(tree), flatten(tree)[0], strict=True)
    return {"/".join(map(str, p)): t for p, t in named if isinstance(t, Tensor)}


def _like(have: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors `have` in the layouts of `like`. Raises UsageError that lists what is missing,
    too many, or of another shape."""
    wrong = [(n, "is missing") for n in like if n not in have]
    wrong += [(n, "is too many") for n in have if n not in like]
    wrong += [
        (n, f"has shape {have[n].shape}, not {t.shape}")
        for n, t in like.items()
        if n in have and have[n].shape != t.shape
    ]
    if wrong:
        raise fail(
            UsageError,
            f"load_checkpoint: {len(wrong)} tensors do not fit",
            wrong[:5],
            fix="load it for a model and optimizer of the same configuration",
        )
    return {n: tensor(have[n].numpy(), mesh=t.mesh, layout=t.type) for n, t in like.items()}


# -- files ----------------------------------------------------------------------------------------
def _written(folder: Path) -> AbstractContextManager[None]:
    return file_access("save_checkpoint", folder, "written", "name another folder")


def _begun(root: Path, made: Path) -> Path:
    """An empty folder for what is written, until it is whole."""
    part = root / f".part-{made.name}-{os.getpid()}"
    with _written(root):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    return part


def _write_tensors(path: Path, arrays: Mapping[str, Any]) -> None:
    save = _safetensors("save_checkpoint").save
    with _written(path.parent.parent):
        write_whole(path, save({n: np.asarray(x, order="C") for n, x in arrays.items()}))


def _finished(part: Path, made: Path, about: Mapping[str, Any], kept: int | None) -> None:
    """`part` as the checkpoint `made`; older ones but the last that are `kept` go."""
    with _written(made.parent):
        write_whole(part / "state.json", json.dumps(about, indent=2).encode())
        _replace(part, made)
        if kept is not None:
            for old in checkpoints(made.parent)[:-kept]:
                shutil.rmtree(made.parent / f"step-{old:08d}")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    found = _safetensors("load_checkpoint").load_file(str(path))
    return {name: as_tensor(x) for name, x in found.items()}


def _safetensors(call: str) -> Any:
    return library(call, "safetensors.numpy", "demo")


def _replace(part: Path, made: Path) -> None:
    """`part` under the name `made`; both names' folder is forced to disk."""
    sync(part)
    old = part.with_name(f"{part.name}-old")
    if made.exists():
        os.replace(made, old)
    os.replace(part, made)
    sync(made.parent)
    shutil.rmtree(old, ignore_errors=True)


__all__ = ["Checkpoint", "checkpoints", "load_checkpoint", "save_checkpoint"]
