"""The types that a checker sees: `make lint` reads this file, nothing runs it.

A line with `type: ignore` must be an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, assert_type

import tessera as ts
from tessera import dist, nn
from tessera.lang.jit.jit import Jit

T = ts.Tensor


def loss(w: T, x: T) -> T:
    return (w * x).sum()


def of_module(m: nn.Linear, x: T) -> T:
    return m(x).sum()


def with_more(w: dict[str, T], x: T) -> tuple[T, int]:
    return (w["a"] * x).sum(), 3


def step(c: T, x: tuple[T, T]) -> tuple[T, dict[str, T]]:
    return c + x[0], {"y": c}


def gradients(w: T, x: T, m: nn.Linear) -> None:
    assert_type(ts.grad(loss(w, x)), dict[str, T])
    assert_type(ts.grad(loss(w, x), m), dict[str, T])
    assert_type(ts.grad(loss(w, x), [w, w]), list[T])
    assert_type(ts.value_and_grad(loss)(w, x=x), tuple[T, T])
    assert_type(ts.value_and_grad(of_module)(m, x), tuple[T, dict[str, T]])
    both = ts.value_and_grad(with_more, has_aux=True)({"a": w}, x)
    assert_type(both, tuple[tuple[T, int], dict[str, T]])
    assert_type(ts.value_and_grad(loss, (0, 1))(w, x), tuple[T, Any])
    ts.value_and_grad(loss)(w, 3)  # type: ignore[arg-type]
    ts.value_and_grad(loss)(w)  # type: ignore[call-arg]


def transforms(w: T, x: T) -> None:
    assert_type(ts.vmap(loss, in_dims=(None, 0))(w, x), T)
    ts.vmap(loss)(w, "x")  # type: ignore[arg-type]
    assert_type(ts.scan(step, w, (x, x)), tuple[T, dict[str, T]])
    assert_type(ts.scan(lambda c, x: (c + x, c), w, x), tuple[T, T])
    ts.scan(step, w, x)  # type: ignore[arg-type]
    assert_type(ts.fori_loop(0, 3, lambda i, c: c + i, w), T)
    assert_type(ts.while_loop(lambda c: c < 3, lambda c: c + 1, w), T)
    assert_type(ts.map(lambda row: row.sum(), x), T)
    jacobian: Callable[[T, T], Any] = ts.jacfwd(loss)
    jacobian(w, x)


@ts.jit
@ts.remat
def compiled(x: Annotated[T, "B", "D", ts.f32], n: int) -> T:
    return x * n


def names() -> None:
    assert_type(compiled(ts.ones((2, 3)), 2), T)
    compiled(ts.ones((2, 3)), "2")  # type: ignore[arg-type]
    plan: Jit[[T, int], T] = compiled
    plan(ts.ones((2, 3)), 2)
    _ = dist.all_reducee  # type: ignore[attr-defined]
    _ = nn.Linearr  # type: ignore[attr-defined]
