"""Tracebacks of errors, which show the user's frames alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

import tessera as ts
from tessera import dist, nn, pipeline
from tessera.core.errors import PACKAGE

X = ts.ones((2, 3))
MESH = dist.Mesh(("dp",), devices=2)


class Model(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return self.other(x)

    def other(self, x: ts.Tensor) -> ts.Tensor:
        return self.layer(x)

    @ts.jit
    def step(self, x: ts.Tensor) -> ts.Tensor:
        return x @ x


def fails(x: ts.Tensor) -> Any:
    return x @ x


def raises(x: ts.Tensor) -> None:
    raise KeyError(x)


@ts.op(index="i j -> i j")
def jax_function(x: Any) -> Any:
    return x @ x


CALLS: dict[str, Callable[[], object]] = {
    "an operator": lambda: X @ X,
    "an operator with a number on its left": lambda: "a" * X,
    "a function": lambda: ts.matmul(X, X),
    "a wrong keyword": lambda: ts.sum(X, dims=3),
    "a method": lambda: X.reshape(5),
    "an item": lambda: X[5, 5, 5],
    "a float": lambda: float(X),
    "an attribute": lambda: X.foo,  # type: ignore[attr-defined]
    "a class": lambda: nn.Linear("a", 3),  # type: ignore[arg-type]
    "a module": lambda: Model()(X),
    "a method of a module": lambda: Model().other(X),
    "a compiled method": lambda: Model().step(X),  # type: ignore[call-arg]
    "a compiled function": lambda: ts.jit(fails)(X),
    "a compiled function that raises": lambda: ts.jit(raises)(X),
    "rows": lambda: ts.vmap(lambda row: row @ X)(X),
    "a loop": lambda: ts.scan(lambda c, row: (c, row @ X), ts.tensor(0.0), X),
    "a gradient": lambda: ts.value_and_grad(fails)(X),
    "a local body": lambda: ts.distribute("data_parallel", mesh=MESH)(fails)(X),
    "a pipeline": lambda: pipeline.compose(2, [fails, fails], mesh=dist.Mesh(("pp",), devices=2))(
        X
    ),
    "a function of JAX": lambda: jax_function(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_traceback_ends_in_the_users_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for filtering in ("on", "off"):
        monkeypatch.setenv("TESSERA_TRACEBACK_FILTERING", filtering)
        with pytest.raises(Exception) as caught:
            CALLS[name]()
        error: BaseException = caught.value
        assert error.__context__ is None or error.__suppress_context__
        rows = traceback.extract_tb(error.__traceback__)
        files[filtering] = [r.filename for r in rows if not r.filename.endswith("issued.py")]
    assert files["on"][-1] == __file__
    assert not [f for f in files["on"] if f.startswith(PACKAGE)]
    assert len(files["off"]) > len(files["on"])


def test_a_fault_of_our_own_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_TRACEBACK_FILTERING", "on")
    monkeypatch.setattr("tessera.lang.jit.jit.flatten", None)
    with pytest.raises(TypeError) as caught:
        ts.jit(lambda x: x)(X)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename.endswith("lang/jit/jit.py")
