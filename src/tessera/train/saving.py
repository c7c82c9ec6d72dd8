"""Checkpoints of a recipe's weights and optimizer state, in the format of `checkpoint.save`.

A checkpoint of step 1000 has the tag `step-00001000`. The configuration and the position of the
loader are its `state`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint.listing import manifests, named, verified
from ..checkpoint.loading import loaded
from ..checkpoint.storage import Storage
from ..core.checks import unfit, whole
from ..core.errors import CheckpointError
from ..lang.value.tensor import Tensor
from .config import TrainingConfig, checked
from .memory import offload
from .precision import scale_of_now

State = dict[str, Any]
TAG = re.compile(r"step-(\d{8,})")


def step_tag(step: int) -> str:
    """The tag of the checkpoint of a step.

    >>> step_tag(1000)
    'step-00001000'
    """
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """The result of `load_checkpoint`; `loader` is the data's position, None if none was saved."""

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
    *,
    metrics: Mapping[str, Any] | None = None,
    async_io: bool = False,
) -> Path:
    """Writes a checkpoint of `step` and returns its folder.

    It is below `folder`, or the configuration's `checkpoint_folder`; older ones there are kept by
    the configuration's policy. `loader` has a `state_dict()`, or is such a value. All processes
    must call it, and each writes its own blocks. With `async_io` a thread writes, as in
    `checkpoint.save`. Raises CheckpointError if the folder cannot be written.
    """
    number = whole("save_checkpoint", "the step", step, 0)
    c = optimizer_state.get("config") if isinstance(optimizer_state, dict) else None
    if not isinstance(c, TrainingConfig):
        fix = "give what initialize_optimizer_state(weights, config) made"
        raise unfit("save_checkpoint", "optimizer_state", optimizer_state, fix)
    position = loader.state_dict() if hasattr(loader, "state_dict") else loader
    root, tag = Path(folder or c.checkpoint_folder), step_tag(number)
    tensors = {name: value for name, value in optimizer_state.items() if name != "config"}
    checkpoint.save(
        tag, dict(weights), tensors, async_io=async_io, root=root, keep=c.keep, step=number,
        metrics=metrics, state={"config": asdict(c), "loader": position},
    )  # fmt: skip
    return root / tag


def checkpoints(folder: str | Path) -> list[int]:
    """The steps whose checkpoints are in `folder`, in order."""
    found = (TAG.fullmatch(m.tag) for m in manifests(Storage(folder))[0])
    return sorted(int(m[1]) for m in found if m)


def load_checkpoint(
    folder: str | Path,
    step: int | None = None,
    *,
    like: tuple[Mapping[str, Tensor], State] | None = None,
) -> Checkpoint:
    """The checkpoint of `step`, or the latest; it also restores the random state.

    `like` gives weights and optimizer state with the wanted layouts, and the configuration, which
    may differ from the saved one; without it tensors have no mesh, and the configuration is the
    saved one. Raises CheckpointError if there is no such checkpoint, if it is damaged, or if `like`
    has other names or shapes.
    """
    pair = isinstance(like, (tuple, list)) and len(like) == 2
    if like is not None and not (pair and all(isinstance(x, Mapping) for x in like)):
        raise unfit("load_checkpoint", "like", like, "give a pair: like=(weights, state)")
    checkpoint.wait()
    if not checkpoints(folder):
        _see_old(Path(folder))
    weights, tensors = (None, None) if like is None else (dict(like[0]), dict(like[1]))
    now = None if tensors is None else tensors.pop("config", None)
    tag = None if step is None else step_tag(whole("load_checkpoint", "the step", step, 0))
    place = Storage(folder)
    restored = loaded(place, named(place, tag), weights, tensors, fill=False)
    about = restored.state
    if not isinstance(about, dict) or not about.get("config") or restored.step is None:
        raise CheckpointError(
            f"load_checkpoint: {restored.tag!r} in {str(folder)!r} has no configuration",
            fix="save_checkpoint did not write it: read it with checkpoint.load",
        )
    state = restored.optimizer if like is not None else _nested(restored.optimizer)
    config = now if isinstance(now, TrainingConfig) else checked(about["config"])
    if tensors is not None:
        state = {**state, **scale_of_now(config, about["config"], tensors)}
    if config.offload_optimizer_state:
        state = offload(state)
    return Checkpoint(
        restored.step, restored.tensors, {**state, "config": config}, about.get("loader")
    )


def first_whole(
    place: Storage,
    tags: Sequence[str],
    weights: Any,
    optimizer: Any,
    together: Callable[[dict[str, Any]], list[Any]],
    tell: Callable[[str], None],
) -> checkpoint.Checkpoint | None:
    """The first of `tags` that no process finds damaged, None if there is none. `together` gathers
    the results of all processes; `tell` receives a line for each damaged one.

    Raises CheckpointError for an undamaged one that does not fit `weights` and `optimizer`.
    """
    for tag in tags:
        mine: dict[str, Any] = {"error": "", "damaged": False}
        checkpoint = None
        try:
            checkpoint = loaded(place, tag, weights, optimizer)
        except CheckpointError as error:
            mine = {"error": str(error), "damaged": _damaged(tag, place)}
        wrong = [message for message in together(mine) if message["error"]]
        if not wrong:
            return checkpoint
        for message in wrong:
            if not message["damaged"]:
                raise CheckpointError(message["error"], at="")
        lines = [line.strip() for line in wrong[0]["error"].splitlines()]
        tell("run: " + "; ".join(lines[:-1]) + "; the one before it is tried")
    return None


def _damaged(tag: str, place: Storage) -> bool:
    """Returns whether the checkpoint is damaged, rather than one of another model."""
    try:
        verified(place, tag)
    except CheckpointError:
        return True
    return False


def _nested(flat: Mapping[str, Any]) -> State:
    """A nested state from names such as "m/blocks.up"."""
    state: State = {}
    for name, t in flat.items():
        kind, _, of = name.partition("/")
        if of:
            state.setdefault(kind, {})[of] = t
        else:
            state[kind] = t
    return state


def _see_old(folder: Path) -> None:
    """Raises CheckpointError if the checkpoints in `folder` have the old format."""
    old = sorted(p.parent.name for p in folder.glob("step-*/state.json"))
    if old:
        raise CheckpointError(
            f"load_checkpoint: {str(folder)!r} has checkpoints of an older form, which has no"
            " checksums",
            known=", ".join(old[-3:]),
            fix="their weights are in weights.safetensors: give them to a model, and begin its"
            " optimizer anew",
        )


__all__ = [
    "Checkpoint", "checkpoints", "first_whole", "load_checkpoint", "save_checkpoint", "step_tag",
]  # fmt: skip
