"""The engine against the oracle and NumPy, on one device and on a mesh.

Compilation costs more than the run, so many cases share one program.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.compile import Engine
from tessera.core.dtypes import DType, bf16, f16, f32, fp8_e4m3, fp8_e5m2, int8, int32
from tessera.core.layout import Dim, Factor, TensorType, parse_type, plain
from tessera.core.reshard import steps_between
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.ir.schedule.build import build_schedule
from tessera.runtime import arrays, devices, xp_jax
from tessera.runtime.arrays import sharding
from tessera.runtime.lower import lower
from tests.core.table import ROWS, Row
from tests.core.test_ops import cases, close, expected, outputs, types_of

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
LAYOUTS = 2, 5  # per row without and with --long; tests/core tests many more with NumPy


def run(graph: Graph, data: Sequence[Any]) -> list[Any]:
    """Compiles `graph` as for users, and returns its results as whole NumPy arrays."""
    program = Engine().compile(graph)
    outs = program(data, None)
    return [arrays.fetch(x, t) for x, t in zip(outs, program.types, strict=True)]


# -- the table of ops -----------------------------------------------------------------------------
def check_rows(picks: Sequence[tuple[Row, list[TensorType]]]) -> None:
    """Checks all rows in one program, each with arguments of the given types."""
    b = Builder("rows")
    data, nodes, wants = [], [], []
    for row, types in picks:
        args = []
        for x, t in zip(row.ins, types, strict=True):
            args.append(b.input(t))
            data.append(arrays.place(x, t))
        made = outputs(b, row, args)
        nodes += made
        wants += [(row, types, w) for w in expected(row, row.ins)]
    for got, (row, types, want) in zip(run(b.graph(nodes), data), wants, strict=True):
        try:
            close(got, want)
        except AssertionError as error:
            raise AssertionError(f"{row.name} {types}: {error}") from None


def test_rows_on_one_device() -> None:
    check_rows([(row, types_of(row)) for row in ROWS])


@pytest.mark.parametrize("part", range(2))
def test_rows_on_a_mesh(part: int, everything: bool) -> None:
    picks = []
    for row in ROWS[part::2]:
        found = cases(row, 12)[1:] if row.ins else [[]]
        most = min(LAYOUTS[everything], len(found))
        picks += [(row, c) for c in random.Random(row.name).sample(found, most)]
    assert any(t.padded_dims for _, types in picks for t in types)
    assert any(t.partial for _, types in picks for t in types)
    check_rows(picks)


# -- collectives ----------------------------------------------------------------------------------
def held(t: TensorType, rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns an array of type `t` with different partial values on every device and garbage in the
    padding, and its global value."""
    x = rng.integers(-9, 9, arrays.array_shape(t)).astype(np.float32)
    value = x
    for _, kind in t.partial:
        value = {"sum": np.sum, "max": np.max, "min": np.min}[kind](value, axis=0)
    inside = tuple(slice(0, f.size) for d in t.dims for f in d)
    return jax.device_put(x, arrays.sharding(t)), value[inside].reshape(t.shape)


def check_changes(pairs: Sequence[tuple[TensorType, TensorType]]) -> None:
    """Checks every change of layout in one program."""
    rng = np.random.default_rng(0)
    b = Builder("changes")
    data, wants, nodes = [], [], []
    for src, dst in pairs:
        x, want = held(src, rng)
        data.append(x)
        wants.append(want)
        nodes.append(b.redistribute(b.input(src), dst))
        assert nodes[-1].type is dst
    for got, want, (src, dst) in zip(run(b.graph(nodes), data), wants, pairs, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=f"{src} -> {dst}")


# The types before and after, and the steps between.
CHANGES = [
    ("[8@tp, 4]", "[8, 4]", "all_gather"),
    ("[8@tp, 4@dp]", "[8, 4@dp]", "all_gather"),
    ("[6@tp, 5@dp]", "[6, 5]", "all_gather all_gather"),
    ("[16@(dp,tp), 4]", "[16, 4]", "all_gather"),
    ("[16@(tp,dp), 4]", "[16, 4]", "all_gather"),
    ("[13@(dp,tp), 4]", "[13, 4]", "all_gather"),
    ("[(2@dp·8), 4]", "[16, 4]", "all_gather"),
    ("[(3·8@tp·2), 4]", "[48, 4]", "all_gather"),
    ("[8@tp, 4]", "[8, 4@tp]", "all_to_all"),
    ("[8@dp, 8@tp]", "[8@tp, 8@dp]", "all_to_all all_to_all all_to_all"),
    ("[8, 4] +dp", "[8, 4]", "all_reduce"),
    ("[8, 4] +dp +tp", "[8, 4]", "all_reduce"),
    ("[8, 4] max tp", "[8, 4]", "all_reduce"),
    ("[8, 4] min dp", "[8, 4]", "all_reduce"),
    ("[8@dp, 4] +tp", "[8@dp, 4]", "all_reduce"),
    ("[8, 4] +tp", "[8@tp, 4]", "reduce_scatter"),
    ("[8, 4] +dp +tp", "[8@tp, 4@dp]", "reduce_scatter reduce_scatter"),
    ("[6, 4] +tp", "[6@tp, 4]", "reduce_scatter"),
    ("[8, 4]", "[8@tp, 4]", "shard"),
    ("[5, 3]", "[5@(dp,tp), 3]", "shard"),
    ("[7, 3]", "[7@tp, 3@dp]", "shard shard"),
    ("[8, 4]", "[8, 4] +dp", "to_partial"),
]


def on_mesh(layout: str) -> TensorType:
    return parse_type(f"f32{layout}", MESH)


def test_every_kind_of_collective() -> None:
    found = [(on_mesh(a), on_mesh(b)) for a, b, _ in CHANGES]
    kinds = [" ".join(s.kind for s in steps_between(a, b)) for a, b in found]
    assert kinds == [k for _, _, k in CHANGES]
    check_changes(found)


def random_layout(draw: random.Random, shape: Sequence[int], partial: bool) -> TensorType:
    """Draws a layout of `shape`: ordered axes, several factors, uneven blocks, partial sums."""
    free = draw.sample(MESH.axes, len(MESH.axes))
    dims: list[Dim] = []
    for n in shape:
        divisors = [d for d in range(2, n) if n % d == 0]
        major = draw.choice(divisors) if divisors and draw.random() < 0.4 else n
        parts = [major, n // major] if major < n else [n]
        factors = []
        for size in parts:
            count = draw.randint(0, len(free)) if draw.random() < 0.6 else 0
            factors.append(Factor(size, tuple(free[:count])))
            del free[:count]
        dims.append(tuple(factors))
    open_ = tuple((a, "sum") for a in free if partial and draw.random() < 0.4)
    return TensorType(f32, dims, open_, MESH)


def test_random_changes_of_layout() -> None:
    draw = random.Random(11)
    pairs = []
    while len(pairs) < 40:
        shape = [draw.choice((1, 3, 4, 6, 8, 12)) for _ in range(draw.randint(1, 3))]
        src, dst = random_layout(draw, shape, True), random_layout(draw, shape, False)
        if src is not dst:
            pairs.append((src, dst))
    assert sum(bool(t.padded_dims) for pair in pairs for t in pair) > 10
    assert sum(bool(src.partial) for src, _ in pairs) > 5
    check_changes(pairs)


# -- dtypes ---------------------------------------------------------------------------------------
def test_casts() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.normal(size=60) * 20, [0.0, 1.0, -1.5, 240.0]]).astype(np.float32)
    b = Builder("casts")
    source = b.input(plain(f32, x.shape))
    kinds = (bf16, f16, fp8_e4m3, fp8_e5m2, int32, int8)
    narrow = [b("cast", source, dtype=d) for d in kinds]
    wide = [b("cast", n, dtype=f32) for n in narrow]
    got = run(b.graph([*narrow, *wide]), [arrays.place(x, source.type)])
    for d, small, large in zip(kinds, got[: len(kinds)], got[len(kinds) :], strict=True):
        with np.errstate(invalid="ignore"):
            want = np.clip(x, -128, 127).astype(d.numpy) if d is int8 else x.astype(d.numpy)
        assert small.dtype == d.numpy
        np.testing.assert_array_equal(small, want)
        np.testing.assert_array_equal(large, want.astype(np.float32))


# -- the compiled program -------------------------------------------------------------------------
HLO = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def collectives(graph: Graph) -> Counter[tuple[str, int]]:
    """Counts the collectives of a graph and of its loop bodies by (kind, result elements on a
    device)."""
    found = Counter((n.op, math.prod(n.type.local_shape)) for n in graph.nodes if n.op in HLO)
    for n in graph.nodes:
        if isinstance(body := n.attrs.get("body"), Graph):
            found += collectives(body)
    return found


def compiled_collectives(text: str) -> Counter[tuple[str, int]]:
    """The same count of a compiled program. XLA may send several tensors in one call."""
    found: Counter[tuple[str, int]] = Counter()
    for op, name in HLO.items():
        for result in re.findall(rf"= (\(.*?\)|\S+) {name}(?:-start)?\(", text):
            shapes = SHAPE.findall(result)
            if op == "all_to_all" and result.startswith("("):  # one part from each device
                shapes = [",".join([shapes[0] or "1", str(len(shapes))])]
            found.update((op, math.prod(int(n) for n in s.split(",") if n)) for s in shapes)
    return found


def test_the_compiled_step_has_the_collectives_of_its_graph() -> None:
    plan = dist.strategy("tensor_parallel") + dist.strategy("zero_redundancy_optimizer", stage=3)
    config = nn.GPTConfig(vocab=64, seq=16, d=32, layers=2, heads=4, hidden=64)
    model = dist.place(nn.GPT(config), plan, MESH)
    ids = np.random.default_rng(0).integers(0, 64, (4, 17)).astype(np.int32)
    x, y = (ts.tensor(v, mesh=MESH, layout="[4@dp, 16]") for v in (ids[:, :-1], ids[:, 1:]))

    def step(model: nn.GPT, x: ts.Tensor, y: ts.Tensor) -> Any:
        loss = model.loss(x, y)
        return loss, ts.grad(loss, model.parameters())

    graph = ts.graph.simplify(ts.graph.trace(step, model, x, y))
    program = lower(build_schedule(graph))
    shapes = [
        jax.ShapeDtypeStruct(arrays.array_shape(n.type.on(MESH)), n.type.dtype.numpy, sharding=s)
        for n, s in zip(
            graph.inputs, [sharding(n.type.on(graph.mesh)) for n in graph.inputs], strict=True
        )
    ]
    text = program.lower(*shapes).compile().as_text()
    want = collectives(graph)
    assert {op for op, _ in want} >= {"all_gather", "all_reduce", "reduce_scatter"}
    assert compiled_collectives(text) == want


def test_values_are_placed_without_a_question_to_the_file_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices.start()
    monkeypatch.setattr(devices, "gpus", lambda: pytest.fail("this reads folders, each time"))
    x = arrays.place(np.ones(2, np.float32), plain(f32, (2,)))
    assert x.shape == (2,)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize(
    ("index", "sizes"),
    [("mk,mn->kn", (6, 5, 512)), ("mk,mn->nk", (6, 520, 5)), ("abk,abmn->kmn", (2, 3, 4, 8, 64))],
)
def test_gradients_of_wide_weights_have_the_inner_dims_last_on_cpus(
    index: str, sizes: tuple[int, ...], dtype: DType
) -> None:
    """On other devices both factors keep their order of dims."""
    given, _, out = index.partition("->")
    args = given.split(",")
    size = dict(zip(dict.fromkeys(given.replace(",", "")), sizes, strict=True))
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-4, 5, [size[k] for k in a]).astype(dtype.numpy) for a in args)
    run = jax.jit(lambda x, y: xp_jax.contract(args, out, (x, y), f32)).trace(x, y)
    here = run.lower().compile()
    np.testing.assert_array_equal(
        here(x, y), np.einsum(index, x.astype(np.float32), y.astype(np.float32))
    )
    (last,) = re.findall(r"dot\(.*lhs_contracting_dims=\{([\d,]+)\}", here.as_text())
    assert "0" not in last.split(",")
    there = run.lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" in run.lower().as_text() and "LayoutConstraint" not in there


@pytest.mark.parametrize(
    ("shape", "dims", "flat"),
    [
        ((64, 32, 32), (0, 1), "2048,32"),
        ((8, 16, 1, 32, 3), (0, 1, 3), "4096,3"),
        ((5, 8, 256, 7), (1, 2), "5,2048,7"),
        ((8, 3, 16, 16, 5), (0, 2, 3), "8,3,256,5"),
        ((1, 2048, 3), (0, 1), ""),  # a single element has no neighbours
        ((4, 3, 256, 8), (0, 2), ""),
        ((4, 3, 64, 64), (0, 2, 3), ""),  # no dim remains after the reduced ones
        ((4, 4, 8), (0, 1), ""),  # too small
    ],
)
def test_a_cpu_adds_up_over_neighbours_as_over_one_dim(
    shape: tuple[int, ...], dims: tuple[int, ...], flat: str
) -> None:
    """On other devices the dims stay as they are."""
    for dtype in (f32, bf16, int32):
        x = np.random.default_rng(0).integers(-8, 9, shape).astype(dtype.numpy)
        run = jax.jit(lambda x: xp_jax.sum(x, dims)).trace(x)
        want = x.astype(np.float64).sum(dims).astype(dtype.numpy)
        np.testing.assert_array_equal(run.lower().compile()(x), want)
        barriers = re.findall(r"optimization_barrier .* tensor<(\S+)x\w+>", run.lower().as_text())
        assert barriers == ([flat.replace(",", "x")] if flat else [])
        there = run.lower(lowering_platforms=("cuda",)).as_text()
        assert "optimization_barrier" not in there


def test_a_tensor_of_one_mesh_is_made_a_tensor_of_another() -> None:
    """`ts.tensor(t, mesh=...)` moves it to the given mesh."""
    here = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
    there = dist.Mesh(("tp",), devices=[4, 5, 6, 7])
    value = np.arange(96, dtype=np.float32).reshape(8, 12)
    t = ts.tensor(value, mesh=here, layout="[8@dp, 12@tp]")
    for layout, want in ((None, "f32[8, 12]"), ("[8@tp, 12]", "f32[8@tp, 12]")):
        moved = ts.tensor(t, mesh=there, layout=layout)
        assert (moved.mesh, str(moved.type)) == (there, want)
        np.testing.assert_array_equal(moved.numpy(), value)
    assert ts.tensor(t, mesh=here) is t
    with pytest.raises(ts.MeshError, match="different meshes"):
        ts.jit(lambda t: ts.tensor(t, mesh=there))(t)
    with pytest.raises(ts.DTypeError, match=r"is not known(.|\n)*a value lies where its mesh is"):
        t.to(there)
