"""What is promised of the bits? `dist.deterministic(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.checks import flag, one_of
from ..core.context import Changes, put, replaced
from ..core.options import PROMISES
from .record import need_before_recording

ORDERS = {"binary": "binary", "fixed": "binary", "ring": "ring"}


@contextmanager
def deterministic(
    reduce_tree: str = "binary", *, promise: str = "mesh_invariant"
) -> Iterator[None]:
    """A context whose programs keep a promise about the bits of results (guide 1, 7.8; guide 2, 4).

    `promise` "fast" promises nothing; "run_to_run" gives the same bits for the same program on the
    same devices; "mesh_invariant" gives the same bits on every fold of the logical mesh. Sums over
    devices are then added in the order `reduce_tree`: "binary" (or "fixed") adds adjacent pairs of
    places, "ring" one place after the other. Raises UsageError if either is unknown.
    """
    _checked(reduce_tree, promise)
    chosen: Changes = {"promise": promise, "order": ORDERS[reduce_tree]}
    need_before_recording("deterministic", **chosen)
    with replaced(**chosen):
        yield


def set_deterministic(
    on: bool = True, reduce_tree: str = "binary", *, promise: str = "mesh_invariant"
) -> None:
    """`dist.deterministic` from this call on; `on=False` ends it.

    Raises UsageError if `reduce_tree` or `promise` is unknown.
    """
    flag("set_deterministic", "the choice", on)
    _checked(reduce_tree, promise)
    chosen: Changes = {"promise": promise if on else "fast", "order": ORDERS[reduce_tree]}
    need_before_recording("set_deterministic", **chosen)
    put(**chosen)


def _checked(reduce_tree: object, promise: object) -> None:
    one_of("deterministic", "reduce_tree", reduce_tree, ORDERS)
    one_of("deterministic", "the promise", promise, PROMISES)
