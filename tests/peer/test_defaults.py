"""The table of defaults in docs/ops.md, against both libraries."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import nn, optim

torch = pytest.importorskip("torch")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ops.md").read_text()
TABLE = PAGE.partition("## Defaults that differ")[2].partition("Some are no arguments")[0]
CALL = re.compile(r"`([\w.]+)\((\w+)=(.*?)\)`")
FOUND = [CALL.findall(line) for line in TABLE.splitlines() if line.startswith("| `")]
CALLS = sorted({call for line in FOUND for call in line})


def default_of(function: Any, name: str) -> Any:
    """The default of an argument; for C functions it is read from the docstring's first lines."""
    try:
        return inspect.signature(function).parameters[name].default
    except ValueError:
        return eval(re.search(rf"{name} ?= ?([^,)]+)", inspect.getdoc(function) or "")[1])  # type: ignore[index]


@pytest.mark.parametrize(("path", "name", "value"), CALLS)
def test_the_table_says_what_is_the_default(path: str, name: str, value: str) -> None:
    function = eval(path, {"ts": ts, "nn": nn, "optim": optim, "torch": torch})
    assert default_of(function, name) == eval(value)


def test_the_sides_of_a_row_differ() -> None:
    assert len(FOUND) == 14 and all(len(row) in (1, 2, 4) for row in FOUND)
    for row in FOUND:
        half = len(row) // 2
        for (_, _, here), (_, _, there) in zip(row[:half], row[half:]):
            assert eval(here) != eval(there)


def test_what_is_no_argument_differs_as_the_page_says() -> None:
    rows, pair = np.arange(12.0, dtype=np.float32).reshape(3, 4), (np.arange(2), np.arange(3))
    ours, theirs = ts.tensor(rows), torch.tensor(rows)
    assert [g.shape for g in ts.meshgrid(*map(ts.tensor, pair))] == [(3, 2)] * 2
    mesh = torch.meshgrid(*map(torch.tensor, pair), indexing="ij")  # its default, with a warning
    assert [tuple(g.shape) for g in mesh] == [(2, 3)] * 2
    assert ts.take(ours, [0, 1]).shape == (2, 4)
    assert torch.take(theirs, torch.tensor([0, 1])).shape == (2,)
    assert ts.full((2,), 1).dtype is ts.f32 and torch.full((2,), 1).dtype == torch.int64
    assert ts.linalg.svd(ours)[2].shape == (3, 4) and torch.linalg.svd(theirs)[2].shape == (4, 4)
    a = np.eye(3, dtype=np.float32) + np.zeros((3, 3, 3), np.float32)
    b = np.ones((3, 3), np.float32)
    assert ts.linalg.solve(a, b).shape == np.linalg.solve(a, b).shape == (3, 3, 3)
    assert torch.linalg.solve(torch.tensor(a), torch.tensor(b)).shape == (3, 3)
    low = np.array([[1.0, 5.0], [2.0, 4.0]], np.float32)
    want = np.linalg.solve(np.tril(low), [1.0, 1.0])
    np.testing.assert_allclose(ts.linalg.solve_triangular(low, [1.0, 1.0]).numpy(), want)
    with pytest.raises(TypeError, match="upper"):
        torch.linalg.solve_triangular(torch.tensor(low), torch.ones(2, 1))
    narrow = ts.ones(2, dtype=ts.bf16)
    assert (narrow + ts.tensor(1.0)).dtype is ts.f32 and (narrow + 1.0).dtype is ts.bf16
    bf16 = torch.bfloat16
    assert (torch.ones(2, dtype=bf16) + torch.tensor(1.0)).dtype == bf16
    cube = np.zeros((2, 4, 3), np.float32)
    assert ts.tensor(cube)[0, :, [1, 2]].shape == (4, 2) == torch.tensor(cube)[0, :, [1, 2]].shape
    assert cube[0, :, [1, 2]].shape == (2, 4)
    six = np.zeros(6, np.float32)
    assert [len(p) for p in ts.split(ts.tensor(six), [2, 4])] == [2, 4]
    assert [len(p) for p in np.split(six, [2, 4])] == [2, 2, 2]
    assert ts.tensor([1000.0]).to("fp8_e4m3").to("f32").numpy().tolist() == [448.0]


def test_weights_of_one_dim_do_not_decay() -> None:
    w = {"w": ts.ones((2, 2)), "b": ts.ones(2)}
    zero = {n: ts.zeros_like(t) for n, t in w.items()}
    for rule, rest in ((optim.AdamW(1.0), 1.0), (optim.AdamW(1.0, mask=lambda name: True), 0.9)):
        new, _ = rule.update(w, zero, rule.init(w))
        np.testing.assert_allclose(new["w"].numpy(), 0.9, rtol=1e-6)
        np.testing.assert_allclose(new["b"].numpy(), rest, rtol=1e-6)
    theirs = [torch.nn.Parameter(torch.ones(2))]
    rule = torch.optim.AdamW(theirs, 1.0, weight_decay=0.1)
    theirs[0].grad = torch.zeros(2)
    rule.step()
    np.testing.assert_allclose(theirs[0].detach().numpy(), 0.9, rtol=1e-6)


def test_a_linear_of_theirs_is_transposed_by_hand() -> None:
    theirs, ours = torch.nn.Linear(3, 3), nn.Linear(3, 3)
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    want = theirs(torch.tensor(x)).detach().numpy()
    values = {n: t.detach().numpy() for n, t in theirs.state_dict().items()}
    ours.load_state_dict(values)
    assert not np.allclose(ours(ts.tensor(x)).numpy(), want, atol=1e-3)
    ours.load_state_dict({**values, "weight": values["weight"].T})
    np.testing.assert_allclose(ours(ts.tensor(x)).numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", [
    lambda: nn.BatchNorm(4, 1e-5, 0.1),  # eps and momentum
    lambda: nn.Embedding(4, 2, 0),  # padding_idx
    lambda: nn.RMSNorm(4, 1e-6, True),  # elementwise_affine
])  # fmt: skip
def test_what_stands_elsewhere_there_is_not_taken_by_place(call: Any) -> None:
    with pytest.raises(ts.UsageError, match="give the others by name"):
        call()


def test_split_takes_the_number_of_parts() -> None:
    assert [p.shape for p in ts.split(ts.ones(6), 2)] == [(3,), (3,)]
    assert [tuple(p.shape) for p in torch.split(torch.ones(6), 2)] == [(2,)] * 3


def test_first_values() -> None:
    ours, theirs = nn.Linear(400, 300), torch.nn.Linear(400, 300)
    assert ours.bias is not None and not ours.bias.numpy().any() and theirs.bias.abs().max() > 0
    assert abs(float(ts.std(ours.weight)) * 20 - 1) < 0.02
    assert theirs.weight.abs().max() <= 1 / 20 + 1e-6 < float(ts.max(ours.weight))
    assert abs(torch.nn.Embedding(100, 100).weight.std().item() - 1) < 0.05
