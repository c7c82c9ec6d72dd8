"""Which bits are the same again? `dist.deterministic(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.checks import flag, one_of
from ..core.context import Changes, put, replaced
from ..core.options import LEVELS
from ..core.renamed import renamed_arguments
from .record import need_before_recording

ORDERS = {"binary": "binary", "fixed": "binary", "ring": "ring"}


@renamed_arguments("dist.deterministic", promise="level")
@contextmanager
def deterministic(reduce_tree: str = "binary", *, level: str = "mesh_invariant") -> Iterator[None]:
    """A context whose programs give the same bits again (guide 1, 7.8; guide 2, 4).

    `level` says where: "fast" nowhere for certain; "run_to_run" for the same program on the same
    devices; "mesh_invariant" on every fold of the logical mesh. At the last, sums over devices are
    added in the order `reduce_tree`: "binary" (or "fixed") adds adjacent pairs of places, "ring"
    one place after the other. Raises UsageError if either is unknown.
    """
    _checked(reduce_tree, level)
    chosen: Changes = {"determinism": level, "order": ORDERS[reduce_tree]}
    need_before_recording("deterministic", **chosen)
    with replaced(**chosen):
        yield


@renamed_arguments("dist.set_deterministic", promise="level")
def set_deterministic(
    on: bool = True, reduce_tree: str = "binary", *, level: str = "mesh_invariant"
) -> None:
    """`dist.deterministic` from this call on; `on=False` ends it.

    Raises UsageError if `reduce_tree` or `level` is unknown.
    """
    flag("set_deterministic", "the choice", on)
    _checked(reduce_tree, level)
    chosen: Changes = {"determinism": level if on else "fast", "order": ORDERS[reduce_tree]}
    need_before_recording("set_deterministic", **chosen)
    put(**chosen)


def _checked(reduce_tree: object, level: object) -> None:
    one_of("deterministic", "reduce_tree", reduce_tree, ORDERS)
    one_of("deterministic", "level", level, LEVELS)
