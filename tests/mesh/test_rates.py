"""Learning rate schedules against optax."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tessera as ts
from tessera import optim


def inverse_sqrt(t: int) -> float:
    return 0.3 * min(t / 4, math.sqrt(4 / max(t, 1)))


SCHEDULES: list[tuple[optim.Schedule, Callable[[int], Any]]] = [
    (optim.constant(0.3), optax.constant_schedule(0.3)),
    (optim.linear(0.1, 0.7, 10), optax.linear_schedule(0.1, 0.7, 10)),
    (optim.cosine(0.5, 10), optax.cosine_decay_schedule(0.5, 10)),
    (optim.cosine(0.5, 10, end=0.05), optax.cosine_decay_schedule(0.5, 10, 0.1)),
    (optim.warmup_cosine(1.0, 4, 12, 0.1), optax.warmup_cosine_decay_schedule(0, 1.0, 4, 12, 0.1)),
    (optim.warmup_cosine(1.0, 0, 12), optax.cosine_decay_schedule(1.0, 12)),
    (
        optim.warmup_linear(1.0, 4, 12, 0.1, start=0.2),
        optax.join_schedules(
            [optax.linear_schedule(0.2, 1.0, 4), optax.linear_schedule(1.0, 0.1, 8)], [4]
        ),
    ),
    (optim.inverse_sqrt(0.3, 4), inverse_sqrt),
    (
        optim.piecewise_constant([1.0, 0.5, 0.1], [4, 9]),
        optax.piecewise_constant_schedule(1.0, {4: 0.5, 9: 0.2}),
    ),
    (
        optim.join_schedules([optim.constant(0.5), optim.linear(0.4, 0.0, 4)], [3]),
        optax.join_schedules(
            [optax.constant_schedule(0.5), optax.linear_schedule(0.4, 0.0, 4)], [3]
        ),
    ),
    (
        optim.join_schedules(
            [optax.linear_schedule(0.0, 0.5, 3), lambda step: 0.3, optim.linear(0.4, 0.0, 4)],
            [3, 5],
        ),
        optax.join_schedules(
            [
                optax.linear_schedule(0.0, 0.5, 3), optax.constant_schedule(0.3),
                optax.linear_schedule(0.4, 0.0, 4),
            ],
            [3, 5],
        ),
    ),
]  # fmt: skip


def test_one_number_of_another_library_is_a_rate() -> None:
    for lr in (np.float32(0.5), np.array(0.5), jnp.float32(0.5), np.float16(0.5)):
        assert optim.SGD(lr) == optim.SGD(0.5)
    with pytest.raises(ts.UsageError, match="lr is a ndarray"):
        optim.SGD(np.array([0.5, 0.1]))  # type: ignore[arg-type]


def test_what_is_joined_is_named_where_it_is_no_schedule() -> None:
    with pytest.raises(ts.UsageError, match=r"join_schedules: schedules\[1\] cannot be 0.1"):
        optim.join_schedules([optim.constant(0.5), 0.1], [3])  # type: ignore[list-item]


@pytest.mark.parametrize(("ours", "theirs"), SCHEDULES, ids=lambda s: getattr(s, "name", ""))
def test_schedule(ours: optim.Schedule, theirs: Callable[[int], Any]) -> None:
    at = ts.jit(lambda t: ours(t))
    for t in (0, 1, 3, 4, 5, 8, 9, 10, 12, 100):
        want = pytest.approx(float(theirs(t)), rel=2e-6, abs=1e-7)
        got = at(ts.tensor(t))
        assert (got.item(), got.dtype, got.shape) == (want, ts.f32, ()), t
    assert ours(3).item() == pytest.approx(float(theirs(3)), rel=2e-6)


def test_equal_schedules_are_equal() -> None:
    assert optim.cosine(1.0, 10) == optim.cosine(1.0, 10) != optim.cosine(1.0, 11)
    assert optim.AdamW(optim.cosine(1.0, 10)) == optim.AdamW(optim.cosine(1.0, 10))
    joined = optim.join_schedules([optim.linear(0.0, 1.0, 3), optim.cosine(1.0, 9)], [3])
    again = pickle.loads(pickle.dumps(optim.AdamW(joined)))
    assert again == optim.AdamW(joined) and again.lr(5).item() == joined(5).item()
