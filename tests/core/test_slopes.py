"""Gradients at special points against PyTorch: zero, ties, bounds, NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import nn
from tests.core.numpy_engine import Oracle

Array = np.ndarray[Any, np.dtype[Any]]
POINTS = np.array([0.0, 1.0, -1.0, 0.5, -2.0, 3.0, 1e-30], np.float32)
FINITE = (0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 3.0)
PAIRS = np.array(list(itertools.product(FINITE, FINITE)), np.float32).T

ONE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (nn.relu, torch.relu),
    "abs": (abs, torch.abs),
    "sign": (ts.sign, torch.sign),
    "floor": (ts.floor, torch.floor),
    "sqrt": (ts.sqrt, torch.sqrt),
    "rsqrt": (ts.rsqrt, torch.rsqrt),
    "log": (ts.log, torch.log),
    "exp": (ts.exp, torch.exp),
    "tanh": (ts.tanh, torch.tanh),
    "sigmoid": (ts.sigmoid, torch.sigmoid),
    "silu": (nn.silu, torch.nn.functional.silu),
    "gelu": (nn.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "erf": (ts.erf, torch.erf),
    "softmax": (lambda x: nn.softmax(x)[:3], lambda x: torch.softmax(x, -1)[:3]),
    "logsumexp": (ts.logsumexp, lambda x: torch.logsumexp(x, 0)),
    "norm": (lambda x: ts.linalg.norm(x * 0.0), lambda x: torch.linalg.norm(x * 0.0)),
    "norm 1": (lambda x: ts.linalg.norm(x, 1), lambda x: torch.linalg.norm(x, 1)),
    "max": (lambda x: ts.max(x * x), lambda x: torch.amax(x * x)),
    "min": (lambda x: ts.min(x * x), lambda x: torch.amin(x * x)),
    "prod": (lambda x: ts.prod(x[:3]), lambda x: torch.prod(x[:3])),
    "clip": (
        lambda x: ts.minimum(ts.maximum(x, -0.7), 0.7),
        lambda x: torch.clamp(x, -0.7, 0.7),
    ),
    "where beside NaN": (
        lambda x: ts.where(x > 0, ts.log(ts.where(x > 0, x, 1.0)), 0.0),
        lambda x: torch.where(x > 0, torch.log(torch.where(x > 0, x, torch.ones_like(x))), 0.0),
    ),
}
for power in (0, 1, 2, 3, 5, 0.0, 1.0, 2.0, 0.5, -1, -0.5, 1.5):
    ONE[f"x ** {power!r}"] = (lambda x, p=power: x**p, lambda x, p=power: x**p)
for base in (0.0, 1.0, 2.0):
    ONE[f"{base} ** x"] = (lambda x, p=base: p**x, lambda x, p=base: p**x)

TWO: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "pow": (lambda x, y: x**y, lambda x, y: x**y),
    "maximum": (ts.maximum, torch.maximum),
    "minimum": (ts.minimum, torch.minimum),
    "mul": (lambda x, y: x * y, lambda x, y: x * y),
    "div": (lambda x, y: x / y, lambda x, y: x / y),
    "mod": (lambda x, y: x % y, torch.remainder),
    "atan2": (ts.atan2, torch.atan2),
}
# Points at which a function changes its formula, and numbers near them.
EDGES = np.array([0, 0.5, 1, -1, 2, 1e2, -1e2, 1e3, 1e4, -1e4, 1e5, -1e5, 1e30], np.float32)
PROBS = np.array([0, 1e-20, 1e-13, 1e-8, 0.3, 0.9999999, 1], np.float32)


def same(ours: list[Array], theirs: list[Array], names: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=names)


def slopes(ours: Any, theirs: Any, *points: Array) -> tuple[list[Array], list[Array]]:
    mine = [ts.tensor(p) for p in points]
    got = [g.numpy() for g in ts.grad(ours(*mine).sum(), mine)]
    tensors = [torch.tensor(p, requires_grad=True) for p in points]
    theirs(*tensors).sum().backward()
    return got, [t.grad.numpy() for t in tensors]


@pytest.mark.parametrize("name", ONE)
def test_one_argument(name: str, oracle: Oracle) -> None:
    with np.errstate(all="ignore"):
        same(*slopes(*ONE[name], POINTS), name)


@pytest.mark.parametrize("name", TWO)
def test_two_arguments(name: str, oracle: Oracle) -> None:
    with np.errstate(all="ignore"):
        same(*slopes(*TWO[name], *PAIRS), name)


@pytest.mark.parametrize(
    "name",
    ["asinh", "sinh", "cosh", "atanh", "atan", "asin", "acos", "tan", "erfc", "erfinv"],
)
def test_where_one_formula_goes_over_to_another(name: str, oracle: Oracle) -> None:
    with np.errstate(all="ignore"):
        same(*slopes(getattr(ts, name), getattr(torch, name), EDGES), name)


def test_acosh_from_its_first_point_to_infinity(oracle: Oracle) -> None:
    points = np.append(EDGES[EDGES >= 0.5], np.float32(np.inf))
    with np.errstate(all="ignore"):
        same(*slopes(ts.acosh, torch.acosh, points), "acosh")


def test_an_angle_of_tiny_and_of_huge_points(oracle: Oracle) -> None:
    """Squares of the points are 0 or infinite in f32, and PyTorch's slopes NaN or 0."""
    x = [ts.tensor(np.array([0.0, size], np.float32)) for size in (1e-30, 1e30)]
    for t, want in zip(x, (1e30, 1e-30), strict=True):
        (g,) = ts.grad(ts.atan2(t[0], t[1]), [t])
        np.testing.assert_allclose(g.numpy(), [want, 0.0], rtol=1e-5)


def test_binary_cross_entropy_of_certain_probabilities(oracle: Oracle) -> None:
    theirs: Any = torch.nn.functional.binary_cross_entropy
    for target in (0.0, 0.3, 1.0):
        y = np.full_like(PROBS, target)
        ours = nn.binary_cross_entropy(PROBS, y, reduction="none").numpy()
        want = theirs(torch.tensor(PROBS), torch.tensor(y), reduction="none").numpy()
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-7)
        got = slopes(
            lambda p, y=y: nn.binary_cross_entropy(p, y),
            lambda p, y=y: theirs(p, torch.tensor(y)),
            PROBS,
        )
        same(*got, str(target))
    x, y = np.array([200.0, -200.0], np.float32), np.array([0.0, 1.0], np.float32)
    same(
        *slopes(
            lambda x: nn.binary_cross_entropy(ts.sigmoid(x), y),
            lambda x: theirs(torch.sigmoid(x), torch.tensor(y)),
            x,
        ),
        "of logits",
    )


def test_a_maximum_with_a_nan_hands_the_gradient_on(oracle: Oracle) -> None:
    x, y = np.array([np.nan, 1.0], np.float32), np.array([1.0, np.nan], np.float32)
    for ours, theirs in (TWO["maximum"], TWO["minimum"]):
        same(*slopes(ours, theirs, x, y), "")
