"""Ragged matrix products: those of each run of rows, by tiles and in blocks, for any sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import graph, nn
from tessera.core.dtypes import f32
from tessera.runtime import ragged
from tessera.runtime.xp_jax import contract
from tests.core.table import of_runs

WAYS = {
    "tiles": (ragged.dot_by_tiles, ragged.contract_by_tiles),
    "blocks": (ragged.dot_in_blocks, ragged.contract_in_blocks),
}


def programs(how: str) -> tuple[Any, ...]:
    dot, by_run = WAYS[how]
    dots = [jax.jit(partial(dot, contract, m, f32)) for m in ("dh", "hd")]
    return (*dots, jax.jit(partial(by_run, contract)))


PROGRAMS = {how: programs(how) for how in WAYS}


@st.composite
def divided(draw: Any) -> tuple[int, list[int]]:
    """Returns (rows, the number of rows in each run), for tiles of all sizes, whole and partial."""
    rows = draw(st.sampled_from([1, 63, 600, 2200]))
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=3, max_size=3)))
    return rows, np.diff([0, *cuts]).tolist()


@pytest.mark.parametrize("how", WAYS)
@settings(max_examples=25, deadline=None)
@given(divided())
def test_each_run_meets_its_own_matrix(how: str, division: tuple[int, list[int]]) -> None:
    rows, counts = division
    rng = np.random.default_rng(rows)
    n = np.array(counts, np.int32)
    x, g = (rng.normal(size=(rows, k)).astype(np.float32) for k in (5, 3))
    w = rng.normal(size=(len(n), 5, 3)).astype(np.float32)
    mine = of_runs(n[None, None], rows)[0, 0]
    dot, turned, by_run = PROGRAMS[how]
    wants = (
        (dot(x, w, n), "re,rd,edh->rh", (x, w)),
        (turned(g, w, n), "re,rh,edh->rd", (g, w)),
        (by_run(x, g, n), "re,rd,rh->edh", (x, g)),
        (by_run(g, x, n), "re,rd,rh->edh", (g, x)),
    )
    for got, index, values in wants:
        np.testing.assert_allclose(got, np.einsum(index, mine, *values), atol=1e-3)


@pytest.mark.parametrize("how", WAYS)
def test_a_row_that_is_no_number_stays_in_its_run(how: str) -> None:
    x, g, w = np.ones((9, 2), np.float32), np.ones((9, 3), np.float32), np.ones((3, 2, 3))
    x[4] = g[4] = np.nan  # a row of the second run; the last rows belong to no run
    x[8] = g[8] = np.inf
    n = np.array([4, 2, 1], np.int32)
    dot, _, by_run = PROGRAMS[how]
    assert np.isnan(dot(x, w.astype(np.float32), n)).all(1).tolist() == [r == 4 for r in range(9)]
    if how == "tiles":  # in blocks each gradient is a sum of all blocks, times one or zero
        assert np.isnan(by_run(x, g, n)).any((1, 2)).tolist() == [False, True, False]


def test_dropless_experts_compute_what_they_did_in_blocks() -> None:
    """Values and gradients, with more rows than a tile and an unused expert."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 300, 16)).astype(np.float32)
    w = {
        "router": rng.normal(size=(16, 6)).astype(np.float32) - 50.0 * (np.arange(6) == 3),
        "up": rng.normal(size=(6, 16, 24)).astype(np.float32) / 4,
        "gate": rng.normal(size=(6, 16, 24)).astype(np.float32) / 4,
        "down": rng.normal(size=(6, 24, 16)).astype(np.float32) / 5,
    }

    def run(block: int | None) -> Any:
        def loss(x: ts.Tensor, w: dict[str, ts.Tensor]) -> Any:
            y = nn.moe(x, w, k=2, block=block)
            return y, ts.grad((y * y).sum(), (x, w))

        return ts.jit(loss)(ts.tensor(x), {n: ts.tensor(v) for n, v in w.items()})

    for a, b in zip(jax.tree.leaves(run(None)), jax.tree.leaves(run(32)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)


def test_no_rows_are_computed_for_experts_that_have_none() -> None:
    """A program multiplies its rows alone, without padded blocks."""
    x, w = ts.ones((64, 8)), {"router": ts.ones((8, 4)), "up": ts.ones((4, 8, 16)),
                              "down": ts.ones((4, 16, 8))}  # fmt: skip
    nodes = graph.trace(lambda x, w: nn.moe(x, w, k=2), x, w).nodes
    products = [n for n in nodes if n.op == "ragged_dot"]
    assert [n.args[0].type.shape for n in products] == [(1, 1, 128, 8), (1, 1, 128, 16)]


def test_results_are_held_from_where_they_are_computed() -> None:
    """The results are not all held from the beginning of the program."""
    x, w, n = jnp.ones((4096, 64)), jnp.ones((8, 2, 64, 64)), jnp.array([4000, 96])

    def chain(x: Any, w: Any, n: Any) -> Any:
        for each in w:
            x = ragged.dot_by_tiles(contract, "dh", f32, x, each, n)
        return x

    memory = jax.jit(chain).lower(x, w, n).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * x.nbytes


def test_of_no_rows_there_are_none() -> None:
    x, w, n = jnp.ones((0, 5)), jnp.ones((3, 5, 4)), jnp.zeros(3, jnp.int32)
    assert ragged.dot_by_tiles(contract, "dh", f32, x, w, n).shape == (0, 4)
    assert not ragged.contract_by_tiles(contract, x, jnp.ones((0, 4)), n).any()
