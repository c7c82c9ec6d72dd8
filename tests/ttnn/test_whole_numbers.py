"""Integer ops: exact, with float32 results for fractions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tessera import ttnn

# f32 cannot represent these, so a conversion through floats would show.
A = torch.tensor([[16777217, -7, 2147483647, 5], [-16777219, 9, -5, 2147480001]], dtype=torch.int32)
B = torch.tensor([[2, 3, 4, -3], [5, -2, 3, 7]], dtype=torch.int32)


def there(x: torch.Tensor, device: ttnn.MeshDevice, dtype: Any = None) -> ttnn.Tensor:
    return ttnn.from_torch(x, dtype, layout=ttnn.TILE_LAYOUT, device=device)


def back(x: ttnn.Tensor) -> torch.Tensor:
    found: torch.Tensor = ttnn.to_torch(ttnn.get_device_tensors(x)[0])
    return found


EXACT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (lambda x, y: ttnn.sum(x, 1), lambda a, b: a.sum(1).to(torch.int32)),
    "max": (lambda x, y: ttnn.max(x, 0), lambda a, b: a.amax(0)),
    "min": (lambda x, y: ttnn.min(x), lambda a, b: a.amin()),
    "plus a float": (lambda x, y: ttnn.subtract(x, 2.0), lambda a, b: a - 2),
    "addalpha": (lambda x, y: ttnn.addalpha(x, y), lambda a, b: a + b),
    "fmod": (ttnn.fmod, torch.fmod),
    "remainder": (ttnn.remainder, torch.remainder),
    "floor": (
        lambda x, y: ttnn.divide(x, y, round_mode="floor"),
        lambda a, b: torch.div(a, b, rounding_mode="floor"),
    ),
    "trunc": (
        lambda x, y: ttnn.divide(x, y, round_mode="trunc"),
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    ),
    "shift": (
        ttnn.logical_right_shift,
        lambda a, b: ((a.long() & 0xFFFFFFFF) >> b.long()).to(torch.int32),
    ),
    "ceil": (lambda x, y: ttnn.ceil(x), lambda a, b: a),
    "eq": (ttnn.eq, lambda a, b: (a == b).to(torch.int32)),
}


@pytest.mark.parametrize("name", EXACT)
def test_whole_results_are_exact(name: str, pair: ttnn.MeshDevice) -> None:
    ours, theirs = EXACT[name]
    b = B.abs() if name == "shift" else B
    found = ours(there(A, pair), there(b, pair))
    assert found.dtype is ttnn.int32
    torch.testing.assert_close(back(found), theirs(A, b), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["exp", "mean", "sqrt", "divide", "softmax"])
def test_results_with_a_fraction_are_floats(name: str, pair: ttnn.MeshDevice) -> None:
    x, y = B.abs(), B.T.reshape(2, 4)
    theirs: dict[str, Any] = {
        "divide": x / y, "mean": x.float().mean(), "softmax": x.float().softmax(-1),
    }  # fmt: skip
    more = (there(y, pair),) if name == "divide" else ()
    found = getattr(ttnn, name)(there(x, pair), *more)
    assert found.dtype is ttnn.float32
    want = theirs[name] if name in theirs else getattr(torch, name)(x)
    torch.testing.assert_close(back(found), want)


def test_a_tensor_of_whole_numbers_takes_no_fraction(pair: ttnn.MeshDevice) -> None:
    x, out = there(B, pair), there(B.float(), pair)
    ttnn.divide(x, x, output_tensor=out)
    assert back(out).tolist() == [[1.0] * 4] * 2
    with pytest.raises(ttnn.TTNNError, match="divide: the result does not fit the tensor"):
        ttnn.divide(x, 2, output_tensor=x)


def test_an_index_is_of_whole_numbers(pair: ttnn.MeshDevice) -> None:
    x, half = there(B.float(), pair), there(B.float() / 2, pair)
    for call in (lambda: ttnn.gather(x, 1, half), lambda: ttnn.scatter(x, 1, half, x)):
        with pytest.raises(ttnn.TTNNError, match="the index is of whole numbers, not"):
            call()


def test_what_is_left_is_exact_of_floats_too(pair: ttnn.MeshDevice) -> None:
    a = torch.tensor([[1e8, 5.0, -5.87e3, 7.5, -6.0, 3.0e30]])
    b = torch.tensor([[3.0, float("inf"), -1.24e-3, -2.0, 3.0, 7.0]])
    torch.testing.assert_close(back(ttnn.fmod(there(a, pair), there(b, pair))), torch.fmod(a, b),
                               rtol=0, atol=0)  # fmt: skip


@pytest.mark.parametrize("name", ["hardshrink", "softshrink"])
def test_what_is_no_number_stays_none(name: str, pair: ttnn.MeshDevice) -> None:
    x = torch.tensor([[float("nan"), 0.2, -3.0, 0.5]])
    torch.testing.assert_close(
        back(getattr(ttnn, name)(there(x, pair))), getattr(torch.nn.functional, name)(x),
        equal_nan=True,
    )  # fmt: skip
