"""Models of Flax and Equinox, whose classes are in `tests/jax_models.py`."""

from __future__ import annotations

from typing import Any

from .model import Model, add


def jax_row(library: str, name: str) -> None:
    def made() -> Any:
        from tests.jax_models import MAKERS

        return MAKERS[name]

    add(Model(name, library, lambda: made()[0](), lambda: {"x": made()[1]}))


for _name in ("mlp", "cnn", "encoder", "lstm", "gru", "vit", "residual", "mixer", "decoder", "nnx"):
    jax_row("flax", _name)
for _name in ("autoencoder", "conv", "attention"):
    jax_row("equinox", _name)
