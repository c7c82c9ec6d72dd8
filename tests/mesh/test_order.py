"""Sums over devices in a fixed order: bit for bit the sum of the same tree on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.op import OPS
from tessera.ops.redistribute import COLLECTIVES
from tessera.runtime import xp_jax
from tessera.runtime.devices import start
from tessera.runtime.fixed_order import LARGE, SMALL, FixedXp, chain, ordered_sum, tree


def test_what_says_that_it_sums_in_an_order_of_its_own_has_one() -> None:
    ours = {k for k, f in vars(FixedXp).items() if f is not vars(xp_jax).get(k)}
    assert ours == {k for k, op in OPS.items() if op.mesh_invariance == "sums"} - COLLECTIVES


@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("order", "folds", "dtype"),
    [
        ("binary", 1, "float32"),
        ("binary", 1, "bfloat16"),
        ("binary", 3, "float32"),
        ("ring", 2, "float32"),
    ],
)
def test_blocks_of_any_size_give_the_tree(order: str, folds: int, dtype: str, devices: int) -> None:
    start(8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    rng = np.random.default_rng(0)
    terms = []
    for size in (5, SMALL * devices + 3, LARGE + 3):
        made = rng.normal(size=(devices * folds, size)) * 10.0 ** rng.integers(-6, 6, (1, size))
        made[:, :2] = -0.0  # some sums start at +0, so the total is +0 in all
        terms.append(jnp.asarray(made, dtype))

    def body(xs: Any) -> Any:
        return [ordered_sum(list(x), "d", devices, order)[None] for x in xs]

    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for blocks, x in zip(jax.jit(run)(terms), terms, strict=True):
        total = np.array((tree if order == "binary" else chain)(list(x)))
        total += np.zeros_like(total)
        for block in np.asarray(blocks):
            assert block.tobytes() == total.tobytes()
