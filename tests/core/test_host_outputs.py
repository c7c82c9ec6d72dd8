"""Prints, checks and breakpoints in recorded functions."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import debug, dist, op
from tests.core.numpy_engine import Oracle

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The printed lines without the file and line in front."""
    return [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]


def test_prints_come_in_order_at_every_call(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    @ts.jit
    def fn(x: ts.Tensor) -> ts.Tensor:
        debug.print("x is", x, twice=x * 2, word="w")

        def iteration(c: ts.Tensor, row: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
            debug.print(c=c)
            return c + row, c

        end, _ = ts.scan(iteration, ts.zeros(()), x, reverse=True)
        debug.print(ts.grad(end, x))
        return end

    for values in ([1.0, 2.0], [3.0, 5.0]):
        assert fn(ts.tensor(values)).item() == sum(values)
    assert printed(capsys) == [
        "x is [1. 2.] twice=[2. 4.] word=w", "c=0.0", "c=2.0", "[1. 1.]",
        "x is [3. 5.] twice=[ 6. 10.] word=w",
        "c=0.0", "c=5.0", "[1. 1.]",
    ]  # fmt: skip


def test_after_a_cut_the_taken_way_prints(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    @ts.jit
    def fn(x: ts.Tensor) -> ts.Tensor:
        debug.print("in", x)
        if x > 0:
            debug.print("positive")
        return x

    fn(ts.tensor(1.0)), fn(ts.tensor(-1.0)), fn(ts.tensor(2.0))
    assert printed(capsys) == ["in 1.0", "positive", "in -1.0", "in 2.0", "positive"]


def test_devices_print_their_own(oracle: Oracle, capsys: pytest.CaptureFixture[str]) -> None:
    @op.kernel
    def fn(x: ts.Tensor) -> ts.Tensor:
        debug.print(x.sum(), n=4)
        debug.print("all:", dist.all_reduce(x.sum()))
        return x

    fn(ts.tensor(np.arange(4.0), mesh=MESH, layout="[4@(dp,tp)]"))
    assert printed(capsys) == [
        "[dp=0 tp=0] 0.0 n=4", "[dp=0 tp=1] 1.0 n=4", "[dp=1 tp=0] 2.0 n=4", "[dp=1 tp=1] 3.0 n=4",
        "all: 6.0",
    ]  # fmt: skip


def test_a_rank_prints_alone(oracle: Oracle, capsys: pytest.CaptureFixture[str]) -> None:
    @op.kernel(mesh_axes="dp")
    def fn(x: ts.Tensor) -> ts.Tensor:
        if ts.mesh.current().rank == 1:
            debug.print("mine", x * 2)
        return x

    fn(ts.tensor(np.arange(4.0), mesh=MESH, layout="[4@dp]"))
    assert printed(capsys) == ["[dp=1] mine [4. 6.]"]


def test_outside_of_a_function_at_once(oracle: Oracle, capsys: pytest.CaptureFixture[str]) -> None:
    debug.print(1, ts.tensor([2, 3]), a=ts.tensor(4))
    assert printed(capsys) == ["1 [2 3] a=4"]
    with pytest.raises(ts.GraphError):
        debug.check_finite(ts.tensor([1.0, float("inf")]))


def test_tensors_in_containers_are_printed(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    @ts.jit
    def fn(x: ts.Tensor) -> ts.Tensor:
        debug.print({"a": [x, 2]}, b=(x * 2,))
        return x

    fn(np.array([1, 2], np.int32))
    assert printed(capsys) == [
        "{'a': [array([1, 2], dtype=int32), 2]} b=(array([2, 4], dtype=int32),)"
    ]


def test_what_is_not_finite_is_named(oracle: Oracle) -> None:
    @ts.jit
    def fn(x: ts.Tensor) -> ts.Tensor:
        with ts.named_scope("head"):
            found: dict[str, Any] = debug.check_finite({"a": [x, ts.log(x)], "n": 3}, "logs")
        assert found["n"] == 3
        return found["a"][1]  # type: ignore[no-any-return]

    assert fn(ts.tensor([1.0, 1.0])).numpy().tolist() == [0.0, 0.0]
    with pytest.raises(ts.GraphError) as caught:
        fn(ts.tensor([1.0, -1.0]))
    text = str(caught.value)
    line = fn.fn.__code__.co_firstlineno + 3  # type: ignore[attr-defined]
    assert (
        text
        == f"""\
check_finite: logs.a.1 has 1 of 2 elements not finite
  tensor   : f32[2]
  first_at : (1,)
  scope    : head
  at       : test_host_outputs.py:{line}
  fix      : find where they begin with ts.debug.nan_origin(fn, *args)"""
    )


def test_what_is_not_finite_is_named_with_its_device(oracle: Oracle) -> None:
    @op.kernel
    def fn(x: ts.Tensor) -> ts.Tensor:
        return debug.check_finite(ts.log(x))  # type: ignore[no-any-return]

    x = np.ones((4, 3), "f4")
    x[2, 1] = 0.0
    with pytest.raises(ts.GraphError, match=r"first_at : \(0, 1\)\n  device   : dp=1\n"):
        fn(ts.tensor(x, mesh=MESH, layout="[4@dp, 3]"))


def test_a_breakpoint_has_the_values(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    stops: list[Any] = []
    monkeypatch.setattr(
        "builtins.breakpoint", lambda: stops.append(sys._getframe(1).f_locals["x"].tolist())
    )

    @ts.jit
    def fn(x: ts.Tensor) -> ts.Tensor:
        debug.breakpoint(seen.append, x=x, y=x + 1)
        debug.breakpoint(x=x)
        return x

    fn(ts.tensor([1.0]))
    assert [k.tolist() for k in seen[0].values()] == [[1.0], [2.0]] and stops == [[1.0]]


def test_a_tap_in_a_loop_of_devices(oracle: Oracle) -> None:
    rows: list[np.ndarray] = []

    @op.kernel(mesh_axes="dp")
    def fn(x: ts.Tensor) -> ts.Tensor:
        def iteration(c: ts.Tensor, row: ts.Tensor) -> tuple[ts.Tensor, tuple[()]]:
            debug.breakpoint(lambda at: rows.append(at["row"]), row=row)
            return c + row, ()

        return ts.scan(iteration, ts.zeros(()), x)[0].reshape(1)

    x = np.arange(6, dtype=np.float32)
    out = fn(ts.tensor(x, mesh=MESH, layout="[6@dp]"))
    assert out.numpy().tolist() == [3.0, 12.0]
    assert [r.tolist() for r in rows] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
