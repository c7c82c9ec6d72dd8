"""Ranks that disagree: a corpus of programs that would hang or give garbage, each with its whole
error message."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.core.layout import parse_type

LINE = dist.Mesh(("dp",), devices=4)
GRID = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
ON = {LINE: parse_type("f32[8@dp, 4]", LINE), GRID: parse_type("f32[8@dp, 4@tp]", GRID)}
HEAD = "ranks issue different collectives:"
ALL = "let all ranks raise, or none: check what all of them know"
ORDER = "issue the same collectives in the same order on every rank"
Body = Callable[[ts.Tensor], Any]
ROWS: list[tuple[Body, dist.Mesh, str]] = []


def row(text: str, mesh: dist.Mesh = LINE) -> Callable[[Body], Body]:
    """Adds a program and its expected message. `{here}` and `{there}` are its lines, `{head}`
    begins most messages, and `{order}` and `{all_raise}` are the advice."""

    def add(fn: Body) -> Body:
        ROWS.append((fn, mesh, text))
        return fn

    return add


def rank() -> Any:
    return ts.mesh.current().rank


def helper(x: ts.Tensor, deep: bool) -> ts.Tensor:
    return dist.all_reduce(x, "dp") if deep else x  # helper


# -- the axis, the group --------------------------------------------------------------------------
@row(
    """{head} the 1st of each does not match
  ranks 0, 1 : all_reduce over dp sum f32[4, 2] varying dp,tp at {here}
  ranks 2, 3 : all_reduce over tp sum f32[4, 2] varying dp,tp at {here}
  fix        : {order}""",
    GRID,
)
def other_axis(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp" if rank() < 2 else "tp")  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : all_reduce over dp sum f32[4, 2] varying dp,tp at {here}
  ranks 1 to 3 : all_reduce over dp, tp sum f32[4, 2] varying dp,tp at {here}
  fix          : {order}""",
    GRID,
)
def one_axis_or_both(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, ("dp", "tp") if rank() else "dp")  # here


@row(
    """{head} the 1st of each does not match
  ranks 0 to 2 : all_gather over tp, dp 0 f32[4, 2] varying dp,tp at {here}
  rank 3       : all_gather over dp, tp 0 f32[4, 2] varying dp,tp at {here}
  fix          : {order}""",
    GRID,
)
def axes_in_another_order(x: ts.Tensor) -> Any:
    axes = ("dp", "tp") if rank() == 3 else ("tp", "dp")
    return dist.all_gather(x, axes)  # here


@row(
    """{head} the 1st of each does not match
  ranks 0, 2 : all_gather over dp 0 f32[4, 2] varying dp,tp at {there}
  ranks 1, 3 : all_gather over tp 0 f32[4, 2] varying dp,tp at {here}
  fix        : {order}""",
    GRID,
)
def group_by_own_place(x: ts.Tensor) -> Any:
    if rank() % 2:
        return dist.all_gather(x, "tp")  # here
    return dist.all_gather(x, "dp")  # there


@row(
    """{head} the 1st of each does not match
  ranks 0, 2, 3 : all_reduce over dp sum f32[4, 2] varying dp,tp at {here}
  rank 1        : all_reduce over tp sum f32[4, 2] varying dp,tp at {here}
  fix           : {order}""",
    GRID,
)
def first_rows_then_columns(x: ts.Tensor) -> Any:
    first, second = ("dp", "tp") if rank() != 1 else ("tp", "dp")
    return dist.all_reduce(dist.all_reduce(x, first), second)  # here


# -- the kind, the reduction ----------------------------------------------------------------------
@row(
    """{head} the 1st of each does not match
  ranks 0, 1, 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  rank 2        : all_reduce over dp min f32[2, 4] varying dp at {here}
  fix           : {order}""",
)
def sum_or_least(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp", op="min" if rank() == 2 else "sum")  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : all_reduce over dp sum f32[2, 4] varying dp at {here}
  ranks 1 to 3 : all_reduce over dp mean f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def sum_or_mean(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp", op="mean" if rank() else "sum")  # here


@row(
    """{head} the 1st of each does not match
  ranks 0 to 2 : all_reduce over dp min f32[2, 4] varying dp at {here}
  rank 3       : all_reduce over dp max f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def most_or_least(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp", op="max" if rank() > 2 else "min")  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : reduce_scatter over dp 0 sum f32[4, 4] varying dp at {here}
  ranks 1 to 3 : all_reduce over dp sum f32[4, 4] varying dp at {there}
  fix          : {order}""",
)
def reduced_or_scattered(x: ts.Tensor) -> Any:
    if rank() == 0:
        return dist.reduce_scatter(ts.concat([x, x]), "dp")  # here
    return dist.all_reduce(ts.concat([x, x]), "dp")[:1]  # there


@row(
    """{head} the 1st of each does not match
  ranks 0 to 2 : all_gather over dp 0 f32[2, 4] varying dp at {here}
  rank 3       : all_to_all over dp 1 0 f32[2, 4] varying dp at {there}
  fix          : {order}""",
)
def gathered_or_exchanged(x: ts.Tensor) -> Any:
    if rank() < 3:
        return dist.all_gather(x, "dp")  # here
    return dist.all_to_all(x, "dp", 1, 0)  # there


@row(
    """{head} the 1st of each does not match
  rank 0       : broadcast over dp 0 f32[2, 4] varying dp at {here}
  ranks 1 to 3 : all_gather over dp 0 f32[2, 4] varying dp at {there}
  fix          : {order}""",
)
def broadcast_or_gathered(x: ts.Tensor) -> Any:
    if rank() == 0:
        return dist.broadcast(x, "dp")  # here
    return dist.all_gather(x, "dp")[:2]  # there


@row(
    """{head} the 1st of each does not match
  rank 0       : permute over dp ((0, 1), (1, 2), (2, 3), (3, 0)) f32[2, 4] varying dp at {there}
  ranks 1 to 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def handed_on_or_summed(x: ts.Tensor) -> Any:
    if rank():
        return dist.all_reduce(x, "dp")  # here
    return dist.shift(x, "dp")  # there


@row(
    """{head} the 1st of each does not match
  ranks 0, 2, 3 : permute over dp ((0, 1), (1, 2), (2, 3), (3, 0)) f32[2, 4] varying dp at {here}
  rank 1        : permute over dp ((0, 2), (1, 3), (2, 0), (3, 1)) f32[2, 4] varying dp at {here}
  fix           : {order}""",
)
def handed_on_by_another_step(x: ts.Tensor) -> Any:
    return dist.shift(x, "dp", by=2 if rank() == 1 else 1)  # here


@row(
    """{head} the 1st of each does not match
  ranks 0, 1 : permute over dp ((0, 1), (1, 0)) f32[2, 4] varying dp at {here}
  ranks 2, 3 : permute over dp ((2, 3), (3, 2)) f32[2, 4] varying dp at {here}
  fix        : {order}""",
)
def handed_to_others(x: ts.Tensor) -> Any:
    pairs = [(0, 1), (1, 0)] if rank() < 2 else [(2, 3), (3, 2)]
    return dist.permute(x, "dp", pairs)  # here


@row(
    """{head} the 1st of each does not match
  rank 0 : broadcast over dp 0 f32[2, 4] varying dp at {here}
  rank 1 : broadcast over dp 1 f32[2, 4] varying dp at {here}
  rank 2 : broadcast over dp 2 f32[2, 4] varying dp at {here}
  rank 3 : broadcast over dp 3 f32[2, 4] varying dp at {here}
  fix    : {order}""",
)
def other_root(x: ts.Tensor) -> Any:
    return dist.broadcast(x, "dp", root=rank())  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : scatter over dp 0 0 f32[4, 4] varying dp at {here}
  ranks 1 to 3 : scatter over dp 1 0 f32[4, 4] varying dp at {here}
  fix          : {order}""",
)
def scattered_from_itself(x: ts.Tensor) -> Any:
    return dist.scatter(ts.concat([x, x]), "dp", root=min(rank(), 1))  # here


# -- shape, dtype, dim ----------------------------------------------------------------------------
@row(
    """{head} the 1st of each does not match
  rank 0 : all_reduce over dp sum f32[1] varying dp at {here}
  rank 1 : all_reduce over dp sum f32[2] varying dp at {here}
  rank 2 : all_reduce over dp sum f32[3] varying dp at {here}
  rank 3 : all_reduce over dp sum f32[4] varying dp at {here}
  fix    : {order}""",
)
def rows_by_rank(x: ts.Tensor) -> Any:
    return dist.all_reduce(ts.ones((int(rank()) + 1,)), "dp")  # here


@row(
    """{head} the 1st of each does not match
  ranks 0, 2, 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  rank 1        : all_reduce over dp sum f32[1, 2, 4] varying dp at {here}
  fix           : {order}""",
)
def one_dim_more(x: ts.Tensor) -> Any:
    return dist.all_reduce(x[None] if rank() == 1 else x, "dp")  # here


@row(
    """{head} the 1st of each does not match
  ranks 0 to 2 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  rank 3       : all_reduce over dp sum f32[4, 2] varying dp at {here}
  fix          : {order}""",
)
def turned(x: ts.Tensor) -> Any:
    return dist.all_reduce(x.T if rank() == 3 else x, "dp")  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : all_gather over dp 0 f32[2, 4] varying dp at {here}
  ranks 1 to 3 : all_gather over dp 0 f32[4, 2] varying dp at {here}
  fix          : {order}""",
)
def same_size_other_shape(x: ts.Tensor) -> Any:
    return dist.all_gather(x.reshape(4, 2) if rank() else x, "dp")  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : all_reduce over dp sum f16[2, 4] varying dp at {here}
  ranks 1 to 3 : all_reduce over dp sum bf16[2, 4] varying dp at {here}
  fix          : {order}""",
)
def half_precision(x: ts.Tensor) -> Any:
    y = x.to(ts.f16) if rank() == 0 else x.to(ts.bf16)
    return dist.all_reduce(y, "dp").to(ts.f32)  # here


@row(
    """{head} the 1st of each does not match
  ranks 0, 1 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  ranks 2, 3 : all_reduce over dp sum i32[2, 4] varying dp at {here}
  fix        : {order}""",
)
def whole_numbers(x: ts.Tensor) -> Any:
    y = x.to(ts.int32) if rank() > 1 else x
    return dist.all_reduce(y, "dp").to(ts.f32)  # here


@row(
    """{head} the 1st of each does not match
  ranks 0, 1, 3 : all_gather over dp 0 f32[2, 4] varying dp at {here}
  rank 2        : all_gather over dp 1 f32[2, 4] varying dp at {here}
  fix           : {order}""",
)
def along_another_dim(x: ts.Tensor) -> Any:
    return dist.all_gather(x, "dp", dim=1 if rank() == 2 else 0)  # here


@row(
    """{head} the 1st of each does not match
  ranks 0, 2 : reduce_scatter over dp 0 sum f32[4, 4] varying dp at {here}
  ranks 1, 3 : reduce_scatter over dp 1 sum f32[4, 4] varying dp at {here}
  fix        : {order}""",
)
def scattered_along_another_dim(x: ts.Tensor) -> Any:
    y = ts.concat([x, x])
    return dist.reduce_scatter(y, "dp", dim=int(rank()) % 2)  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : all_to_all over dp 1 0 f32[4, 4] varying dp at {here}
  ranks 1 to 3 : all_to_all over dp 0 1 f32[4, 4] varying dp at {here}
  fix          : {order}""",
)
def exchanged_the_other_way(x: ts.Tensor) -> Any:
    y = ts.concat([x, x])
    return dist.all_to_all(y, "dp", *((0, 1) if rank() else (1, 0)))  # here


# -- missing, extra, order ------------------------------------------------------------------------
@row(
    """{head} the 1st of each does not match
  ranks 0 to 2 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  rank 3       : all_gather over dp 0 f32[2, 4] varying dp at {there}
  fix          : {order}""",
)
def the_first_is_missing(x: ts.Tensor) -> Any:
    if rank() != 3:
        x = dist.all_reduce(x, "dp")  # here
    return dist.all_gather(x, "dp")  # there


@row(
    """{head} the 2nd of each does not match
  rank 0       : none
  ranks 1 to 3 : all_reduce over dp max f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def the_last_is_missing(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank():
        y = dist.all_reduce(y, "dp", op="max")  # here
    return y


@row(
    """{head} the 2nd of each does not match
  ranks 0, 2, 3 : broadcast over dp 0 f32[2, 4] varying dp at {here}
  rank 1        : none
  fix           : {order}""",
)
def one_leaves_early(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() == 1:
        return y
    return dist.broadcast(y, "dp")  # here


@row(
    """{head} the 1st of each does not match
  rank 0       : all_reduce over dp sum f32[] varying dp at {here}
  ranks 1 to 3 : all_reduce over dp max f32[2, 4] varying dp at {there}
  fix          : {order}""",
)
def one_logs_the_norm(x: ts.Tensor) -> Any:
    if rank() == 0:
        norm = dist.all_reduce((x * x).sum(), "dp")  # here
        x = x / norm
    return dist.all_reduce(x, "dp", op="max")  # there


@row(
    """{head} the 1st of each does not match
  ranks 0, 1, 3 : all_reduce over dp sum f32[2, 4] varying dp at {there}
  rank 2        : all_reduce over dp max f32[2, 4] varying dp at {here}
  fix           : {order}""",
)
def swapped(x: ts.Tensor) -> Any:
    a, b = x, x * 2
    if rank() == 2:
        b = dist.all_reduce(b, "dp", op="max")  # here
        a = dist.all_reduce(a, "dp")
    else:
        a = dist.all_reduce(a, "dp")  # there
        b = dist.all_reduce(b, "dp", op="max")
    return a + b


@row(
    """{head} the 1st of each does not match
  rank 0       : all_reduce over dp sum f32[4] varying dp at {here}
  ranks 1 to 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def keys_in_own_order(x: ts.Tensor) -> Any:
    tree = {"w": x, "b": x[0]}
    order = list(tree) if rank() else list(reversed(tree))
    for key in order:
        tree[key] = dist.all_reduce(tree[key], "dp")  # here
    return tree["w"] + tree["b"]


@row(
    """{head} the 2nd of each does not match
  ranks 0 to 2 : all_reduce over dp sum f32[2, 4] varying dp at {there}
  rank 3       : barrier over dp at {here}
  fix          : {order}""",
)
def no_barrier_here(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() == 3:
        dist.barrier()  # here
    return dist.all_reduce(y, "dp")  # there


@row(
    """{head} the 1st of each does not match
  rank 0       : all_gather over dp 0 f32[2, 4] varying dp at {here}
  ranks 1 to 3 : none
  fix          : {order}""",
)
def only_the_first_rank_saves(x: ts.Tensor) -> Any:
    y = x
    if rank() == 0:
        y = dist.gather(x, "dp")  # here
    return y[:2]


@row(
    """{head} the 1st of each does not match
  ranks 0, 2, 3 : all_reduce over dp sum f32[2, 4] varying dp at {helper}
  rank 1        : none
  fix           : {order}""",
)
def in_a_helper(x: ts.Tensor) -> Any:
    return helper(x, deep=rank() != 1)


# -- loops and recursion --------------------------------------------------------------------------
@row(
    """{head} the 1st of each does not match
  rank 0       : none
  ranks 1 to 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def turns_by_rank(x: ts.Tensor) -> Any:
    for _ in range(rank()):
        x = dist.all_reduce(x, "dp")  # here
    return x


@row(
    """{head} the 4th of each does not match
  ranks 0, 1, 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  rank 2        : none
  fix           : {order}""",
)
def one_iteration_less(x: ts.Tensor) -> Any:
    for iteration in range(4):
        if rank() == 2 and iteration == 3:
            break
        x = dist.all_reduce(x, "dp") * 0.5  # here
    return x


@row(
    """{head} the 5th of each does not match
  ranks 0, 2, 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  rank 1        : none
  fix           : {order}""",
)
def one_skips_a_iteration(x: ts.Tensor) -> Any:
    for iteration in range(3):
        if rank() == 1 and iteration == 1:
            continue
        x = dist.all_reduce(x * (iteration + 1), "dp")  # here
        x = dist.broadcast(x, "dp")  # there
    return x


@row(
    """{head} the 2nd of each does not match
  rank 0       : all_gather over dp 0 f32[2, 4] varying dp at {there}
  ranks 1 to 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def nested_loops(x: ts.Tensor) -> Any:
    for _ in range(2):
        for _ in range(2 if rank() else 1):
            x = dist.all_reduce(x, "dp")  # here
        x = dist.all_gather(x, "dp")[:2]  # there
    return x


@row(
    """{head} the 1st of each does not match
  ranks 0, 1 : permute over dp ((0, 1), (1, 2), (2, 3), (3, 0)) f32[2, 4] varying dp at {here}
  ranks 2, 3 : none
  fix        : {order}""",
)
def until_done(x: ts.Tensor) -> Any:
    left = 5 - rank()
    while left > 3:
        x, left = dist.shift(x, "dp"), left - 1  # here
    return x


@row(
    """{head} the 2nd of each does not match
  ranks 0 to 2 : none
  rank 3       : all_reduce over dp sum f32[2, 4] varying dp at {here}
  fix          : {order}""",
)
def deeper_by_rank(x: ts.Tensor) -> Any:
    def down(y: ts.Tensor, depth: int) -> ts.Tensor:
        return down(dist.all_reduce(y, "dp"), depth - 1) if depth else y  # here

    return down(x, 1 + (rank() == 3))


@row(
    """{head} the 2nd of each does not match
  ranks 0, 2 : none
  ranks 1, 3 : all_reduce over dp sum f32[4] varying dp at {here}
  fix        : {order}""",
)
def in_the_comprehension(x: ts.Tensor) -> Any:
    parts = [dist.all_reduce(x[i], "dp") for i in range(1 + rank() % 2)]  # here
    return parts[0]


# -- errors of their own --------------------------------------------------------------------------
@row(
    """rank 2 of a body raised, the others did not
  ranks 0, 1, 3 : goes on to all_reduce over dp sum f32[2, 4] varying dp at {there}
  rank 2        : raises ValueError: no data for this rank at {here}
  fix           : {all_raise}""",
)
def one_raises_first(x: ts.Tensor) -> Any:
    if rank() == 2:
        raise ValueError("no data for this rank")  # here
    return dist.all_reduce(x, "dp")  # there


@row(
    """ranks 0, 3 of a body raised, the others did not
  ranks 0, 3 : raises KeyError: 'missing' at {here}
  ranks 1, 2 : goes on to all_gather over dp 0 f32[2, 4] varying dp at {there}
  fix        : {all_raise}""",
)
def one_raises_between(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() in (0, 3):
        {}["missing"]  # here
    return dist.all_gather(y, "dp")  # there


@row(
    """rank 1 of a body raised, the others did not
  ranks 0, 2, 3 : goes on to its end
  rank 1        : raises AssertionError: not me at {here}
  fix           : {all_raise}""",
)
def one_raises_last(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() == 1:
        raise AssertionError("not me\nand more")  # here
    return y


@row(
    """rank 0 of a body raised, the others did not
  rank 0     : raises RuntimeError: disk full at {here}
  rank 1     : waits for 'weights' of rank 0 at {there}
  ranks 2, 3 : goes on to its end
  fix        : {all_raise}""",
)
def one_raises_while_another_waits(x: ts.Tensor) -> Any:
    if rank() == 0:
        raise RuntimeError("disk full")  # here
    if rank() == 1:
        return dist.recv(0, "weights")  # there
    return x


@row(
    """{head} the 1st of each does not match
  ranks 0, 2, 3 : all_reduce over dp sum f32[2, 4] varying dp at {here}
  rank 1        : none
  fix           : {order}""",
)
def swallowed(x: ts.Tensor) -> Any:
    try:
        if rank() == 1:
            raise OSError("disk full")
        x = dist.all_reduce(x, "dp")  # here
    except OSError:
        x = x * 0
    return x


# -- the check ------------------------------------------------------------------------------------
def places(fn: Body) -> dict[str, str]:
    """The numbers of the lines of `fn` and of the helper that end in `# here`, `# there` or `#
    helper`."""
    found = {"head": HEAD, "order": ORDER, "all_raise": ALL}
    for part in (fn, helper):
        lines, first = inspect.getsourcelines(part)
        for i, line in enumerate(lines):
            if m := re.search(r"# (here|there|helper)$", line.rstrip()):
                found[m[1]] = f"test_mismatch.py:{first + i}"
    return found


def test_the_corpus_is_large_and_of_different_programs() -> None:
    assert len(ROWS) >= 40
    assert len({fn.__name__ for fn, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("fn", "mesh", "text"), ROWS, ids=lambda v: getattr(v, "__name__", ""))
def test_it_is_named_before_anything_runs(fn: Body, mesh: dist.Mesh, text: str) -> None:
    with pytest.raises(ts.UsageError) as caught:
        graph.trace(op.kernel(fn), ON[mesh])
    assert str(caught.value) == text.format(**places(fn))


def test_an_error_that_all_ranks_raise_is_the_users_own() -> None:
    def body(x: ts.Tensor) -> ts.Tensor:
        raise LookupError(f"rank {int(rank()) * 0}")

    with pytest.raises(LookupError, match="rank 0"):
        graph.trace(op.kernel(body), ON[LINE])
