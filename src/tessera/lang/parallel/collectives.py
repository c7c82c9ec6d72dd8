"""The collectives of `dist`: `all_reduce`, `all_gather`, `all_to_all`, `send`, `recv` and others.

In the global view they change a layout and complete pending sums. In a local body they are literal:
each device passes its own block, and the result is computed from all blocks. For example,
`all_reduce` of 1.0 over four devices is 4.0 in a local body; in the global view 1.0 is one value. A
collective over an axis that is not local to the body has its global meaning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from ...core.checks import axes_of, shown, unfit, whole
from ...core.declared import Flag, Integer, OneOf
from ...core.devices import process_count
from ...core.dtypes import bool_, summed
from ...core.errors import (
    LayoutError,
    ShapeError,
    StrategyWarning,
    UsageError,
    lines_up,
    warn_no_effect,
)
from ...core.layout import PARTIAL_KINDS, Dim, Factor, TensorType, shard_count, unknown_axis
from ...core.reshard import completed, gathered
from ...core.value_checks import is_whole
from ..math import functions
from ..math.shape import one_dim
from ..record.determinism import sums_in_order
from ..record.double_sums import check_sum
from ..record.join import see_alike
from ..record.local_view import NeedsRank, pending, view
from ..record.operands import as_tensor
from ..record.recorder import current
from ..record.tree import flatten, tree_map
from ..value.engine import engine
from ..value.tensor import Tensor
from .local import ranks
from .local.collectives import (
    collected,
    divided,
    exchanged,
    only,
    permuted,
    rank_along,
    reduced,
    scattered,
    sent,
    view_now,
)

Axis = str | Sequence[str] | None
Reduction = Annotated[str, OneOf(*PARTIAL_KINDS, "mean")]


# -- reductions -----------------------------------------------------------------------------------
def all_reduce(
    x: Any, axis: Axis = None, op: Reduction | None = None, deterministic: Flag = False
) -> Any:
    """The sum, max, min or mean over the devices along `axis`, as one value on each of them.

    `x` is a tensor or a tree of tensors. In a local body the values of the devices are reduced by
    `op` (None: sum); `axis` None is all local axes. Bools are summed in int32, as by `ts.sum`;
    their "max" is True if any is True. In the global view pending sums are completed and a complete
    value stays as it is; `axis` None is every axis with a pending sum, and `op` ("sum", "max",
    "min") must be the pending reduction. None accepts any reduction. "mean" accepts a sum: the mean
    over devices of a complete value is the value itself.

    With `deterministic` this sum is added in a fixed order over the places of `axis`, at the level
    "fast" too (guide 2, 4): in the order that `dist.deterministic` chose, else adjacent pairs
    first, on any fold of the mesh, and by no other algorithm. The level still decides how the
    summands and the gradient are computed. Raises UsageError if `op` is unknown, LayoutError if
    another reduction is pending.

    >>> import tessera as ts
    >>> from tessera import dist, op
    >>> @op.kernel
    ... def count(x):
    ...     return dist.all_reduce(x * 0 + 1.0, axis="dp")
    >>> with dist.Mesh(("dp",), devices=4):
    ...     count(ts.tensor(7.0)).item(), dist.all_reduce(ts.tensor(7.0), axis="dp").item()
    (4.0, 7.0)
    """

    def reduce(t: Tensor) -> Tensor:
        own, rest = _axes("all_reduce", axis, t, t.type.partial_axes)
        if own:
            if op in (None, "sum", "mean"):
                t = _counted(t)
                _check_sum("all_reduce", t, own, op == "mean")
            key = ("all_reduce", own, op or "sum")
            t = ranks.issue(key, t, lambda block: reduced(block, own, op or "sum"))
        return _completed(t, rest, op) if rest else t

    with sums_in_order("all_reduce", deterministic):
        return _each("all_reduce", x, reduce)


def _completed(t: Tensor, axes: tuple[str, ...], op: str | None) -> Tensor:
    """Completes the pending reductions of `t` over `axes`: the global meaning of `all_reduce`."""
    may = {None: PARTIAL_KINDS, "mean": ("sum",)}.get(op, (op,))
    other = [f"{k} over {a}" for a, k in t.type.partial if a in axes and k not in may]
    if other:
        raise LayoutError(
            f"all_reduce: a {other[0]} is pending, not a {op}",
            x=t.type,
            fix="leave out op=, or name the kind that is pending",
        )
    return functions.relayout(t, completed(t.type, axes))


def reduce_scatter(
    x: Tensor,
    axis: str | Sequence[str],
    dim: int = 0,
    op: Annotated[str, OneOf("sum", "mean")] = "sum",
    deterministic: Flag = False,
) -> Tensor:
    """The sum (or mean) over the devices along `axis`; each device keeps its part of `dim`.

    In the global view the pending sum is completed and the result is split over `axis`.
    `deterministic` fixes the order of this sum as in `all_reduce`. Raises UsageError if `op` is not
    "sum" or "mean", ShapeError if the local size of `dim` does not divide by the number of devices.
    """
    x = as_tensor(x)
    d = one_dim("reduce_scatter", x, dim)
    axes, other_axes = _axes("reduce_scatter", axis, x, ())
    with sums_in_order("reduce_scatter", deterministic):
        if axes:
            _check_sum("reduce_scatter", x, axes, op == "mean")
            key = ("reduce_scatter", axes, d, op)
            x = ranks.issue(key, _counted(x), lambda block: scattered(block, axes, d, op))
        if other_axes:
            x = functions.relayout(
                x, split_over(gathered(completed(x.type, other_axes), other_axes), d, other_axes)
            )
    return x


def _counted(x: Tensor) -> Tensor:
    """Returns bools as integers, in the dtype in which `ts.sum` sums them; other tensors as they
    are."""
    return functions.cast(x, summed(bool_)) if x.dtype is bool_ else x


# -- gathering, scattering, exchanging ------------------------------------------------------------
def all_gather(x: Any, axis: Axis = None, dim: int | None = None) -> Any:
    """The blocks of all devices along `axis`, joined along `dim`, on each of them.

    `x` is a tensor or a tree of tensors. `dim` None is 0, and in a tensor-parallel body the last
    dim. In the global view the dims that are split over `axis` (None: over any axis) become whole
    on each device. Raises ShapeError if `x` is a scalar in a local body.
    """

    def gather(t: Tensor) -> Tensor:
        own, rest = _axes("all_gather", axis, t, t.type.split_axes)
        if own:
            d = _dim("all_gather", t, dim)
            t = ranks.issue(("all_gather", own, d), t, lambda block: collected(block, own, d))
        return functions.relayout(t, gathered(t.type, rest)) if rest else t

    return _each("all_gather", x, gather)


def gather(x: Tensor, axis: str | Sequence[str], root: int = 0, dim: int | None = None) -> Tensor:
    """The blocks of all devices along `axis`, joined along `dim`, for the device at place `root`.

    It runs as an all_gather, so every device gets the result; an OptionWarning says so for a `root`
    other than 0. Raises UsageError if `root` is not a place along `axis`.
    """
    if _place("gather", root, axis):
        warn_no_effect(
            f"gather: root={root}",
            "every device gets the result",
            means="it runs as an all_gather",
            fix="leave out root, or write dist.all_gather",
        )
    out: Tensor = all_gather(as_tensor(x), axis, dim)
    return out


def broadcast(x: Any, axis: str | Sequence[str], root: int = 0) -> Any:
    """The block of the device at place `root` along `axis`, on each device. `x` may be a tree.

    In the global view a value is the same on all devices already and stays as it is. Raises
    UsageError if `root` is not a place along `axis`.
    """

    def send(t: Tensor) -> Tensor:
        own, _ = _axes("broadcast", axis, t, ())
        if not own:
            return t
        key = ("broadcast", own, root)
        return ranks.issue(key, t, lambda block: sent(block, own, root))

    root = _place("broadcast", root, axis)
    return _each("broadcast", x, send)


def scatter(x: Tensor, axis: str | Sequence[str], root: int = 0, dim: int = 0) -> Tensor:
    """Splits the value of the device at place `root` along `dim`, one part per device of `axis`.

    In the global view `dim` becomes split over `axis`. Raises UsageError if `root` is not a place
    along `axis`, ShapeError if `dim` does not divide.
    """
    root = _place("scatter", root, axis)
    x = as_tensor(x)
    d = one_dim("scatter", x, dim)
    own, rest = _axes("scatter", axis, x, ())
    if own:
        key = ("scatter", own, root, d)
        x = ranks.issue(key, x, lambda block: scattered(only(block, own, root), own, d, "sum"))
    return shard(x, rest, d) if rest else x


def all_to_all(
    x: Tensor, axis: str | Sequence[str], split_dim: int = 0, concat_dim: int = 0
) -> Tensor:
    """Splits each device's block along `split_dim` and sends one part to each device along `axis`.

    Each device joins the received parts along `concat_dim`, in the order of the senders. In the
    global view the dim that is split over `axis` becomes whole and `split_dim` is split instead.
    Raises ShapeError if the local `split_dim` does not divide by the number of devices.
    """
    x = as_tensor(x)
    i, j = one_dim("all_to_all", x, split_dim), one_dim("all_to_all", x, concat_dim)
    own, rest = _axes("all_to_all", axis, x, ())
    if own:
        key = ("all_to_all", own, i, j)
        x = ranks.issue(key, x, lambda block: exchanged(block, own, i, j))
    return shard(x, rest, i) if rest else x


def permute(x: Tensor, axis: str | Sequence[str], pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Sends blocks between devices of a local body; a pair is (from place, to place) along `axis`.

    A place may send once and receive once; a place that receives nothing has zeros. Raises
    UsageError if `pairs` names a place twice or one that does not exist, or if it is called in the
    global view.
    """
    x = as_tensor(x)
    own, rest = _axes("permute", axis, x, ())
    if rest or not own:
        raise _local_only("permute")
    n = shard_count(own, x.type.sizes if x.mesh is not None else view_now().mesh.sizes)
    given = _pairs(pairs, n)
    return ranks.issue(("permute", own, given), x, lambda block: permuted(block, own, given))


def shift(x: Tensor, axis: str | Sequence[str], by: Integer = 1) -> Tensor:
    """The block of the device `by` places before this one along `axis`, in a ring.

    Raises UsageError in the global view, or if `by` is no whole number.
    """
    own, _ = _axes("shift", axis, as_tensor(x), ())
    if not own:
        raise _local_only("shift")
    n = shard_count(own, view_now().mesh.sizes)
    return permute(x, axis, [(i, (i + by) % n) for i in range(n)])


def _pairs(pairs: object, n: int) -> tuple[tuple[int, int], ...]:
    """Returns the (from, to) pairs as integers. Raises UsageError if a place does not exist, or
    sends or receives twice."""
    try:
        given = tuple((a, b) for a, b in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        given = ((None, None),)
    if not all(is_whole(p) for pair in given for p in pair):
        raise unfit("permute", "pairs", pairs, "give (from, to) pairs, e.g. [(0, 1), (1, 0)]")
    given = tuple((int(a), int(b)) for a, b in given)
    places = [p for pair in given for p in pair]
    twice = len({a for a, _ in given}) < len(given) or len({b for _, b in given}) < len(given)
    if twice or any(not 0 <= p < n for p in places):
        raise UsageError(
            f"permute: {shown(pairs)} are no hand-overs between {n} devices",
            fix=f"name places from 0 to {n - 1}, each at most once as giver and as taker",
        )
    return given


# -- point to point, and barriers -----------------------------------------------------------------
def send(x: Tensor, to: int, name: str = "") -> None:
    """Sends `x` to the device of rank `to` in a local body, where `recv` receives it.

    Raises UsageError if there is no such rank, or in the global view.
    """
    ranks.send(as_tensor(x), _peer("send", to), name)


def recv(source: int, name: str = "") -> Tensor:
    """The value that the device of rank `source` in a local body sends to this device under `name`.

    Values of one sender and name arrive in the order in which they were sent. Raises UsageError if
    there is no such rank, or in the global view.
    """
    return ranks.recv(_peer("recv", source), name)


def recv_from(owner: int, name: str) -> Tensor:
    """The value that the device of rank `owner` returns from a local body under `name`.

    This is the collective of ZeRO in guide 4. `name` is the last key of the value's path in the
    returned tree. Raises UsageError if there is no such rank.
    """
    return ranks.recv_from(_peer("recv_from", owner), name)


def barrier() -> None:
    """Returns when all have reached this line: the devices of a local body, or, outside of
    functions, the processes of the run.

    A program runs its collectives in the same order on all of its devices, so in a function the
    check is made when it is recorded and costs nothing when it runs. Processes wait for each other,
    not for pending work of their devices. Raises BackendError after the timeout of collectives; the
    error names the processes that did not arrive.
    """
    seen = view()
    if seen is not None and seen.rank is not None:
        ranks.mark(("barrier", seen.axes))
    elif seen is None and current() is None and process_count() > 1:
        engine().barrier()


# -- changing the layout, in both views -----------------------------------------------------------
def shard(x: Tensor, axis: str | Sequence[str], dim: int = 0) -> Tensor:
    """`x` with `dim` split over `axis` too; if `axis` split another dim, an all_to_all moves it.

    In a local body: this device's part of a value that all devices hold. Raises ShapeError if the
    size of `dim` does not divide by the number of devices there.
    """
    x = as_tensor(x)
    d = one_dim("shard", x, dim)
    own, axes = _axes("shard", axis, x, ())
    if own:
        n = divided("shard", x, d, own)
        size = x.shape[d] // n
        at = rank_along(own) * size + functions.arange(size)
        x = functions.take(x, at, d)
    return functions.relayout(x, split_over(gathered(x.type, axes), d, axes)) if axes else x


def split_over(t: TensorType, dim: int, axes: Sequence[str]) -> TensorType:
    """Returns `t` with `dim` split over `axes`, below the axes that split it already. If `axes` do
    not divide the local size evenly, they get a factor of their own, so that they can be gathered
    without the others."""
    old: Dim = t.dims[dim]
    last = old[-1] if old[-1].axes or len(old) == 1 else old[0]
    above, uneven = (
        shard_count(last.axes, t.sizes),
        last.size % shard_count((*last.axes, *axes), t.sizes),
    )
    if uneven and not last.size % above:
        more: Dim = (Factor(above, last.axes), Factor(last.size // above, tuple(axes)))
    else:
        more = (Factor(last.size, (*last.axes, *axes)),)
    new = tuple(part for f in old for part in (more if f is last else (f,)))
    return t.with_dims((*t.dims[:dim], new, *t.dims[dim + 1 :]))


def over_blocks(name: str, x: Tensor) -> Tensor:
    """Returns `x`, a sum over the device's block of a weight, with the sums of the weight's other
    blocks pending. In a body without a strategy the sum stays each device's own, and one
    StrategyWarning says so."""
    local_view, recorder = view(), current()
    axes = [a for a in x.type.varying if local_view is not None and a in local_view.axes]
    if local_view is None or recorder is None or not axes:
        return x
    blocks = [a for a in axes if a in local_view.tensor]
    other = [a for a in axes if a not in blocks]
    if other and (name, *other) not in local_view.told_of:
        local_view.told_of.add((name, *other))
        warnings.warn(
            f"{name}: what is added up differs along {', '.join(map(repr, other))}, so each device"
            " has a result of its own\n  reduce gradients before, and of blocks of one weight add"
            f" up the squares: dist.all_reduce({name}(x) ** 2, {other[0]!r}) ** 0.5",
            StrategyWarning,
            stacklevel=lines_up(),
        )
    return pending(recorder, x, blocks) if blocks else x


# -- helpers --------------------------------------------------------------------------------------
def _check_sum(name: str, x: Tensor, axes: Sequence[str], mean: bool) -> None:
    seen = view_now()
    if x._node is not None:
        check_sum(name, x._node, axes, mean, seen.slopes, seen.told)


def _local_only(name: str) -> UsageError:
    return UsageError(
        f"{name}: there are no devices to hand on between in the global view",
        fix="this is local: write it in an @op.kernel, or in a @ts.distribute over an axis of"
        " mesh_axes= that is no data axis of its strategy",
    )


def _peer(name: str, rank: object) -> int:
    """Returns a rank of the local body as a number. Raises UsageError if it does not exist, and
    NeedsRank if the body must be recorded for each rank first."""
    seen = view()
    if seen is None:
        raise _local_only(name)
    if isinstance(rank, Tensor):
        rank = int(rank)
    found = whole(name, "rank", rank, 0, seen.size - 1)
    if seen.rank is None:
        raise NeedsRank
    return found


def _place(name: str, root: object, axis: object) -> int:
    """Returns a place along `axis` as a number. Raises UsageError if it does not exist."""
    if isinstance(root, Tensor):
        root = int(root)
    seen = view()
    if seen is None:
        axes_of(name, axis)
    n = (
        None
        if seen is None
        else shard_count([a for a in axes_of(name, axis) if a in seen.axes], seen.mesh.sizes)
    )
    return whole(name, "root", root, 0, None if n is None else n - 1)


def _axes(
    name: str, axis: object, x: Tensor, default: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (axes with a literal meaning here, axes with their global meaning)."""
    seen = view()
    if axis is None:
        return (seen.axes, ()) if seen is not None else ((), tuple(default))
    axes = axes_of(name, axis)
    if seen is None:
        return (), axes
    for a in axes:
        if a not in seen.mesh.sizes:
            raise unknown_axis(a, seen.mesh)
    return tuple(a for a in axes if a in seen.axes), tuple(a for a in axes if a not in seen.axes)


def _dim(name: str, x: Tensor, dim: int | None) -> int:
    if not x.ndim:
        raise ShapeError(
            f"{name}: a scalar has no dim to join along", x=x.type, fix="reshape it to (1,) first"
        )
    return one_dim(name, x, view_now().dim if dim is None else dim)


def _each(name: str, x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if not isinstance(x, (Tensor, dict, list, tuple)) and view() is not None:
        return change(as_tensor(x))
    if view() is None:
        see_alike(name, flatten(x)[0])
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, x)
