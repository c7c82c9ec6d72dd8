"""Tensors without elements, against NumPy, on one device and in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import nn
from tessera.core.dtypes import f32 as single
from tessera.core.layout import Factor, TensorType, parse_type, plain
from tessera.core.mesh import Mesh
from tessera.core.reshard import steps_between
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.lang.record.recorder import Recorder, recording
from tests.core.numpy_engine import Oracle

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
Fn = Callable[..., Any]


def f32(*shape: int) -> Any:
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


NO_IDS = np.zeros(0, np.int32)
# Our call, PyTorch's call, and the shapes of the arguments.
CALLS: dict[str, tuple[Fn, Fn, tuple[tuple[int, ...], ...]]] = {
    "add": (lambda x, y: x + y, lambda x, y: x + y, ((0, 8), (8,))),
    "add_one": (lambda x, y: x + y, lambda x, y: x + y, ((4, 0), (4, 1))),
    "sum": (lambda x: ts.sum(x, 0), lambda x: x.sum(0), ((0, 8),)),
    "sum_other": (lambda x: ts.sum(x, 1), lambda x: x.sum(1), ((0, 8),)),
    "mean": (lambda x: ts.mean(x, 0), lambda x: x.mean(0), ((0, 8),)),
    "prod": (lambda x: ts.prod(x, 0), lambda x: x.prod(0), ((0, 8),)),
    "max_other": (lambda x: ts.max(x, 1), lambda x: x.amax(1), ((0, 8),)),
    "logsumexp": (lambda x: ts.logsumexp(x, 0), lambda x: x.logsumexp(0), ((0, 8),)),
    "softmax": (lambda x: nn.softmax(x, 0), lambda x: x.softmax(0), ((0, 8),)),
    "cumsum": (lambda x: ts.cumsum(x, 0), lambda x: x.cumsum(0), ((0, 8),)),
    "sort": (lambda x: ts.sort(x, 0)[0], lambda x: x.sort(0)[0], ((0, 8),)),
    "inner": (lambda x, y: x @ y, lambda x, y: x @ y, ((8, 0), (0, 8))),
    "rows": (lambda x, y: x @ y, lambda x, y: x @ y, ((0, 4), (4, 8))),
    "batch": (lambda x, y: x @ y, lambda x, y: x @ y, ((0, 2, 4), (0, 4, 8))),
    "start": (lambda x, y: ts.concat([x, y]), lambda x, y: torch.cat([x, y]), ((0, 8), (4, 8))),
    "between": (
        lambda x, y: ts.concat([y, x, y]), lambda x, y: torch.cat([y, x, y]), ((0, 8), (4, 8))
    ),
    "stack": (lambda x, y: ts.stack([x, y]), lambda x, y: torch.stack([x, y]), ((0, 8), (0, 8))),
    "slice": (lambda x: x[3:3], lambda x: x[3:3], ((8, 4),)),
    "slice_all": (lambda x: ts.sum(x[9:]) + ts.sum(x), lambda x: x[9:].sum() + x.sum(), ((8, 4),)),
    "backwards": (lambda x: ts.flip(x[2:0:1]), lambda x: x[2:0:1].flip(-1), ((8, 4),)),
    "no_ids": (lambda x: x[NO_IDS], lambda x: x[torch.tensor(NO_IDS)], ((8, 4),)),
    "two_ids": (lambda x: x[[], []], lambda x: x[[], []], ((8, 4),)),
    "no_mask": (lambda x: x[np.zeros(8, bool)], lambda x: x[torch.zeros(8) > 0], ((8, 4),)),
    "take": (lambda x: ts.take(x, NO_IDS, 1), lambda x: x[:, torch.tensor(NO_IDS)], ((8, 4),)),
    "reshape": (lambda x: x.reshape(4, 0, 3), lambda x: x.reshape(4, 0, 3), ((0, 8),)),
    "heads": (lambda x: x.reshape(0, 4, 2, 3), lambda x: x.reshape(0, 4, 2, 3), ((0, 8, 3),)),
    "flat": (lambda x: x.reshape(-1), lambda x: x.reshape(-1), ((4, 0, 8),)),
    "broadcast": (
        lambda x: ts.broadcast_to(x, (8, 0, 4)), lambda x: x.expand(8, 0, 4), ((1, 4),)
    ),
    "split": (lambda x: ts.split(x, [0, 8, 0])[1], lambda x: x.split([0, 8, 0])[1], ((8, 4),)),
    "diagonal": (lambda x: ts.diagonal(x, 9), lambda x: torch.diagonal(x, 9), ((4, 8),)),
    "top": (lambda x: ts.topk(x, 0)[0], lambda x: x.topk(0)[0], ((8, 4),)),
    "norm": (
        lambda x: nn.layer_norm(x), lambda x: torch.nn.functional.layer_norm(x, (8,)), ((0, 8),)
    ),
}  # fmt: skip


def layouts(shape: tuple[int, ...]) -> list[TensorType]:
    """Returns the whole layout, and one for each non-empty dim split over one axis or both."""
    t = plain(single, shape, MESH)
    found = [t]
    for i, axes in itertools.product(range(len(shape)), (("dp",), ("tp",), ("dp", "tp"))):
        dims = [*t.dims]
        dims[i] = (Factor(shape[i], axes),)
        found.append(t.with_dims(dims))
    return [*dict.fromkeys(found)]


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_pytorchs_in_every_layout(name: str, oracle: Oracle) -> None:
    ours, theirs, shapes = CALLS[name]
    values = [f32(*s) for s in shapes]
    given = [torch.tensor(v, requires_grad=True) for v in values]
    want = theirs(*given)
    want.sum().backward()
    wants = [want.detach().numpy(), *(g.grad.numpy() for g in given)]  # type: ignore[union-attr]
    each = [layouts(s) for s in shapes]
    combinations = [tuple(c[i % len(c)] for c in each) for i in range(max(map(len, each)))]
    for types in combinations:
        r = Recorder("case")
        with recording(r):
            xs = [r.input(t) for t in types]
            out = ours(*xs)
            grads = ts.grad(ts.sum(out), xs)
            graph = r.builder.graph([r.node(t) for t in (out, *grads)])
        verify(graph)
        every = [*values, *(t.numpy() for t, _ in r.captured)]
        for got in (evaluate(graph, every), evaluate_blocks(graph, every)):
            for a, b in zip(got, wants, strict=True):
                assert a.shape == b.shape, (types, a.shape, b.shape)
                np.testing.assert_allclose(a, b)


def test_an_empty_dim_is_split_over_nothing() -> None:
    assert parse_type("f32[0@dp, 8@tp]", MESH) is parse_type("f32[0, 8@tp]", MESH)
    assert str(parse_type("f32[(3·0@dp·2)]", MESH)) == "f32[0]"
    t = parse_type("f32[0, 8@tp, 2]", MESH)
    assert (t.local_shape, t.size, t.local_bytes) == ((0, 2, 2), 0, 0)
    assert str(t.reshape((0, 16))) == "f32[0, 16@tp]"
    assert str(t.reshape((4, 2, 0, 1))) == "f32[4, 2, 0, 1]"
    assert parse_type(str(t), MESH) is t


def test_a_change_of_layout_of_nothing_sends_nothing() -> None:
    types = [*layouts((0, 8, 4)), plain(single, (0, 8, 4), MESH).with_partial((("dp", "sum"),))]
    for src, dst in itertools.product(types, repeat=2):
        steps = steps_between(src, dst)
        assert sum(s.wire_bytes for s in steps) == 0
        assert (steps[-1].type if steps else src) is dst


@pytest.mark.parametrize("fn", [ts.max, ts.min, ts.argmax, ts.argmin])
def test_the_largest_of_none_is_an_error_as_in_numpy(fn: Fn, oracle: Oracle) -> None:
    x = ts.zeros((3, 0))
    with pytest.raises(ts.ShapeError, match="dim 1 has no elements"):
        fn(x, 1)
    assert fn(x, 0).shape == (0,)


def test_sizes_below_0_are_refused(oracle: Oracle) -> None:
    for make in (lambda: ts.zeros((-1, 2)), lambda: ts.arange(-1), lambda: ts.eye(-1)):
        with pytest.raises(ts.TesseraError):
            make()
    with pytest.raises(ts.LayoutError, match="has a dim below 0"):
        plain(single, (2, -1))
    with pytest.raises(ts.ShapeError, match="do not fit"):
        ts.zeros((0, 4)).reshape(2, 2)


def test_a_loop_over_nothing_gives_its_start(oracle: Oracle) -> None:
    x = ts.zeros((0, 3))
    total, rows = ts.scan(lambda c, row: (c + ts.sum(row), row * 2.0), ts.tensor(5.0), x)
    assert (total.item(), rows.shape) == (5.0, (0, 3))
