"""Program styles written for TT-NN's hardware."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import ttnn

X = np.arange(40 * 48, dtype=np.float32).reshape(40, 48) / 7


@pytest.fixture
def x(pair: ttnn.MeshDevice) -> ttnn.Tensor:
    return ttnn.from_torch(X, layout=ttnn.TILE_LAYOUT, device=pair)


def back(x: ttnn.Tensor) -> Any:
    return ttnn.to_torch(ttnn.get_device_tensors(x)[0]).float().numpy()


KEEPING: dict[str, Callable[[ttnn.Tensor], ttnn.Tensor]] = {
    "tilize": lambda x: ttnn.tilize(x, use_multicore=True, use_low_perf=True),
    "untilize": lambda x: ttnn.untilize(x, use_multicore=False, use_pack_untilize=True),
    "fill up": lambda x: ttnn.tilize_with_val_padding(x, [64, 64], 70.0, use_multicore=True),
    "fill up with zeros": lambda x: ttnn.tilize_with_zero_padding(x, use_multicore=True),
    "in pieces": lambda x: ttnn.interleaved_to_sharded(
        x, ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG, output_dtype=ttnn.float32
    ),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_says_how_changes_no_value(name: str, x: ttnn.Tensor) -> None:
    np.testing.assert_array_equal(back(KEEPING[name](x)), X)


def test_a_tensor_is_filled_up_to_no_smaller_shape(x: ttnn.Tensor) -> None:
    with pytest.raises(ttnn.TTNNError, match=r"(?s)a shape that is not smaller.*give \[64, 64\]"):
        ttnn.tilize_with_val_padding(x, [32, 64], 0.0)


def test_tensors_come_out_of_pieces_in_another_type(x: ttnn.Tensor) -> None:
    assert ttnn.sharded_to_interleaved(x, output_dtype=ttnn.bfloat16).dtype is ttnn.bfloat16


@pytest.mark.parametrize("dtype", [ttnn.bfloat8_b, ttnn.bfloat4_b], ids=lambda d: d.name)
def test_blocks_in_rows_are_bfloat16(dtype: Any, x: ttnn.Tensor) -> None:
    blocks = ttnn.typecast(x, dtype)
    for rows in (ttnn.to_layout(blocks, ttnn.ROW_MAJOR_LAYOUT), ttnn.untilize(blocks.cpu())):
        assert (rows.dtype, rows.layout) == (ttnn.bfloat16, ttnn.ROW_MAJOR_LAYOUT)
        np.testing.assert_array_equal(back(rows), back(blocks))


def test_parts_of_a_tensor_on_the_host() -> None:
    host = ttnn.from_torch(X)
    np.testing.assert_array_equal(back(host[:3, 40:]), X[:3, 40:])
    np.testing.assert_array_equal(back(host[5]), X[5])


@pytest.mark.parametrize("dim", [2, -3])
def test_dims_that_are_not_there(dim: int, x: ttnn.Tensor) -> None:
    with pytest.raises(ttnn.TTNNError, match=f"squeeze: the tensor has no dim {dim}"):
        ttnn.squeeze(x, dim)
    beyond = dim + (1 if dim > 0 else -1)
    with pytest.raises(ttnn.TTNNError, match=f"unsqueeze: the tensor has no dim {beyond}"):
        ttnn.unsqueeze(x, beyond)
    assert ttnn.unsqueeze(x, dim).shape == ((40, 48, 1) if dim > 0 else (1, 40, 48))


def test_every_error_is_one_of_runtime(x: ttnn.Tensor) -> None:
    with pytest.raises(RuntimeError) as caught:
        ttnn.reshape(x, (7, 7))
    assert isinstance(caught.value, ts.ShapeError) and type(caught.value).__name__ == "ShapeError"


def test_a_tensor_of_no_elements(pair: ttnn.MeshDevice) -> None:
    none = ttnn.from_torch(np.zeros((0, 4), np.float32), device=pair)
    assert back(none).shape == (0, 4)


def test_files_keep_the_memory(tmp_path: Path, pair: ttnn.MeshDevice) -> None:
    there = ttnn.from_torch(X, device=pair, memory_config=ttnn.L1_MEMORY_CONFIG)
    ttnn.dump_tensor(tmp_path / "x.tensorbin", there)
    found = ttnn.load_tensor(tmp_path / "x.tensorbin", device=pair)
    assert ttnn.get_memory_config(found) == ttnn.L1_MEMORY_CONFIG


def test_an_activations_parameter_says_how_or_is_refused(x: ttnn.Tensor) -> None:
    fast = ttnn.UnaryWithParam(ttnn.UnaryOpType.EXP, True)
    np.testing.assert_allclose(
        back(ttnn.multiply(x, -1.0, activations=[fast])), np.exp(-X), rtol=1e-5, atol=1e-30
    )
    sharp = ttnn.UnaryWithParam(ttnn.UnaryOpType.SOFTPLUS, 2.0)
    with pytest.raises(ttnn.TTNNError, match=r"'softplus' takes no parameter, such as 2\.0"):
        ttnn.add(x, 1.0, activations=[sharp])


def test_none_leaves_what_the_other_tensor_has(x: ttnn.Tensor) -> None:
    like = ttnn.zeros_like(x, dtype=None, layout=None)
    assert (like.dtype, like.layout) == (ttnn.float32, ttnn.TILE_LAYOUT)


def test_numbers_in_order_lie_in_rows(pair: ttnn.MeshDevice) -> None:
    numbers = ttnn.arange(0, 10, 3, device=pair)
    assert (numbers.shape, numbers.layout) == ([4], ttnn.ROW_MAJOR_LAYOUT)
    assert ttnn.arange(4, dtype=ttnn.bfloat8_b).layout is ttnn.TILE_LAYOUT


def test_no_dims_are_all(x: ttnn.Tensor) -> None:
    for name in ("sum", "var", "max"):
        assert getattr(ttnn, name)(x, dim=[], keepdim=True).shape == (1, 1)


def test_a_clamp_has_a_bound(x: ttnn.Tensor) -> None:
    with pytest.raises(ttnn.TTNNError, match="neither min nor max is given"):
        ttnn.clamp(x)


@pytest.mark.parametrize("dim", [0, -1])
def test_places_are_those_that_are_named(dim: int, x: ttnn.Tensor) -> None:
    names = np.arange(X.size).reshape(X.shape) % 60000
    ids = ttnn.from_torch(names, dtype=ttnn.uint16, layout=ttnn.TILE_LAYOUT, device=x.device())
    values, places = ttnn.topk(x, 3, dim=dim, indices_tensor=ids)
    at = np.argsort(-X, axis=dim).take(range(3), dim)
    np.testing.assert_array_equal(back(values), np.take_along_axis(X, at, dim))
    np.testing.assert_array_equal(back(places), np.take_along_axis(names, at, dim))


def test_a_memory_config_of_pieces_of_any_dims() -> None:
    config = ttnn.MemoryConfig(
        buffer_type=ttnn.BufferType.L1, nd_shard_spec=ttnn.NdShardSpec([32, 32])
    )
    assert config.is_sharded() and not ttnn.MemoryConfig().is_sharded()


@pytest.mark.parametrize(
    ("enumeration", "name", "says"),
    [
        (ttnn.UnaryOpType, "POWER", "UnaryOpType.POWER is not provided here"),
        (ttnn.Topology, "Star", r"(?s)Topology.Star is not.*it has Ring, Linear, Mesh, Torus"),
        (ttnn.DataType, "FLOAT64", r"(?s)DataType.FLOAT64 is not.*it has BFLOAT16, FLOAT32"),
    ],
    ids=["UnaryOpType", "Topology", "DataType"],
)
def test_a_member_that_is_not_here(enumeration: Any, name: str, says: str) -> None:
    with pytest.raises(AttributeError, match=says):
        getattr(enumeration, name)
