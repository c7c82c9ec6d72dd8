"""Texts of tensors: the values as NumPy writes them, on any layout, and what is read for it."""

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.runtime import picked

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
LAYOUTS = [
    ((), "[]"), ((40, 50), "[40, 50]"), ((40, 50), "[40@dp, 50@tp]"), ((41, 30), "[41@tp, 30@dp]"),
    ((7, 300), "[7@tp, 300]"), ((64, 32), "[64@(dp,tp), 32]"), ((5, 6, 7, 8), "[5, 6@dp, 7@tp, 8]"),
    ((2000,), "[2000@tp]"), ((3, 4), "[3@dp, 4@tp]"), ((7, 3), "[7, 3]"), ((0, 3), "[0, 3@dp]"),
    ((1003,), "[1003@dp]"),
]  # fmt: skip
FOLDS = [None, "dp=1,tp=4", "dp=2,tp=2", "dp=1,tp=1"]


def expected(value: np.ndarray[Any, Any]) -> str:
    return np.array2string(value, separator=", ", prefix="Tensor(")


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_text_is_that_of_numpy(shape: tuple[int, ...], layout: str, fold: str | None) -> None:
    mesh = MESH if fold is None else MESH.fold(fold)
    value = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
    x = ts.tensor(value, mesh=mesh, layout=layout)
    for t in (x, x * 1.0):  # one that waits for its first use, and a result
        text = repr(t)
        assert text.startswith(f"Tensor({expected(value)},"), text
        assert text.split("f32")[-1].startswith(x.type.text.removeprefix("f32")), text


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("shape", [(6, 4), (60, 40), ()])
def test_terms_of_a_pending_sum_are_added(shape: tuple[int, ...], fold: str | None) -> None:
    mesh = MESH if fold is None else MESH.fold(fold)
    value = np.random.default_rng(2).integers(0, 9, (8, *shape, 8)).astype(np.float32)
    dims = "".join(f", {n}" for n in shape)
    x = ts.tensor(value, mesh=mesh, layout=f"[8@dp{dims}, 8@tp]")
    total = x.sum((0, -1))
    assert total.type.partial_axes
    assert repr(total).startswith(f"Tensor({expected(value.sum((0, -1)))},")


def test_only_what_is_shown_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    at = picked._at

    def counted(x: Any, index: Any) -> Any:
        got = at(x, index)
        read.append(got.size)
        return got

    monkeypatch.setattr(picked, "_at", counted)
    monkeypatch.setattr("tessera.runtime.arrays.fetch", None)
    repr(ts.tensor(np.ones((512, 64), np.float32), mesh=MESH, layout="[512@dp, 64@tp]") * 2.0)
    assert sum(read) == 36 and len(read) == 4  # the corners, each on one device


@pytest.mark.parametrize(
    "value",
    [np.array([1, -2], np.int32), np.array([True, False]), np.array([1.5, np.nan, np.inf], "f4"),
     np.arange(3, dtype=np.uint8)],
)  # fmt: skip
def test_dtypes(value: np.ndarray[Any, Any]) -> None:
    assert repr(ts.tensor(value)).startswith(f"Tensor({expected(value)}, ")


def test_narrow_floats() -> None:
    assert repr(ts.tensor([1.0, 2.5]).to(ts.bf16)) == "Tensor([1. , 2.5], bf16[2])"


def test_print_options_of_numpy_hold() -> None:
    x = ts.arange(100)
    with np.printoptions(threshold=10, edgeitems=2):
        assert repr(x) == "Tensor([ 0,  1, ..., 98, 99], i32[100])"


def test_a_name_and_long_types_follow() -> None:
    x = ts.tensor(np.arange(18, dtype=np.float32), mesh=MESH, layout="[18@dp]")
    with np.printoptions(linewidth=60):
        assert repr(x).splitlines()[-1] == "       f32[18@dp] on dp=2 tp=4)"
    assert repr(ts.tensor([1.0], name="w")) == "Tensor([1.], f32[1], 'w')"


def test_printing_makes_no_large_weight() -> None:
    layer, small = nn.Linear(64, 64), nn.Linear(2, 2)
    assert repr(layer.weight) == "<Tensor f32[64, 64], not made yet>"
    assert repr(small.weight).startswith("Tensor([[")
    assert small.weight._data is None  # its layout is still open
    assert repr(small.weight).startswith(f"Tensor({expected(small.weight.numpy())}")
    assert repr(ts.zeros((4000, 4000))).startswith("Tensor([[0., 0., 0., ..., 0., 0., 0.],")


def test_a_recording_shows_types() -> None:
    outer, seen = ts.tensor([1.0, 2.0]), []

    @ts.jit
    def f(x: ts.Tensor) -> ts.Tensor:
        seen.extend([repr(x), repr(x * 2.0), repr(outer)])
        return x + outer

    f(ts.tensor([3.0, 4.0]))
    assert seen == ["<Tensor f32[2]>"] * 3


def test_a_donated_tensor_says_so() -> None:
    x = ts.tensor(np.ones((8, 4), np.float32), mesh=MESH, layout="[8@dp, 4]") * 1.0
    ts.jit(lambda x: x * 2.0, donate=(0,))(x)
    assert repr(x) == "<Tensor f32[8@dp, 4] on dp=2 tp=4, donated>"


def test_errors_show_types() -> None:
    with pytest.raises(ts.ShapeError, match="f32") as raised:
        ts.ones((2, 3)) @ ts.ones((2, 3))
    assert "Tensor(" not in str(raised.value)
    with pytest.raises(ts.UsageError, match="<Tensor f32"):
        ts.einsum(ts.ones((2, 3)), ts.ones(3))  # type: ignore[arg-type]
