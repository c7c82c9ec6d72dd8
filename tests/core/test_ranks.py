"""Ranks that disagree: errors before the run, with the source lines of both."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.core.layout import parse_type

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


ORDER = "issue the same collectives in the same order on every rank"
ROWS: list[tuple[Callable[..., Any], str]] = [
    (other_kind, f"""ranks issue different collectives: the 1st of each does not match
  ranks 0, 2, 3 : all_reduce over dp sum f32[2] varying dp at test_ranks.py:{{there}}
  rank 1        : all_gather over dp 0 f32[2] varying dp at test_ranks.py:{{here}}
  fix           : {ORDER}"""),
    (other_op, f"""ranks issue different collectives: the 1st of each does not match
  ranks 0, 1 : all_reduce over dp sum f32[2] varying dp at test_ranks.py:{{here}}
  ranks 2, 3 : all_reduce over dp max f32[2] varying dp at test_ranks.py:{{here}}
  fix        : {ORDER}"""),
    (other_shape, f"""ranks issue different collectives: the 1st of each does not match
  ranks 0 to 2 : all_reduce over dp sum f32[2] varying dp at test_ranks.py:{{here}}
  rank 3       : all_reduce over dp sum f32[1] varying dp at test_ranks.py:{{here}}
  fix          : {ORDER}"""),
    (other_dtype, f"""ranks issue different collectives: the 1st of each does not match
  ranks 0 to 2 : all_reduce over dp sum f32[2] varying dp at test_ranks.py:{{here}}
  rank 3       : all_reduce over dp sum bf16[2] varying dp at test_ranks.py:{{here}}
  fix          : {ORDER}"""),
    (other_order, f"""ranks issue different collectives: the 1st of each does not match
  rank 0       : broadcast over dp 0 f32[2] varying dp at test_ranks.py:{{here}}
  ranks 1 to 3 : all_reduce over dp sum f32[2] varying dp at test_ranks.py:{{there}}
  fix          : {ORDER}"""),
    (other_root, f"""ranks issue different collectives: the 1st of each does not match
  ranks 0, 1 : broadcast over dp 0 f32[2] varying dp at test_ranks.py:{{here}}
  ranks 2, 3 : broadcast over dp 1 f32[2] varying dp at test_ranks.py:{{here}}
  fix        : {ORDER}"""),
    (one_skips, f"""ranks issue different collectives: the 1st of each does not match
  ranks 0, 1, 3 : all_reduce over dp sum f32[2] varying dp at test_ranks.py:{{here}}
  rank 2        : none
  fix           : {ORDER}"""),
    (one_more, f"""ranks issue different collectives: the 2nd of each does not match
  ranks 0, 1, 3 : none
  rank 2        : all_reduce over dp sum f32[2] varying dp at test_ranks.py:{{here}}
  fix           : {ORDER}"""),
    (no_barrier, f"""ranks issue different collectives: the 1st of each does not match
  rank 0       : none
  ranks 1 to 3 : barrier over dp at test_ranks.py:{{here}}
  fix          : {ORDER}"""),
    (gradient_on_one, """ranks issue different collectives: their gradients differ
  rank 0       : all_reduce f32[2] +dp over dp at test_ranks.py:{here}
  ranks 1 to 3 : not this one
  fix          : take the gradient of one loss on every rank, and choose in it by a tensor: \
ts.where(ts.mesh.current().rank == 0, a, b)"""),
]  # fmt: skip


def lines(fn: Callable[..., Any]) -> dict[str, int]:
    """The line numbers of `fn`'s lines that end in `# here` and `# there`."""
    first = fn.__code__.co_firstlineno
    with open(__file__, encoding="utf-8") as file:
        text = file.read().splitlines()[first - 1 :]
    found: dict[str, int] = {}
    for i, line in enumerate(text):
        if m := re.search(r"# (here|there)$", line):
            found.setdefault(m[1], first + i)
        if line == "" and found:
            break
    return found


@pytest.mark.parametrize(("fn", "text"), ROWS, ids=lambda v: getattr(v, "__name__", ""))
def test_ranks_that_differ_are_named(fn: Callable[..., Any], text: str) -> None:
    with pytest.raises(ts.UsageError) as caught:
        graph.trace(op.kernel(fn), X)
    assert str(caught.value) == text.format(**lines(fn))


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
