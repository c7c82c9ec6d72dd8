"""Host outputs of pipelines: values of the whole batch, shown once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import debug, dist, pipeline

X = np.float32([[1, 0], [2, 0], [3, 0], [10, 0]])


def stepped(dp: int, inside: Callable[..., Any], outside: Callable[..., Any] = lambda *_: 0) -> Any:
    """A step in two microbatches: a model that calls `inside`, and a loss that calls `outside`."""
    mesh = dist.Mesh(("dp", "pp"), shape={"dp": dp, "pp": 2})

    @pipeline.run(("pp",), "GPipe", 2, mesh=mesh)
    def model(w: ts.Tensor, x: ts.Tensor) -> ts.Tensor:
        h = x @ w
        inside(h)
        return ts.tanh(h) @ w

    @ts.jit
    def step(w: ts.Tensor, x: ts.Tensor) -> Any:
        loss = (model(w, x) ** 2).mean()
        grad = ts.grad(loss, w)
        outside(loss, grad)
        return loss, grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scan over rows, and of so few microbatches
        return step(
            ts.tensor(np.eye(2, dtype=np.float32), name="w"),
            ts.tensor(X, mesh=mesh, layout="[4@dp, 2]"),
        )


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The printed lines without the file and line in front."""
    return [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("dp", [1, 2])
def test_prints_are_of_the_batch(capsys: pytest.CaptureFixture[str], dp: int) -> None:
    found: list[Any] = []

    def inside(h: ts.Tensor) -> None:
        debug.print(h[:, 0], mean=h.mean())
        debug.print("no tensor")
        debug.print(max=ts.max(h), any=(h > 5).any(), sum=h.sum(0), mean=h.mean())
        debug.breakpoint(found.append, columns=h.transpose())
        debug.print(h[:, 0], norm=ts.linalg.norm(h[:, 0]) ** 2)
        ts.scan(lambda c, row: (debug.print(row=row), (c + row, ()))[1], ts.zeros((2,)), h)

    def outside(loss: ts.Tensor, grad: ts.Tensor) -> None:
        debug.breakpoint(found.append, loss=loss, grad=grad)
        debug.breakpoint(found.append, root=ts.sqrt(loss), grad=grad)

    loss, grad = stepped(dp, inside, outside)
    assert lines(capsys) == [
        "[ 1.  2.  3. 10.] mean=2.0",
        "no tensor",
        "max=10.0 any=True sum=[16.  0.] mean=2.0",
        "[ 1.  2.  3. 10.] norm=114.0",
        *(f"row=[{row}. {' ' * (row > 9)}0.]" for row in (1, 2, 3, 10)),
    ]
    np.testing.assert_array_equal(found.pop(0)["columns"], X.T)
    assert [set(x) for x in found] == [{"loss", "grad"}, {"root", "grad"}]
    assert found[0]["loss"] == loss.item()
    assert found[1]["root"] ** 2 == pytest.approx(loss.item())
    for x in found:
        np.testing.assert_array_equal(x["grad"], grad.numpy())


def test_a_number_of_the_batch_is_checked() -> None:
    with pytest.raises(ts.GraphError, match="check_finite: a value has 1 of 1 elements not finite"):
        stepped(1, lambda h: debug.check_finite(1 / (ts.max(h) - 10)))
