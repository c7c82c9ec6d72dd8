"""Ranks that disagree: errors before the run, with the source lines of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.core.layout import parse_type
from tests.messages import Golden, marked

MESH = dist.Mesh(("dp",), devices=4)
X = parse_type("f32[8@dp]", MESH)


def rank() -> Any:
    return ts.mesh.current().rank


def other_kind(x: ts.Tensor) -> ts.Tensor:
    if rank() == 1:
        return dist.all_gather(x, "dp")  # here
    return dist.all_reduce(x, "dp")  # there


def other_op(x: ts.Tensor) -> ts.Tensor:
    return dist.all_reduce(x, "dp", op="max" if rank() > 1 else "sum")  # here


def other_shape(x: ts.Tensor) -> ts.Tensor:
    return dist.all_reduce(x[:1] if rank() == 3 else x, "dp")  # here


def other_dtype(x: ts.Tensor) -> ts.Tensor:
    return dist.all_reduce(x.to(ts.bf16) if rank() == 3 else x, "dp").to(ts.f32)  # here


def other_order(x: ts.Tensor) -> ts.Tensor:
    if rank() == 0:
        return dist.all_reduce(dist.broadcast(x, "dp"), "dp")  # here
    y = dist.all_reduce(x, "dp")  # there
    return dist.broadcast(y, "dp")


def other_root(x: ts.Tensor) -> ts.Tensor:
    return dist.broadcast(x, "dp", root=rank() // 2)  # here


def one_skips(x: ts.Tensor) -> ts.Tensor:
    if rank() != 2:
        x = dist.all_reduce(x, "dp")  # here
    return x


def one_more(x: ts.Tensor) -> ts.Tensor:
    for _ in range(2 if rank() == 2 else 1):
        x = dist.all_reduce(x, "dp")  # here
    return x


def no_barrier(x: ts.Tensor) -> ts.Tensor:
    if rank():
        dist.barrier()  # here
    return x


def gradient_on_one(x: ts.Tensor) -> ts.Tensor:
    w = ts.ones((2,)) * 2.0  # here
    if rank() == 0:
        return ts.grad((x * w).sum(), w)
    return w


ROWS: list[Callable[..., Any]] = [
    other_kind,
    other_op,
    other_shape,
    other_dtype,
    other_order,
    other_root,
    one_skips,
    one_more,
    no_barrier,
    gradient_on_one,
]  # fmt: skip


@pytest.mark.parametrize("fn", ROWS, ids=lambda fn: fn.__name__)
def test_ranks_that_differ_are_named(fn: Callable[..., Any], golden: Golden) -> None:
    with pytest.raises(ts.UsageError) as caught:
        graph.trace(op.kernel(fn), X)
    golden(marked(str(caught.value), fn))


# -- messages and results -------------------------------------------------------------------------
def waiting(x: ts.Tensor) -> ts.Tensor:
    other = rank() ^ 1
    got = dist.recv(other, "m")
    dist.send(x, other, "m")
    return got


def unreceived(x: ts.Tensor) -> ts.Tensor:
    if rank() == 1:
        dist.send(x, 2, "m")
    return x


def unsent(x: ts.Tensor) -> ts.Tensor:
    return dist.recv(0, "m") if rank() == 1 else x


def circle(x: ts.Tensor) -> dict[str, ts.Tensor]:
    me = rank()
    return {"a": ts.distributed.recv_from((me + 1) % 4, "a")}


def used_early(x: ts.Tensor) -> dict[str, ts.Tensor]:
    """Each rank's result depends on the result of the next rank: a cycle."""
    return {"a": ts.distributed.recv_from((rank() + 1) % 4, "a") + x}


def no_such_name(x: ts.Tensor) -> dict[str, ts.Tensor]:
    return {"a": x} if rank() == 0 else {"a": ts.distributed.recv_from(0, "b")}


def of_itself(x: ts.Tensor) -> dict[str, ts.Tensor]:
    return {"a": ts.distributed.recv_from(0, "a")}


def other_structure(x: ts.Tensor) -> Any:
    return {"a": x} if rank() else {"a": x, "b": x}


def other_result(x: ts.Tensor) -> ts.Tensor:
    return x[:1] if rank() else x


def other_number(x: ts.Tensor) -> Any:
    return x, int(rank())


def number_or_tensor(x: ts.Tensor) -> Any:
    return x if rank() else 1.0


def data_read(x: ts.Tensor) -> ts.Tensor:
    return x if x.sum() > 0 else -x


def no_such_rank(x: ts.Tensor) -> ts.Tensor:
    dist.send(x, 4)
    return x


def in_a_loop(x: ts.Tensor) -> ts.Tensor:
    rank() == 0  # noqa: B015  # the question is what matters

    def iteration(c: ts.Tensor, row: ts.Tensor) -> tuple[ts.Tensor, tuple[()]]:
        return c + dist.all_reduce(row, "dp") * (1.0 if rank() == 0 else 2.0), ()

    return ts.scan(iteration, ts.zeros(()), x)[0]  # type: ignore[no-any-return]


MORE: list[tuple[Callable[..., Any], str, str]] = [
    (waiting, "ranks wait for each other and none goes on", "waits for 'm' of rank 1"),
    (unreceived, "send: rank 2 does not receive what rank 1 sends as 'm'", "received 0 times"),
    (unsent, "recv: rank 0 sends nothing (more) to rank 1 under 'm'", "send and recv in pairs"),
    (circle, "ranks wait for each other and none goes on", "must not need what it waits for"),
    (used_early, "ranks wait for each other and none goes on", "waits for 'a' of rank 2"),
    (no_such_name, "recv_from: rank 0 returns nothing under 'b'", "returned : "),
    (of_itself, "recv_from: rank 0 asks itself for 'a'", "ask for it on the other ranks"),
    (other_structure, "ranks return different structures", "out.a, out.b"),
    (other_result, "ranks return different shapes", "f32[1] varying dp"),
    (other_number, "ranks return different plain values", "rank 1 : 1"),
    (number_or_tensor, "ranks return different kinds of values", "rank 0 : 1.0"),
    (data_read, "a value that differs between devices is read", "choose with ts.where"),
    (no_such_rank, "send: rank cannot be 4", "give a whole number from 0 to 3"),
    (in_a_loop, "all_reduce: a collective in a loop's body", "take it out of the loop"),
]


@pytest.mark.parametrize(("fn", "first", "inside"), MORE, ids=lambda v: getattr(v, "__name__", ""))
def test_other_ways_to_disagree(fn: Callable[..., Any], first: str, inside: str) -> None:
    with pytest.raises(ts.UsageError) as caught:
        graph.trace(op.kernel(fn), X)
    text = str(caught.value)
    assert text.startswith(first), text
    assert inside in text and "  fix" in text, text


def test_a_rank_is_of_its_body() -> None:
    kept = []

    def body(x: ts.Tensor) -> ts.Tensor:
        kept.append(ts.mesh.current())
        return x

    graph.trace(op.kernel(body), X)
    with pytest.raises(ts.UsageError, match="used after the body ended"):
        print(kept[0].rank)
    with pytest.raises(ts.MeshError, match="there is no rank here"):
        print(MESH.rank)


@pytest.mark.parametrize("name", ["send", "recv", "permute", "shift"])
def test_handing_on_needs_a_local_body(name: str) -> None:
    args = {"recv": (0,), "send": (np.ones(2), 1), "permute": (np.ones(2), "dp", [(0, 1)])}
    with pytest.raises(ts.UsageError, match="no devices to hand on between"):
        getattr(dist, name)(*args.get(name, (np.ones(2), "dp")))
