"""Models of other libraries: results, gradients and two training steps on a mesh."""

from __future__ import annotations

import pytest

from tests.cases import short

from .model_check import LIMIT, check
from .models import MODELS


@pytest.mark.parametrize("name", short(MODELS, "llama", "bert", "vit"))
def test_a_model(name: str) -> None:
    pytest.importorskip(MODELS[name].library)
    found = check(MODELS[name])
    assert found.forward <= LIMIT
    assert found.gradient <= LIMIT
    assert found.mesh <= LIMIT
