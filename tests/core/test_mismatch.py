"""Ranks that disagree: a corpus of programs that would hang or give garbage, each with its whole
error message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.core.layout import parse_type
from tests.messages import Golden, marked

LINE = dist.Mesh(("dp",), devices=4)
GRID = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
ON = {LINE: parse_type("f32[8@dp, 4]", LINE), GRID: parse_type("f32[8@dp, 4@tp]", GRID)}
Body = Callable[[ts.Tensor], Any]
ROWS: list[tuple[Body, dist.Mesh]] = []


def row(mesh: dist.Mesh) -> Callable[[Body], Body]:
    """Adds a program. A message has `HERE` for its line that ends in `# here`, and so on."""

    def add(fn: Body) -> Body:
        ROWS.append((fn, mesh))
        return fn

    return add


def rank() -> Any:
    return ts.mesh.current().rank


def helper(x: ts.Tensor, deep: bool) -> ts.Tensor:
    return dist.all_reduce(x, "dp") if deep else x  # helper


# -- the axis, the group --------------------------------------------------------------------------
@row(GRID)
def other_axis(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp" if rank() < 2 else "tp")  # here


@row(GRID)
def one_axis_or_both(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, ("dp", "tp") if rank() else "dp")  # here


@row(GRID)
def axes_in_another_order(x: ts.Tensor) -> Any:
    axes = ("dp", "tp") if rank() == 3 else ("tp", "dp")
    return dist.all_gather(x, axes)  # here


@row(GRID)
def group_by_own_place(x: ts.Tensor) -> Any:
    if rank() % 2:
        return dist.all_gather(x, "tp")  # here
    return dist.all_gather(x, "dp")  # there


@row(GRID)
def first_rows_then_columns(x: ts.Tensor) -> Any:
    first, second = ("dp", "tp") if rank() != 1 else ("tp", "dp")
    return dist.all_reduce(dist.all_reduce(x, first), second)  # here


# -- the kind, the reduction ----------------------------------------------------------------------
@row(LINE)
def sum_or_least(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp", op="min" if rank() == 2 else "sum")  # here


@row(LINE)
def sum_or_mean(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp", op="mean" if rank() else "sum")  # here


@row(LINE)
def most_or_least(x: ts.Tensor) -> Any:
    return dist.all_reduce(x, "dp", op="max" if rank() > 2 else "min")  # here


@row(LINE)
def reduced_or_scattered(x: ts.Tensor) -> Any:
    if rank() == 0:
        return dist.reduce_scatter(ts.concat([x, x]), "dp")  # here
    return dist.all_reduce(ts.concat([x, x]), "dp")[:1]  # there


@row(LINE)
def gathered_or_exchanged(x: ts.Tensor) -> Any:
    if rank() < 3:
        return dist.all_gather(x, "dp")  # here
    return dist.all_to_all(x, "dp", 1, 0)  # there


@row(LINE)
def broadcast_or_gathered(x: ts.Tensor) -> Any:
    if rank() == 0:
        return dist.broadcast(x, "dp")  # here
    return dist.all_gather(x, "dp")[:2]  # there


@row(LINE)
def handed_on_or_summed(x: ts.Tensor) -> Any:
    if rank():
        return dist.all_reduce(x, "dp")  # here
    return dist.shift(x, "dp")  # there


@row(LINE)
def handed_on_by_another_step(x: ts.Tensor) -> Any:
    return dist.shift(x, "dp", by=2 if rank() == 1 else 1)  # here


@row(LINE)
def handed_to_others(x: ts.Tensor) -> Any:
    pairs = [(0, 1), (1, 0)] if rank() < 2 else [(2, 3), (3, 2)]
    return dist.permute(x, "dp", pairs)  # here


@row(LINE)
def other_root(x: ts.Tensor) -> Any:
    return dist.broadcast(x, "dp", root=rank())  # here


@row(LINE)
def scattered_from_itself(x: ts.Tensor) -> Any:
    return dist.scatter(ts.concat([x, x]), "dp", root=min(rank(), 1))  # here


# -- shape, dtype, dim ----------------------------------------------------------------------------
@row(LINE)
def rows_by_rank(x: ts.Tensor) -> Any:
    return dist.all_reduce(ts.ones((int(rank()) + 1,)), "dp")  # here


@row(LINE)
def one_dim_more(x: ts.Tensor) -> Any:
    return dist.all_reduce(x[None] if rank() == 1 else x, "dp")  # here


@row(LINE)
def turned(x: ts.Tensor) -> Any:
    return dist.all_reduce(x.T if rank() == 3 else x, "dp")  # here


@row(LINE)
def same_size_other_shape(x: ts.Tensor) -> Any:
    return dist.all_gather(x.reshape(4, 2) if rank() else x, "dp")  # here


@row(LINE)
def half_precision(x: ts.Tensor) -> Any:
    y = x.to(ts.f16) if rank() == 0 else x.to(ts.bf16)
    return dist.all_reduce(y, "dp").to(ts.f32)  # here


@row(LINE)
def whole_numbers(x: ts.Tensor) -> Any:
    y = x.to(ts.int32) if rank() > 1 else x
    return dist.all_reduce(y, "dp").to(ts.f32)  # here


@row(LINE)
def along_another_dim(x: ts.Tensor) -> Any:
    return dist.all_gather(x, "dp", dim=1 if rank() == 2 else 0)  # here


@row(LINE)
def scattered_along_another_dim(x: ts.Tensor) -> Any:
    y = ts.concat([x, x])
    return dist.reduce_scatter(y, "dp", dim=int(rank()) % 2)  # here


@row(LINE)
def exchanged_the_other_way(x: ts.Tensor) -> Any:
    y = ts.concat([x, x])
    return dist.all_to_all(y, "dp", *((0, 1) if rank() else (1, 0)))  # here


# -- missing, extra, order ------------------------------------------------------------------------
@row(LINE)
def the_first_is_missing(x: ts.Tensor) -> Any:
    if rank() != 3:
        x = dist.all_reduce(x, "dp")  # here
    return dist.all_gather(x, "dp")  # there


@row(LINE)
def the_last_is_missing(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank():
        y = dist.all_reduce(y, "dp", op="max")  # here
    return y


@row(LINE)
def one_leaves_early(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() == 1:
        return y
    return dist.broadcast(y, "dp")  # here


@row(LINE)
def one_logs_the_norm(x: ts.Tensor) -> Any:
    if rank() == 0:
        norm = dist.all_reduce((x * x).sum(), "dp")  # here
        x = x / norm
    return dist.all_reduce(x, "dp", op="max")  # there


@row(LINE)
def swapped(x: ts.Tensor) -> Any:
    a, b = x, x * 2
    if rank() == 2:
        b = dist.all_reduce(b, "dp", op="max")  # here
        a = dist.all_reduce(a, "dp")
    else:
        a = dist.all_reduce(a, "dp")  # there
        b = dist.all_reduce(b, "dp", op="max")
    return a + b


@row(LINE)
def keys_in_own_order(x: ts.Tensor) -> Any:
    tree = {"w": x, "b": x[0]}
    order = list(tree) if rank() else list(reversed(tree))
    for key in order:
        tree[key] = dist.all_reduce(tree[key], "dp")  # here
    return tree["w"] + tree["b"]


@row(LINE)
def no_barrier_here(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() == 3:
        dist.barrier()  # here
    return dist.all_reduce(y, "dp")  # there


@row(LINE)
def only_the_first_rank_saves(x: ts.Tensor) -> Any:
    y = x
    if rank() == 0:
        y = dist.gather(x, "dp")  # here
    return y[:2]


@row(LINE)
def in_a_helper(x: ts.Tensor) -> Any:
    return helper(x, deep=rank() != 1)


# -- loops and recursion --------------------------------------------------------------------------
@row(LINE)
def turns_by_rank(x: ts.Tensor) -> Any:
    for _ in range(rank()):
        x = dist.all_reduce(x, "dp")  # here
    return x


@row(LINE)
def one_iteration_less(x: ts.Tensor) -> Any:
    for iteration in range(4):
        if rank() == 2 and iteration == 3:
            break
        x = dist.all_reduce(x, "dp") * 0.5  # here
    return x


@row(LINE)
def one_skips_a_iteration(x: ts.Tensor) -> Any:
    for iteration in range(3):
        if rank() == 1 and iteration == 1:
            continue
        x = dist.all_reduce(x * (iteration + 1), "dp")  # here
        x = dist.broadcast(x, "dp")  # there
    return x


@row(LINE)
def nested_loops(x: ts.Tensor) -> Any:
    for _ in range(2):
        for _ in range(2 if rank() else 1):
            x = dist.all_reduce(x, "dp")  # here
        x = dist.all_gather(x, "dp")[:2]  # there
    return x


@row(LINE)
def until_done(x: ts.Tensor) -> Any:
    left = 5 - rank()
    while left > 3:
        x, left = dist.shift(x, "dp"), left - 1  # here
    return x


@row(LINE)
def deeper_by_rank(x: ts.Tensor) -> Any:
    def down(y: ts.Tensor, depth: int) -> ts.Tensor:
        return down(dist.all_reduce(y, "dp"), depth - 1) if depth else y  # here

    return down(x, 1 + (rank() == 3))


@row(LINE)
def in_the_comprehension(x: ts.Tensor) -> Any:
    parts = [dist.all_reduce(x[i], "dp") for i in range(1 + rank() % 2)]  # here
    return parts[0]


# -- errors of their own --------------------------------------------------------------------------
@row(LINE)
def one_raises_first(x: ts.Tensor) -> Any:
    if rank() == 2:
        raise ValueError("no data for this rank")  # here
    return dist.all_reduce(x, "dp")  # there


@row(LINE)
def one_raises_between(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() in (0, 3):
        {}["missing"]  # here
    return dist.all_gather(y, "dp")  # there


@row(LINE)
def one_raises_last(x: ts.Tensor) -> Any:
    y = dist.all_reduce(x, "dp")
    if rank() == 1:
        raise AssertionError("not me\nand more")  # here
    return y


@row(LINE)
def one_raises_while_another_waits(x: ts.Tensor) -> Any:
    if rank() == 0:
        raise RuntimeError("disk full")  # here
    if rank() == 1:
        return dist.recv(0, "weights")  # there
    return x


@row(LINE)
def swallowed(x: ts.Tensor) -> Any:
    try:
        if rank() == 1:
            raise OSError("disk full")
        x = dist.all_reduce(x, "dp")  # here
    except OSError:
        x = x * 0
    return x


# -- the check ------------------------------------------------------------------------------------
def test_the_corpus_is_large_and_of_different_programs() -> None:
    assert len(ROWS) >= 40
    assert len({fn.__name__ for fn, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("fn", "mesh"), ROWS, ids=[fn.__name__ for fn, _ in ROWS])
def test_it_is_named_before_anything_runs(fn: Body, mesh: dist.Mesh, golden: Golden) -> None:
    with pytest.raises(ts.UsageError) as caught:
        graph.trace(op.kernel(fn), ON[mesh])
    golden(marked(str(caught.value), fn, helper))


def test_an_error_that_all_ranks_raise_is_the_users_own() -> None:
    def body(x: ts.Tensor) -> ts.Tensor:
        raise LookupError(f"rank {int(rank()) * 0}")

    with pytest.raises(LookupError, match="rank 0"):
        graph.trace(op.kernel(body), ON[LINE])
