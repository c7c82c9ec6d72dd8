"""List of checkpoints, their latest, and the policy of which to keep.

The data of a checkpoint are written first, its manifest last, atomically. A folder without a
manifest is the remainder of an unfinished save: it is not listed, and the next save of that tag
removes it.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.checks import mapping, unfit, whole
from ..core.declared import Count, Flag, Natural, String
from ..core.devices import process_index
from ..core.errors import CheckpointError, UsageError
from ..core.messages import warn
from ..core.value_checks import is_whole
from ..core.wording import nearest
from .names import DATA, MOST_BYTES, NAME, TAG
from .pieces import Reader
from .storage import Storage

if TYPE_CHECKING:
    from .manifest import Manifest

Root = str | os.PathLike[str]
ROOT = "checkpoints"
"""The default root of checkpoints."""


@dataclass(frozen=True)
class Keep:
    """The policy of which checkpoints to keep: the `last` ones, the first at or after each multiple
    of `every` steps, and the `best` by `metric` (the smallest values, or with `largest=True` the
    largest)."""

    last: Count = 1
    every: Count | None = None
    best: Natural = 0
    metric: String = "loss"
    largest: Flag = False

    def stay(self, manifests: Sequence[Manifest]) -> set[str]:
        """The tags to keep among `manifests`, which is sorted from the oldest."""
        kept = {m.tag for m in manifests[-self.last :]}
        if self.every is not None:
            first: dict[int, str] = {}
            for m in manifests:
                if m.step is not None and (m.step >= self.every or m.step == 0):
                    first.setdefault(m.step // self.every, m.tag)
            kept |= {*first.values()}
        rated = self.rated(manifests)
        rated.sort(key=lambda m: m.metrics[self.metric], reverse=self.largest)
        return kept | {m.tag for m in rated[: self.best]}

    def rated(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """The checkpoints among `manifests` whose metric is finite."""
        return [m for m in manifests if math.isfinite(m.metrics.get(self.metric, math.nan))]


def keep_of(policy: object) -> Keep | None:
    """A policy from an argument `keep`: a number keeps that many of the last ones."""
    if policy is None or isinstance(policy, Keep):
        return policy
    if is_whole(policy):
        return Keep(last=whole("checkpoint", "keep", policy, 1))
    raise unfit(
        "checkpoint", "keep", policy, "give a number of checkpoints, or checkpoint.Keep(...)"
    )


def tag_of(tag: object) -> str:
    """The argument `tag`, checked. Raises UsageError if it cannot name a folder."""
    if isinstance(tag, str) and TAG.fullmatch(tag) and tag != "latest":
        return tag
    fix = 'a name of up to 128 letters, digits, ".", "_", "-", as "step_1000"'
    if tag == "latest":
        fix = f"that word stands for the newest of all; {fix}"
    if isinstance(tag, (str, os.PathLike)):
        path = Path(tag)
        if path.parent != Path() and TAG.fullmatch(path.name):
            fix = f"write root={str(path.parent)!r} and the tag {path.name!r}"
    else:
        fix = "the tag comes first: " + fix
    raise unfit("checkpoint", "tag", tag, fix)


def manifest_of(storage: Storage, tag: str) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if it is missing or invalid."""
    data = storage.read(f"{tag}/{NAME}", MOST_BYTES)
    where = f"{storage.name}/{tag}"
    if data is None:
        available_tags = tags(storage)
        raise CheckpointError(
            f"checkpoint: {tag!r} is not in {storage.name!r}",
            known=", ".join(available_tags[-5:]) or "none",
            fix=other_format(storage, tag)
            or "name one that is there, or leave out the tag for the latest",
        )
    if len(data) > MOST_BYTES:
        raise CheckpointError(
            f"checkpoint: the manifest of {where!r} is too large", fix="load another checkpoint"
        )
    manifest = _parsed(data, where)
    if manifest.tag != tag:
        raise CheckpointError(
            f"checkpoint: the manifest of {where!r} is that of {manifest.tag!r}",
            fix="it was moved or copied here: rename its folder back",
        )
    return manifest


def _parsed(data: bytes, where: str) -> Manifest:
    from .manifest import parse

    return parse(data, where)


def tags(storage: Storage) -> list[str]:
    """The tags of checkpoints with a manifest, sorted by name."""
    found = (re.fullmatch(rf"({TAG.pattern})/{re.escape(NAME)}", k) for k in storage.listed())
    return [m[1] for m in found if m]


def manifests(storage: Storage) -> tuple[list[Manifest], dict[str, str]]:
    """(readable manifests, from the oldest; problems of the others, by tag)."""
    found: list[Manifest] = []
    wrong: dict[str, str] = {}
    for tag in tags(storage):
        try:
            found.append(manifest_of(storage, tag))
        except CheckpointError as error:
            if storage.read(f"{tag}/{NAME}", MOST_BYTES) is not None:  # not removed at this moment
                wrong[tag] = str(error).splitlines()[0]
    return sorted(found, key=lambda m: m.sequence), wrong


def unfinished(storage: Storage) -> list[str]:
    """The tags of saves that ended before their manifest was written."""
    parts = (key.partition("/") for key in storage.listed())
    return sorted({tag for tag, _, file in parts if DATA.fullmatch(file)} - {*tags(storage)})


def latest(root: Root = ROOT) -> str | None:
    """The tag of the newest complete checkpoint below `root`; None if there is none.

    >>> import tempfile
    >>> latest(tempfile.mkdtemp()) is None
    True
    """
    found, _ = manifests(Storage(root))
    return found[-1].tag if found else None


def reader(storage: Storage, manifest: Manifest) -> Reader:
    def fetch(file: str, most: int) -> bytes | None:
        found = storage.read(f"{manifest.tag}/{file}", most)
        if found is None:
            _see_changed(storage, manifest)
        return found

    return Reader(manifest, fetch)


def _see_changed(storage: Storage, manifest: Manifest) -> None:
    """Raises CheckpointError if the checkpoint is no longer the one that `manifest` was read
    from."""
    now = storage.read(f"{manifest.tag}/{NAME}", MOST_BYTES)
    if now is None or _parsed(now, f"{storage.name}/{manifest.tag}").id != manifest.id:
        done = "removed" if now is None else "saved anew"
        raise CheckpointError(
            f"checkpoint: {manifest.tag!r} was {done} while it was read",
            fix="load " + ("another one" if now is None else "it once more"),
        )


def verify(tag: str | None = None, root: Root = ROOT) -> int:
    """Reads every byte of a checkpoint, by default the latest, and returns their number.

    Raises CheckpointError, with file and tensor, if a byte is not the one that was saved.
    """
    storage = Storage(root)
    return verified(storage, named(storage, tag))


def verified(storage: Storage, tag: str) -> int:
    """`verify` for a storage and a tag."""
    return reader(storage, manifest_of(storage, tag)).check()


def named(storage: Storage, tag: str | None) -> str:
    """`tag`, or the tag of the latest checkpoint. Raises CheckpointError if there is none."""
    if tag is not None and tag != "latest":
        return tag_of(tag)
    found, wrong = manifests(storage)
    if found:
        for why in wrong.values() if process_index() == 0 else ():
            warn(f"{why}: {found[-1].tag} is taken for the latest")
        return found[-1].tag
    raise CheckpointError(
        f"checkpoint: {storage.name!r} has no checkpoint",
        rows=[*wrong.items()][:5],
        fix=other_format(storage) or "name the root that checkpoint.save wrote to: root=...",
    )


def other_format(storage: Storage, tag: str = "") -> str:
    """A fix for errors: how to read a folder that is no checkpoint; "" if that is not known."""
    if storage.folder is None:
        return ""
    path = storage.folder / tag
    shown = Path(storage.name, tag)
    if tag and not path.exists() and tags(Storage(tag)):
        return f"that is a root: write root={tag!r}"
    if path.is_file():
        return "it is a file: name a folder, the root that checkpoint.save wrote to"
    if not tag and (path / NAME).is_file():
        return f"it is a checkpoint itself: write root={str(shown.parent)!r} and {path.name!r}"
    if tags(Storage(path / ROOT)):
        return f"its checkpoints lie below: write root={str(shown / ROOT)!r}"
    if (path / ".metadata").exists() or (path / "_CHECKPOINT_METADATA").exists():
        by = "PyTorch" if (path / ".metadata").exists() else "Orbax"
        return f"{by} wrote it: load it there, and give model.load_state_dict its arrays by name"
    if [*path.glob("*.safetensors")]:
        return f"it holds a model of others: checkpoint.load_hf({str(shown)!r})"
    return ""


def patterns(name: str, only: object) -> tuple[str, ...]:
    """The patterns of names in an argument `only`, which is one or several. Raises UsageError if it
    is neither."""
    given = (only,) if isinstance(only, str) else only
    if not isinstance(given, Iterable) or not all(isinstance(p, str) for p in given):
        raise unfit(name, "only", only, 'give patterns of names: only="blocks.*"')
    found = tuple(given)
    if not found:
        raise unfit(name, "only", only, "leave it out for all")
    return found


def matches(name: str, only: Iterable[str]) -> bool:
    """Returns whether the tensor `name`, such as "tensors/blocks.0.up", matches one of the patterns
    `only`."""
    bare = name.partition("/")[2]
    return any(fnmatch.fnmatchcase(bare, p) for p in only)


def remove(storage: Storage, tag: str) -> None:
    """Removes a checkpoint, its manifest first, so that a partly removed one is no checkpoint."""
    mine = [k for k in storage.listed() if k.startswith(f"{tag}/")]
    storage.delete(sorted(mine, key=lambda k: k != f"{tag}/{NAME}"))
    storage.tidy(tag)


def remove_leftovers(storage: Storage, tag: str, but: Manifest) -> None:
    """Removes files that earlier saves left under `tag`."""
    mine = (k for k in storage.listed() if k.startswith(f"{tag}/data-"))
    kept = {f"{tag}/{file}" for file in but.files()}
    storage.delete(k for k in mine if k not in kept and DATA.fullmatch(k.partition("/")[2]))


def metrics_text(manifests: Iterable[Manifest]) -> str:
    """The names of all metrics in `manifests`, as text."""
    return ", ".join(sorted({name for m in manifests for name in m.metrics})) or "none"


def prune(keep: int | Keep, root: Root = ROOT) -> list[str]:
    """Removes the checkpoints below `root` that `keep` does not select, and returns their tags.
    Raises UsageError if it asks for the best by a metric that none has."""
    storage, policy = Storage(root), keep_of(keep)
    if policy is None:
        raise unfit("checkpoint.prune", "keep", keep, "give a number, or checkpoint.Keep(...)")
    found, _ = manifests(storage)
    if policy.best and found and not policy.rated(found):
        raise UsageError(
            f"checkpoint.prune: no checkpoint in {storage.name!r} has the metric {policy.metric!r}",
            known=metrics_text(found),
            fix=f"name another one for best={policy.best}, or leave that out: nothing was removed",
        )
    kept = policy.stay(found)
    gone = [m.tag for m in found if m.tag not in kept]
    for tag in gone:
        remove(storage, tag)
    return gone


def age_text(created_s: float, now_s: float | None = None) -> str:
    """The age of a checkpoint as readable text.

    >>> age_text(0, 7200)
    '2 h ago'
    """
    past = max(0.0, (time.time() if now_s is None else now_s) - created_s)
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if past >= size:
            return f"{past / size:.0f} {word} ago"
    return f"{past:.0f} s ago"


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats. Raises UsageError for a value that is no number."""
    found = {}
    fix = 'give a dict, such as {"loss": 2.5}'
    for name, value in mapping("checkpoint", "metrics", metrics or {}, fix).items():
        try:
            found[str(name)] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError):
            raise unfit("checkpoint", f"metrics[{name!r}]", value, "give a number") from None
    return found


def see_metric(policy: Keep | None, metrics: Mapping[str, float]) -> None:
    """Raises UsageError if the policy rates by a metric that is not in `metrics`."""
    if policy is not None and policy.best and metrics and policy.metric not in metrics:
        raise UsageError(
            f"checkpoint.save: metrics has no {policy.metric!r}, by which best={policy.best} stay",
            metrics=nearest(policy.metric, metrics),
            fix="name one of them, Keep(metric=...), or leave out metrics= where it is not known",
        )
