"""Costs of kernels: counted by hand, and by running every turn."""

from __future__ import annotations

import pytest

from tessera.core.errors import UsageError
from tessera.ir.tile.body import Load, Put, Store
from tessera.ir.tile.cost import Cost, cost
from tessera.ir.tile.kernel import with_sizes
from tessera.ir.tile.kernels import AG_MATMUL, FLASH_CAUSAL, MLP_UP, TEXTS
from tessera.ir.tile.op import Type
from tessera.ir.tile.text import parse
from tessera.ir.tile.trace import steps


def test_the_costs_of_a_product_by_hand() -> None:
    # 16 steps of the grid, each with 4 turns.
    tile = 64 * 64
    assert cost(parse(MLP_UP)) == Cost(
        flops=16 * (4 * (2 * 64**3 + tile) + 2 * tile),  # dot and add; then bias and gelu
        loaded_bytes=16 * (4 * 2 * tile * 2 + 64 * 4),
        stored_bytes=256 * 256 * 2,
        put_bytes=0,
        shared_bytes=3 * 2 * tile * 2 + 64 * 4,  # three stages of two tiles, and the bias
    )


def test_the_costs_of_a_ring_by_hand() -> None:
    block = 16 * 32 * 4
    found = cost(parse(AG_MATMUL))
    assert found.put_bytes == 7 * block
    assert found.flops == 8 * 2 * 16 * 32 * 24
    assert found.loaded_bytes == block + 8 * (block + 32 * 24 * 4)
    assert found.stored_bytes == block + 8 * 16 * 24 * 4
    assert cost(with_sizes(parse(AG_MATMUL), x=1)).put_bytes == 0


@pytest.mark.parametrize("name", TEXTS)
def test_costs_are_those_of_every_access(name: str) -> None:
    k = parse(TEXTS[name])
    found = steps(k)
    assert found is not None
    for number, rank in enumerate(k.ranks):
        loaded = stored = put = 0
        for a in (a for s in found if s.rank == rank for a in s.accesses):
            if isinstance(a.s, Load):
                loaded += k.types[a.s.result].bytes
            elif isinstance(a.s, Store):
                stored += k.types[a.s.value].bytes
            elif isinstance(a.s, Put):
                r = k.ref(a.s.src)
                put += Type(r.dtype, k.tile(r)).bytes
        have = cost(k, number)
        assert (have.loaded_bytes, have.stored_bytes, have.put_bytes) == (loaded, stored, put)


def test_large_kernels_are_counted_at_once() -> None:
    k = parse(FLASH_CAUSAL)
    large = cost(with_sizes(k, B=64, H=8, G=8, T=1 << 12, S=1 << 12))
    assert large.flops > 64 * 64 * 2 * 2 * (1 << 24) * 16 // 2
    assert large.shared_bytes == cost(k).shared_bytes


def test_a_put_to_the_own_device_sends_nothing() -> None:
    k = parse(AG_MATMUL.replace("at (rank_x+1)%x", "at rank_x"))
    assert cost(k).put_bytes == 0
    with pytest.raises(UsageError, match="takes a Kernel"):
        cost(AG_MATMUL)  # type: ignore[arg-type]
