"""A loop over `parameters()` as if over weights: the error says how to get the weights."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import tessera as ts
from tessera import nn


@pytest.mark.parametrize("use", [
    lambda p: p.numel(), lambda p: p.data, lambda p: p.grad, lambda p: p.shape,
    lambda p: setattr(p, "requires_grad", False), lambda p: p**2, lambda p: p * 2, lambda p: 2 * p,
])  # fmt: skip
def test_a_name_that_is_taken_for_a_weight_says_so(use: Callable[[Any], Any]) -> None:
    with pytest.raises(ts.TesseraError, match=r"for p in model\.parameters\(\)\.values\(\)"):
        [use(p) for p in nn.Linear(2, 3).parameters()]


def test_names_are_strings() -> None:
    layer = nn.Linear(2, 3)
    weights = layer.parameters()
    assert type(weights) is dict and weights["weight"] is layer.weight
    assert [*weights] == ["weight", "bias"] and repr([*weights]) == "['weight', 'bias']"
    assert {**weights} == dict(layer.named_parameters()) and type(layer.weight.name) is str
    name = next(iter(weights))
    assert hash(name) == hash("weight") and f"{name:>8}" == "  weight" and name[0] == "w"
    assert not hasattr(name, "numel") and not hasattr(name, "__array__")
    for other in (pickle.loads(pickle.dumps(name)), copy.deepcopy(name), str(name)):
        assert other == "weight" and type(other) is str
    assert json.loads(json.dumps({name: 1})) == {"weight": 1}
    assert {type(n) for n in layer.state_dict()} == {str}
    assert sum(p.size for p in weights.values()) == 9


def test_a_long_text_of_a_module_is_shown_in_part() -> None:
    layer = nn.Linear(2, 3)
    layer.source = "{'model_type': 'llama'" * 50
    assert len(repr(layer).splitlines()[0]) < 150 and "…" in repr(layer)
