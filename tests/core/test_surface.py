"""Invalid arguments to every public function: a result or an error of ours, never another library's
traceback."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op, optim
from tessera.core import contexts, public, tracebacks
from tessera.elastic.policy import elastic
from tests.core.numpy_engine import Oracle

# Classes of values and errors, and functions of a graph, take no tensors.
LEFT_OUT = {"EngineWarning", "Graph", "PipelineWarning", "Tensor", "TraceWarning"}
# Their settings would stay in force for later tests.
LEFT_OUT |= {"set_deterministic"}
RANDOM = ("bernoulli", "multinomial", "normal", "randint", "set_state", "uniform")
METHODS = (
    "reshape", "transpose", "permute", "to", "sum", "mean", "max", "min", "__getitem__", "__add__",
    "__rsub__", "__pow__", "__matmul__", "__rmatmul__", "__truediv__", "__eq__", "__and__",
    "__format__", "__mod__", "__rfloordiv__",
)  # fmt: skip
NONSENSE: tuple[Any, ...] = (
    None, "abc", object(), 1.5, -3, 10**12, float("nan"), 1 + 2j, True, [], [1, "x"], {}, (2, 3),
    np.array(["a", "b"]), np.array([], np.float32), np.zeros((2, 0)), np.array([None, 1]), [None],
    lambda *a: 0,
)  # fmt: skip


def surface() -> Iterator[tuple[str, Any]]:
    random = {n: getattr(ts.random, n) for n in RANDOM}
    for module in (ts, dist, op, graph, nn, ts.linalg):
        names = {n: getattr(module, n) for n in module.__all__ if n not in LEFT_OUT}
        for name, found in (names | random).items():
            if callable(found) and not (
                inspect.isclass(found) and issubclass(found, BaseException)
            ):
                yield f"{module.__name__}.{name}", found
    for name in METHODS:
        yield f"Tensor.{name}", getattr(ts.Tensor, name)


@pytest.mark.parametrize("module", [ts, dist, op, graph, nn, ts.linalg])
def test_completion_offers_the_public_names(module: Any) -> None:
    assert dir(module) == sorted(module.__all__)


def calls(name: str, bad: Any, x: ts.Tensor, ids: ts.Tensor) -> list[tuple[Any, ...]]:
    """Argument lists with `bad` in each position."""
    if name.startswith("Tensor."):
        return [(x, bad), (ids, bad), (x, x, bad)]
    return [(bad,), (x, bad), (bad, x), (x, ids, bad), (x, x, bad), ((2, 3), bad)]


def outcome(call: Callable[[], Any]) -> str:
    """Returns the fault in the error that `call` raises, or ""."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = call()
            if isinstance(made, ts.Tensor):
                made.numpy()
            if isinstance(made, contexts.Within | contexts.Above):
                with made:
                    pass
            if isinstance(made, elastic):
                made.loops = 1  # as after a loop inside of it
    except ts.TesseraError as error:
        return "" if "  fix" in str(error) else f"no way out: {error}"
    except Exception as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        calling = (
            __file__,
            contextlib.__file__,
            public.__file__,
            contexts.__file__,
            tracebacks.__file__,
        )  # files that call on the user's behalf
        here = at is not None and at.tb_frame.f_code.co_filename in calling
        # Python itself refuses a call with the wrong number of arguments, at the user's line.
        return "" if here and isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("name", "found"), [pytest.param(n, f, id=n) for n, f in surface()])
def test_nonsense_is_answered_in_our_own_words(name: str, found: Any, oracle: Oracle) -> None:
    x, ids = ts.tensor(np.ones((2, 3), np.float32)), ts.tensor([0, 1])
    wrong = {}
    for bad in NONSENSE:
        for args in calls(name, bad, x, ids):
            if why := outcome(lambda args=args: found(*args)):  # type: ignore[misc]
                wrong[str(args)[:80]] = why
    assert not wrong


# ---- by name: optimizers, schedules, layers, losses ---------------------------------------------
def x() -> ts.Tensor:
    return ts.tensor(np.ones((2, 3), np.float32))


def heads() -> ts.Tensor:
    return ts.ones((1, 2, 3, 4))


CALLS: dict[Any, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys([optim.SGD, optim.Momentum, optim.Adam, optim.AdamW, optim.Lion], dict),
    **dict.fromkeys([optim.Adafactor, optim.LossScale, nn.GPTConfig, nn.Rope], dict),
    optim.constant: lambda: {"value": 1.0},
    optim.linear: lambda: {"start": 0.0, "end": 1.0, "steps": 3},
    optim.cosine: lambda: {"peak": 1.0, "total": 9},
    optim.warmup_cosine: lambda: {"peak": 1.0, "warmup": 2, "total": 9},
    optim.warmup_linear: lambda: {"peak": 1.0, "warmup": 2, "total": 9},
    optim.inverse_sqrt: lambda: {"peak": 1.0, "warmup": 2},
    optim.piecewise_constant: lambda: {"values": [1.0, 0.5], "boundaries": [3]},
    optim.join_schedules: lambda: {"schedules": [optim.constant(1.0)], "boundaries": []},
    optim.clip_by_global_norm: lambda: {"grads": {"w": x()}, "max_norm": 1.0},
    optim.apply_if_finite: lambda: {
        "finite": ts.tensor(True),
        "new": {"w": x()},
        "old": {"w": x()},
    },
    nn.Linear: lambda: {"in_features": 2, "out_features": 3},
    nn.Embedding: lambda: {"vocab": 3, "d": 2},
    nn.LayerNorm: lambda: {"d": 3},
    nn.RMSNorm: lambda: {"d": 3},
    nn.Dropout: lambda: {"p": 0.1},
    nn.Conv1d: lambda: {"in_channels": 2, "out_channels": 2, "kernel_size": 3},
    nn.Conv2d: lambda: {"in_channels": 2, "out_channels": 2, "kernel_size": 3},
    nn.BatchNorm: lambda: {"channels": 3},
    nn.GroupNorm: lambda: {"groups": 1, "channels": 3},
    nn.MoE: lambda: {"d": 2, "hidden": 3, "experts": 2},
    nn.cross_entropy: lambda: {"logits": x(), "labels": [0, 1]},
    nn.linear_cross_entropy: lambda: {"x": x(), "weight": ts.ones((3, 4)), "labels": [0, 1]},
    nn.dropout: lambda: {"x": x(), "p": 0.1},
    nn.attention: lambda: {"q": heads(), "k": heads(), "v": heads()},
}


@pytest.mark.parametrize("found", CALLS, ids=lambda f: f.__name__)
def test_nonsense_by_name_is_answered_in_our_own_words(found: Any, oracle: Oracle) -> None:
    good = CALLS[found]()
    found(**good)
    wrong = {}
    for name in inspect.signature(found).parameters:
        for bad in (*NONSENSE, x(), (0.9,), (0.9, "x"), "1"):
            if why := outcome(lambda name=name, bad=bad: found(**{**good, name: bad})):  # type: ignore[misc]
                wrong[f"{name}={bad}"[:80]] = why
    assert not wrong


def test_an_argument_of_another_kind_is_refused_where_it_would_mean_something() -> None:
    for call in (
        lambda: nn.Linear(2, 3, bias="no"), lambda: optim.AdamW(betas=(0.9, 0.99, 0.999)),
        lambda: optim.Momentum(nesterov="no"), lambda: optim.Adam(master="f32"),
        lambda: nn.dropout(x(), 0.1, training="no"), lambda: optim.linear(0.0, 1.0, steps="3"),
        lambda: optim.SGD(weight_decay=True),
    ):  # fmt: skip
        with pytest.raises(ts.UsageError, match="cannot be"):
            call()
