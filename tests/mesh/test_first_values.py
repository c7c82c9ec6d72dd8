"""Initial values of small weights: one program for many shapes, with the values of separate
programs, in any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.compile import Engine
from tessera.lang.math import create

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


@pytest.mark.parametrize("init", ["normal", create.Normal(0.02), "zeros", "ones", None, 3, 0.5])
@pytest.mark.parametrize("shape", [(5, 7), (64, 65), (3,), (), (0, 4), (2, 3, 5)])
def test_small_weights_have_the_values_of_large_ones(
    shape: Any, init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(layout: Any) -> Any:
        ts.seed(3)
        return dist.tensor(shape, init=init, name="w", mesh=MESH, layout=layout).numpy()

    split = f"[{', '.join([f'{shape[0]}@dp', *map(str, shape[1:])])}]" if shape else None
    found = [made(None), made(split)]
    monkeypatch.setattr(create, "SMALL", ())
    for x in found:
        np.testing.assert_array_equal(x, made(split))


def test_weights_of_many_shapes_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    create._draws.cache_clear()
    compiled: list[Any] = []
    plain = Engine.compile

    def counted(self: Engine, graph: Any, donate: Any = ()) -> Any:
        compiled.append(graph)
        return plain(self, graph, donate)

    monkeypatch.setattr(Engine, "compile", counted)
    layers = [nn.Linear(4 + i, 5 + i) for i in range(30)]
    values = [w.numpy() for layer in layers for w in layer.parameters().values()]
    assert len({v.shape for v in values}) == 60
    assert [g.name for g in compiled] == ["init"]
