"""Models of other libraries: results, gradients and two training steps on a mesh.

`--long` runs every fourth, `--all-samples` all, as `bench/models_table.py` does for the published
table.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tessera as ts
from tests.cases import short
from tests.quickly import quickly

from .model_check import LIMIT, check
from .zoo import MODELS

DAILY = ("transformers-llama", "transformers-bert", "transformers-vit", "diffusers-UNet2DModel",
         "timm-ResNet",
         "flax-encoder", "equinox-conv")  # fmt: skip
FOURTH = tuple(MODELS)[::4]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


@pytest.mark.filterwarnings("ignore:1F1B. with 2 microbatches")  # four rows, over dp=2
@pytest.mark.parametrize("name", short(MODELS, *DAILY))
def test_a_model(name: str, request: pytest.FixtureRequest) -> None:
    if name not in DAILY + FOURTH and not request.config.getoption("--all-samples"):
        pytest.skip("runs with --all-samples")
    model = MODELS[name]
    pytest.importorskip(model.library)
    if model.refused:
        with pytest.raises(ts.TesseraError, match=model.refused):
            check(model)
        return
    found = check(model)
    assert found.forward <= LIMIT
    assert found.gradient <= LIMIT
    assert found.mesh <= LIMIT
    assert (found.stages or 0.0) <= LIMIT
