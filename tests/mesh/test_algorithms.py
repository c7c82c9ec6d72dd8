"""Collective algorithms on devices, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tessera import UsageError, dist
from tessera.ir.schedule.algorithms.build import FLAT, build
from tessera.ir.schedule.algorithms.check import adjacent_pairs, evaluate, fold, in_pairs
from tessera.ir.schedule.algorithms.table import COLLECTIVES, Algorithm, Collective
from tessera.ir.schedule.algorithms.text import parse
from tessera.runtime.algorithms import run_algorithm
from tessera.runtime.devices import jax_mesh
from tests.cases import LONG, grid

Array = Any


def on_devices(
    body: Callable[[Array], Array], blocks: list[Array], axes: dict[str, int] | None = None
) -> list[Array]:
    """Runs `body` on each device's block under shard_map; the results by device, row-major."""
    axes = axes or {"x": len(blocks)}
    mesh = jax_mesh(dist.Mesh(tuple(axes), shape=axes))
    spec = P(tuple(axes))
    program = jax.jit(
        jax.shard_map(
            lambda x: body(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    return list(np.asarray(program(np.stack(blocks))))


def run(a: Algorithm, blocks: list[Array]) -> list[Array]:
    return on_devices(lambda x: run_algorithm(a, x, "x"), blocks)


def run_all(found: list[Algorithm], inputs: list[list[Array]]) -> list[list[Array]]:
    """Runs several algorithms on the same ranks in one program, because compilation is slow."""
    n = found[0].n
    mesh = jax_mesh(dist.Mesh(("x",), shape={"x": n}))
    program = jax.jit(
        jax.shard_map(
            lambda *xs: [run_algorithm(a, x[0], "x")[None] for a, x in zip(found, xs)],
            mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False,
        )
    )  # fmt: skip
    return [list(np.asarray(y)) for y in program(*map(np.stack, inputs))]


SUMS = ("all_reduce", "reduce_scatter")


def tables(n: int) -> list[Algorithm]:
    """All algorithms for n ranks, with segments, roots, and each nesting of n."""
    found = [build(c, name, n) for c in COLLECTIVES for name in (*FLAT, "engine")]
    found += [build("all_reduce", "double_tree", n, segments=3)]
    found += [build("broadcast", name, n, root=n - 1) for name in (*FLAT, "engine")]
    for shape in [(a, n // a) for a in range(2, n) if n % a == 0] + [(2, 2, 2)] * (n == 8):
        for levels in [("ring", "halving", "ring"), ("double_tree", "line", "tree")]:
            levels = levels[: len(shape)]
            found += [build(c, "hierarchical", shape=shape, levels=levels) for c in COLLECTIVES]
    return found


def blocks_for(a: Algorithm, dtype: Any, seed: int = 0) -> list[Array]:
    """Blocks that fit every collective, with chunks that need no padding."""
    rng = np.random.default_rng(seed)
    rows = a.parts // a.n if a.collective == "all_gather" else a.parts
    rows *= a.n // math.gcd(a.n, rows) if a.collective in ("reduce_scatter", "all_to_all") else 1
    if np.issubdtype(dtype, np.integer):
        return [rng.integers(-99, 99, (rows, 3)).astype(dtype) for _ in range(a.n)]
    return [(rng.normal(size=(rows, 3)) * 10.0 ** rng.integers(-3, 4, (rows, 3))).astype(dtype)
            for _ in range(a.n)]  # fmt: skip


def expected(collective: Collective, root: int, blocks: list[Array]) -> list[Array]:
    """The collective's definition in NumPy."""
    n, total = len(blocks), np.sum(blocks, axis=0, dtype=blocks[0].dtype)
    match collective:
        case "all_reduce":
            return [total] * n
        case "reduce_scatter":
            return np.split(total, n)
        case "all_gather":
            return [np.concatenate(blocks)] * n
        case "broadcast":
            return [blocks[root]] * n
        case "all_to_all":
            return [np.concatenate([np.split(b, n)[r] for b in blocks]) for r in range(n)]


@pytest.mark.parametrize("n", [pytest.param(n, marks=[LONG] * (n > 4)) for n in range(1, 9)])
def test_every_table_gives_what_its_collective_means(n: int) -> None:
    found = tables(n)
    inputs = [blocks_for(a, np.int32) for a in found]
    for a, ints, results in zip(found, inputs, run_all(found, inputs), strict=True):
        for got, want in zip(results, expected(a.collective, a.root, ints), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=repr(a))


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=LONG) for n in (6, 8))])
def test_floats_are_added_in_the_order_of_the_table(n: int) -> None:
    found = [a for a in tables(n) if not a.native and a.collective in SUMS]
    inputs = [blocks_for(a, np.float32) for a in found]
    first, second = run_all(found, inputs), run_all(found, inputs)
    for a, floats, got, again in zip(found, inputs, first, second, strict=True):
        means = expected(a.collective, 0, [b.astype(np.float64) for b in floats])
        for one, same, oracle, near in zip(got, again, evaluate(a, floats), means, strict=True):
            assert one.tobytes() == same.tobytes() == oracle.tobytes(), a
            scale = np.abs(np.stack(floats)).max()
            np.testing.assert_allclose(one, near, rtol=1e-6, atol=1e-6 * scale, err_msg=repr(a))


@pytest.mark.parametrize(
    ("n", "dtype"),
    grid(range(1, 9), [np.float32, ml_dtypes.bfloat16], lambda x: getattr(x, "__name__", str(x))),
)
def test_trees_and_halving_add_in_adjacent_pairs(n: int, dtype: Any) -> None:
    found = [build(c, name, n) for c in SUMS for name in ("tree", "halving")]
    found += [build(c, "hierarchical", shape=(n // k, k), levels=("halving",) * 2)
              for c in SUMS for k in (2, 4) if n % k == 0]  # fmt: skip
    inputs = [blocks_for(a, np.dtype(dtype), seed=n) for a in found]
    for a, floats, results in zip(found, inputs, run_all(found, inputs), strict=True):
        assert in_pairs(a)
        whole = fold(adjacent_pairs(n), floats)
        want = [whole] * n if a.collective == "all_reduce" else np.split(whole, n)
        for got, one in zip(results, want, strict=True):
            assert got.tobytes() == one.tobytes(), a


def test_the_left_fold_of_a_ring_is_no_tree() -> None:
    """The two orders give different sums on this data, so the tests above can tell them apart."""
    floats = blocks_for(build("all_reduce", "ring", 8), np.float32)
    ring, tree = (run(build("all_reduce", name, 8), floats)[0] for name in ("ring", "tree"))
    assert ring.tobytes() != tree.tobytes()


@pytest.mark.parametrize("name", [*FLAT, "engine"])
def test_padding_is_not_seen(name: str) -> None:
    """Blocks of 5 rows of 7 do not divide into the chunks."""
    rng = np.random.default_rng(1)
    for collective in COLLECTIVES:
        a = build(collective, name, 3)
        rows = 6 if collective in ("reduce_scatter", "all_to_all") else 5
        blocks = [rng.integers(0, 99, (rows, 7)).astype(np.int32) for _ in range(3)]
        want = expected(a.collective, 0, blocks)
        for got, one in zip(run(a, blocks), want, strict=True):
            np.testing.assert_array_equal(got, one, err_msg=repr(a))
    scalar = run(build("all_reduce", name, 3), [np.float32(r) for r in (1, 2, 3)])
    assert [float(s) for s in scalar] == [6.0] * 3


def test_one_axis_of_a_mesh_and_two_of_them() -> None:
    rng = np.random.default_rng(2)
    blocks = [rng.integers(0, 99, (8, 2)).astype(np.int32) for _ in range(8)]
    axes = {"dp": 2, "tp": 4}
    ring = build("all_reduce", "ring", 4)
    one = on_devices(lambda x: run_algorithm(ring, x, "tp"), blocks, axes)
    for r, got in enumerate(one):
        row = blocks[:4] if r < 4 else blocks[4:]
        np.testing.assert_array_equal(got, np.sum(row, axis=0))
    for levels in (("ring", "halving"), ("direct", "ring")):
        both = build("reduce_scatter", "hierarchical", shape=(2, 4), levels=levels)
        got = on_devices(lambda x, a=both: run_algorithm(a, x, ("dp", "tp")), blocks, axes)
        np.testing.assert_array_equal(np.concatenate(got), np.sum(blocks, axis=0))


def test_it_equals_the_engine() -> None:
    floats = blocks_for(build("all_reduce", "ring", 8), np.float32)
    want = on_devices(lambda x: lax.psum(x, "x"), floats)
    for name in FLAT:
        for got, one in zip(run(build("all_reduce", name, 8), floats), want, strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-6, atol=1e-2)


def test_a_table_written_by_hand_runs() -> None:
    mine = parse('all_reduce "mine"  n=3 chunks=1\n  0: 2>1 +0\n  1: 1>0 +0\n  2: 0>1 =0  0>2 =0\n')
    got = run(mine, [np.full((2,), v, np.int32) for v in (1, 10, 100)])
    assert np.array(got).tolist() == [[111, 111]] * 3


def test_a_ring_sends_one_chunk_a_round_in_the_program() -> None:
    mesh = jax_mesh(dist.Mesh(("x",), shape={"x": 4}))
    a = build("all_reduce", "ring", 4)
    program = jax.jit(
        jax.shard_map(
            lambda x: run_algorithm(a, x, "x"), mesh=mesh, in_specs=P(), out_specs=P(),
            check_vma=False,
        )
    )  # fmt: skip
    text = program.lower(np.zeros((8, 4), np.float32)).as_text()
    sends = [line for line in text.splitlines() if "collective_permute" in line]
    assert len(sends) == a.steps == 6
    assert all("tensor<1x8xf32>" in line for line in sends)


@pytest.mark.parametrize(
    ("table", "shape", "said"),
    [
        (build("all_reduce", "ring", 4), (4,), "the table is for 4 ranks, the axis has 2"),
        (build("reduce_scatter", "ring", 2), (3,), "dim 0 of (3,) is not 2 equal blocks"),
        (build("all_to_all", "direct", 2), (), "dim 0 of () is not 2 equal blocks"),
        (build("all_gather", "ring", 2), (), "a scalar has no dim 0 to gather along"),
    ],
)
def test_what_does_not_fit_is_said(table: Algorithm, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError) as error:
        run(table, [np.zeros(shape, np.float32)] * 2)
    assert said in str(error.value)
