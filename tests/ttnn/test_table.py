"""The table of TT-NN ops: facts of every row, and ops with several results."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from tessera import ttnn

ROWS: dict[str, Any] = {
    name: function
    for module in (ttnn, ttnn.transformer, ttnn.experimental)
    for name in module.__all__
    if isinstance(function := getattr(module, name), FunctionType) and hasattr(function, "op")
}


def test_the_table_has_the_ops() -> None:
    assert len(ROWS) > 200
    assert {"relu", "add_", "matmul", "concat", "all_gather", "rotary_embedding"} <= {*ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_a_keyword_that_is_not_there_is_refused(name: str) -> None:
    row = ROWS[name].op
    assert row.doc
    first = next(iter(row.parameters))
    with pytest.raises(ttnn.TTNNError, match=f"{row.name}: it has no argument '{first}z'") as error:
        ROWS[name](**{f"{first}z": 1})
    assert f"the nearest are {first}" in str(error.value)


def test_several_results_are_written_into_several_tensors(pair: ttnn.MeshDevice) -> None:
    x = ttnn.from_torch(np.array([[3.0, 1.0, 2.0]], np.float32), device=pair)
    values = ttnn.zeros((1, 2), ttnn.float32, device=pair)
    places = ttnn.zeros((1, 2), ttnn.uint16, device=pair)
    found = ttnn.topk(x, 2, output_tensor=(values, places))
    assert found[0] is values and found[1] is places
    parts = [ttnn.get_device_tensors(t)[1].to_list() for t in (values, places)]
    assert parts == [[[3.0, 2.0]], [[0, 2]]]
    with pytest.raises(ttnn.TTNNError, match="topk: it has no argument 'dtype'"):
        ttnn.topk(x, 2, dtype=ttnn.float32)


def test_an_op_that_writes_into_an_operand_takes_no_other_tensor(pair: ttnn.MeshDevice) -> None:
    x = ttnn.ones((1, 2), device=pair)
    with pytest.raises(ttnn.TTNNError, match="add_: it has no argument 'output_tensor'"):
        ttnn.add_(x, x, output_tensor=x)


def test_options_may_be_arrays_and_iterators(pair: ttnn.MeshDevice) -> None:
    x = ttnn.ones((1, 2, 3), device=pair)
    pair.clear_program_cache()
    for dims in ((2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1]), iter([2, 0, 1])):
        assert ttnn.permute(x, dims).shape == (3, 1, 2)
    assert pair.num_program_cache_entries() == 1
