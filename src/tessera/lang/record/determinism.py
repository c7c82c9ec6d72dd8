"""Bitwise reproducible programs: `dist.deterministic(...)` and `dist.set_deterministic(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated

from ...core.context import Changes, put, replaced, settings
from ...core.contexts import within
from ...core.declared import Flag, OneOf
from ...core.errors import UsageError
from ...core.options import LEVELS
from .recorder import need_before_recording

ORDERS = {"binary": "binary", "fixed": "binary", "ring": "ring"}
Order = Annotated[str | None, OneOf(*ORDERS, None)]
Level = Annotated[str | None, OneOf(*LEVELS, None)]


@within(
    "dist.deterministic",
    "write with dist.deterministic(...):, or dist.set_deterministic() for all that follows",
)
@contextmanager
def deterministic(reduce_tree: Order = None, *, level: Level = None) -> Iterator[None]:
    """A context whose programs give the same bits again (guide 1, 7.8; guide 2, 4).

    `level` is the guarantee: "fast" none; "run_to_run" for the same program on the same devices;
    "mesh_invariant" on every fold of the logical mesh too, which a CPU keeps and a GPU refuses.
    None is the strongest level that the devices keep: "mesh_invariant" on a CPU, and on a GPU
    "run_to_run", with one `ts.EngineWarning`. Sums over devices are added in the order
    `reduce_tree` at both levels: "binary" (or "fixed", or None) adds adjacent pairs of places,
    "ring" one place after the other. Raises UsageError if either is unknown, or an order is named
    for "fast".
    """
    chosen = _chosen("deterministic", reduce_tree, level)
    with replaced(**chosen):
        yield


def set_deterministic(on: Flag = True, reduce_tree: Order = None, *, level: Level = None) -> None:
    """Sets `dist.deterministic` from this call on; `on=False` ends it.

    Raises UsageError as `dist.deterministic` does.
    """
    chosen = _chosen("set_deterministic", reduce_tree, level, on)
    put(**chosen)


def sums_in_order(caller: str, on: bool) -> AbstractContextManager[object]:
    """A context whose sums over devices have the fixed order at every level, if the argument `on`
    of `caller` or an enclosing context asks for it."""
    return replaced(ordered=on or settings().ordered)


def _chosen(caller: str, reduce_tree: str | None, level: str | None, on: bool = True) -> Changes:
    """The settings that `caller` changes. Raises UsageError if an order is named for "fast"."""
    if level == "fast" and reduce_tree is not None:
        raise UsageError(
            f"{caller}: at the level fast no sum over devices has a fixed order",
            reduce_tree=repr(reduce_tree),
            fix='ask for level="run_to_run", or leave out reduce_tree',
        )
    settled: Changes = {
        "determinism": (level or "mesh_invariant") if on else "fast",
        "order": ORDERS[reduce_tree or "binary"],
    }
    need_before_recording(caller, **settled)
    return {**settled, "level_required": on and level == "mesh_invariant"}
