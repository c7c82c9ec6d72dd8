"""Names of layers where a program runs: in its profile, and in the compiled program's metadata."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.runtime.arrays import array_shape, sharding
from tessera.runtime.lower import lower

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


class Net(nn.Module):
    def __init__(self) -> None:
        self.blocks = [nn.Linear(8, 8) for _ in range(3)]

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        for block in self.blocks:
            x = nn.relu(block(x))
        return x


@pytest.fixture(scope="module")
def step() -> tuple[Any, ts.Tensor]:
    net = Net()
    x = ts.tensor(np.ones((16, 8), np.float32), mesh=MESH, layout="[16@dp, 8]")
    return ts.jit(lambda x: ts.grad(net(x).sum(), net.trainable_parameters())), x


def test_a_row_has_the_user_line_and_by_layer_sums_the_rows(step: Any) -> None:
    f, x = step
    p = dist.profile(f, x, runs=2)
    assert all(re.fullmatch(r"test_layer_profile.py:\d+", r.at) for r in p.rows)
    assert p.rows[0].at in str(p)
    by = {r.path: r for r in p.by_layer()}
    assert {f"net/blocks.{i}" for i in range(3)} <= set(by)
    totals = p.totals_s
    for kind in ("compute", "transfer", "wait"):
        assert sum(getattr(r, f"{kind}_s") for r in by.values()) == pytest.approx(totals[kind])
    lists = {r.path: r for r in p.by_layer(depth=2)}
    inside = sum(by[f"net/blocks.{i}"].compute_s for i in range(3))
    assert lists["net/blocks"].compute_s == pytest.approx(inside)
    assert {r.path for r in p.by_layer(1)} >= {"net", "grad"}
    seconds = [r.total_s for r in p.by_layer()]
    assert seconds == sorted(seconds, reverse=True)
    assert str(p.by_layer()).splitlines()[0].split()[:3] == ["layer", "all", "share"]
    assert "<pre" in p.by_layer()._repr_html_()
    with pytest.raises(ts.UsageError, match="by_layer: depth"):
        p.by_layer(depth=0)


def test_the_compiled_program_has_the_same_names(step: Any) -> None:
    f, x = step
    s = f.plan(x)
    given = [s.buffers[b] for b in s.inputs]
    text = lower(s).lower(*(
        jax.ShapeDtypeStruct(
            array_shape(t), t.dtype.numpy, sharding=sharding(t) if t.mesh else None
        )
        for t in given
    )).compile().as_text()  # fmt: skip
    names = re.findall(r'op_name="([^"]*)"', text)
    products = [line for line in text.splitlines() if " dot(" in line]
    for i in range(3):
        assert any(f"net/blocks.{i}/" in name for name in names), names
        assert any(f"net/blocks.{i}/" in line for line in products)
