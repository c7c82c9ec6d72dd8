"""Every op against its row: on whole values, in every layout, and its gradients."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from tessera.core.dtypes import ALL, DType, bf16, dtype_of, f16, f32, int32
from tessera.core.errors import DTypeError, GraphError, LayoutError, ShapeError, TesseraError
from tessera.core.layout import Factor, TensorType, parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import computed, evaluate, evaluate_blocks
from tessera.ir.graph.text import parse, to_text
from tessera.ir.graph.verify import verify
from tessera.ops.op import OPS, op_named
from tessera.passes.differentiate import differentiate
from tessera.passes.simplify import simplify
from tests.core.table import ELSEWHERE, PARTS, ROWS, Row

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
smooth_rows = pytest.mark.parametrize(
    "row",
    [r for r in ROWS if r.smooth and any(x.dtype == np.float32 for x in r.ins)],
    ids=lambda r: r.name,
)
MOST_LAYOUTS = 30


def expected(row: Row, ins: tuple[Any, ...]) -> list[Any]:
    want = row.expect(*ins)
    return list(want) if isinstance(want, tuple) else [want]


def outputs(b: Builder, row: Row, args: list[Node]) -> list[Node]:
    node = b(row.op, *args, **row.attrs)
    if len(node.types) == 1 and row.op != "unstack":
        return [node]
    return [b("item", node, index=i) for i in range(len(node.types))]


def recorded(row: Row, types: list[TensorType]) -> Graph:
    b = Builder(row.op)
    return b.graph(outputs(b, row, [b.input(t) for t in types]))


def types_of(row: Row, mesh: Mesh | None = None) -> list[TensorType]:
    return [plain(dtype_of(x.dtype), x.shape, mesh) for x in row.ins]


def close(got: Any, want: Any, rtol: float = 2e-5) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    if got.dtype.kind in "biu":
        assert np.array_equal(got, want)
    else:
        wide = 3e-2 if got.dtype.itemsize < 4 else rtol
        np.testing.assert_allclose(
            *(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (got, want)),
            rtol=wide,
            atol=wide,
        )


def test_every_op_has_a_row() -> None:
    assert set(OPS) == {r.op for r in ROWS} | set(ELSEWHERE)
    assert not {r.op for r in ROWS} & set(ELSEWHERE)


def of_parts(row: Row, dtype: DType) -> DType:
    """The dtype of the result for arguments of `dtype`, which may be that of their parts."""
    return dtype.real if row.op in PARTS else dtype


@every_row
def test_value_dtype_text_and_cost(row: Row) -> None:
    graph = recorded(row, types_of(row))
    verify(graph)
    for out, got, want in zip(
        graph.outputs, evaluate(graph, row.ins), expected(row, row.ins), strict=True
    ):
        close(got, want)
        assert got.dtype == out.type.dtype.numpy
    result = row.result or of_parts(row, dtype_of(row.ins[0].dtype))
    assert graph.outputs[0].type.dtype is result
    text = to_text(graph)
    assert to_text(parse(text)) == text
    verify(parse(text))
    assert graph.flops == 0 if row.free else graph.flops > 0


# ---- layouts -----------------------------------------------------------------------------------
def layouts_of(t: TensorType) -> list[TensorType]:
    """Returns `t` on the mesh: whole, split in every way over one or two axes, and as partial
    sums."""
    found = [t]
    axes = tuple(MESH.axes)
    split = [((a,), i) for a in axes for i in range(t.rank)]
    split += [(order, i) for order in (axes, axes[::-1]) for i in range(t.rank)]
    for names, i in split:
        found.append(with_split(t, {i: names}))
    for i, j in itertools.permutations(range(t.rank), 2):
        found.append(with_split(t, {i: axes[:1], j: axes[1:]}))
    for i, n in enumerate(t.shape):
        if n % 2 == 0 and n > 2:  # a lower factor of the dim
            dims = [*t.dims]
            dims[i] = (Factor(2), Factor(n // 2, ("tp",)))
            found.append(t.with_dims(dims))
    if t.dtype.is_float:
        found += [x.with_partial((("dp", "sum"),)) for x in found if "dp" not in x.split_axes]
        if not t.dtype.is_complex:
            found.append(t.with_partial((("tp", "max"),)))
        found.append(t.with_partial((("dp", "sum"), ("tp", "sum"))))
    return found


def with_split(t: TensorType, where: dict[int, tuple[str, ...]]) -> TensorType:
    return t.with_dims((Factor(n, where.get(i, ())),) for i, n in enumerate(t.shape))


def cases(row: Row, most: int) -> list[list[TensorType]]:
    """Every layout of each argument with the others whole, then a sample of combinations."""
    types = types_of(row, MESH)
    each = [layouts_of(t) for t in types]
    found = [types]
    for i, choices in enumerate(each):
        found += [[*types[:i], c, *types[i + 1 :]] for c in choices[1:]]
    draw = random.Random(row.name)
    draw.shuffle(found)
    found = found[: 2 * most // 3]
    if len(each) > 1:
        found += [[draw.choice(c) for c in each] for _ in range(most - len(found))]
    return found


@every_row
def test_every_layout_gives_the_unsharded_value(row: Row, everything: bool) -> None:
    want = evaluate(recorded(row, types_of(row)), row.ins)
    draw = random.Random(row.name)
    for types in cases(row, MOST_LAYOUTS if everything else MOST_LAYOUTS // 2):
        b = Builder(row.op)
        outs = outputs(b, row, [b.input(t) for t in types])
        other = draw.choice(layouts_of(outs[0].type.replicated().on(MESH))).complete()
        outs.append(b.redistribute(outs[0], other, "test"))
        graph = b.graph(outs)
        verify(graph)
        values = evaluate_blocks(graph, row.ins, padding=np.nan)
        for out, got, whole in zip(outs, values, [*want, want[0]], strict=True):
            assert out.type.shape == np.shape(whole)
            close(got, whole)
        text = to_text(graph)
        assert to_text(parse(text)) == text
        small = simplify(graph)
        verify(small, "simplify")
        for got, whole in zip(evaluate_blocks(small, row.ins, padding=np.nan), values, strict=True):
            close(got, whole)


def test_created_values_are_made_in_every_layout() -> None:
    for row in ROWS:
        if OPS[row.op].creates:
            b = Builder(row.op)
            (made,) = outputs(b, row, [])
            wanted = [t for t in layouts_of(made.type.on(MESH)) if not t.partial]
            graph = b.graph([b.redistribute(made, t) for t in wanted])
            assert not any(n.op == "shard" for n in graph.nodes)
            for got in evaluate_blocks(graph, []):
                close(got, row.expect())


# ---- gradients ---------------------------------------------------------------------------------
def gradient_graph(row: Row, types: list[TensorType]) -> tuple[Graph, list[int]]:
    """The gradients of Σ w · out with respect to the float inputs; the last input is w."""
    b = Builder(row.op)
    args = [b.input(t) for t in types]
    out = outputs(b, row, args)[0]
    weight = b.input(plain(out.type.dtype, out.type.shape, out.type.mesh), "w")
    by = [i for i, t in enumerate(types) if t.dtype.is_float]
    found = differentiate(b, [(out, weight)], [args[i] for i in by])
    zero = [b("full", dtype=f32, shape=types[i].shape, value=0.0) for i in by]
    return b.graph([z if g is None else g for g, z in zip(found, zero, strict=True)]), by


def weights(row: Row) -> Any:
    shape = np.shape(expected(row, row.ins)[0])
    return np.random.default_rng(3).uniform(0.5, 1.5, shape).astype(np.float32)


@smooth_rows
def test_gradients_equal_finite_differences(row: Row) -> None:
    graph, by = gradient_graph(row, types_of(row))
    verify(graph, "differentiate")
    w = weights(row).astype(np.float64)
    exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in row.ins]
    got = computed(graph, [*exact, w])
    for g, i in zip(got, by, strict=True):
        assert g.shape == row.ins[i].shape
        want = np.zeros(g.shape)
        for at in np.ndindex(g.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [x.copy() for x in exact]
                moved[i][at] += step
                sides.append(np.sum(w * expected(row, tuple(moved))[0]))
            want[at] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-6)


@smooth_rows
def test_gradients_in_every_layout(row: Row) -> None:
    whole, _ = gradient_graph(row, types_of(row))
    w = weights(row)
    want = computed(whole, [*row.ins, w])
    for types in cases(row, 10):
        graph, _ = gradient_graph(row, types)
        verify(graph, "differentiate")
        for g, value in zip(
            evaluate_blocks(graph, [*row.ins, w], padding=np.nan), want, strict=True
        ):
            close(g, value, 1e-4)
        small = simplify(graph)
        verify(small, "simplify")
        for g, value in zip(
            evaluate_blocks(small, [*row.ins, w], padding=np.nan), want, strict=True
        ):
            close(g, value, 1e-4)


def gradient(op: str, *values: Any, **attrs: Any) -> list[Any]:
    b = Builder()
    args = [b.input(plain(f32, np.shape(v))) for v in values]
    out = b(op, *args, **attrs)
    one = b("full", dtype=f32, shape=out.type.shape, value=1.0)
    found = differentiate(b, [(out, one)], args)
    graph = b.graph([g for g in found if g is not None])
    return evaluate(graph, [np.asarray(v, np.float32) for v in values])


def test_equal_arguments_share_a_gradient() -> None:
    x, y = np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])
    for op, dx in (("maximum", [0.5, 0, 1]), ("minimum", [0.5, 1, 0])):
        gx, gy = gradient(op, x, y)
        assert gx.tolist() == dx
        assert (gx + gy).tolist() == [1, 1, 1]
    assert gradient("max", np.array([2.0, 2.0, 1.0]), dims=(0,))[0].tolist() == [0.5, 0.5, 0]
    assert gradient("min", np.array([2.0, 1.0, 1.0]), dims=(0,))[0].tolist() == [0, 0.5, 0.5]


def test_a_stopped_gradient_is_none_and_a_missing_one_is_loud() -> None:
    b = Builder()
    x = b.input(plain(f32, (3,)))
    assert differentiate(b, [(b("stop_gradient", x), x)], [x]) == [None]
    fake = Node("isfinite", (x,), (plain(f32, (3,)),), {}, "model.py:3")
    b.nodes.append(fake)
    with pytest.raises(GraphError) as error:
        differentiate(b, [(fake, x)], [x])
    assert str(error.value) == (
        "isfinite: it has no gradient\n"
        "  result : f32[3]\n"
        "  at     : model.py:3\n"
        "  fix    : pass the argument through ts.stop_gradient where none is meant"
    )


def test_a_zero_factor_has_a_gradient() -> None:
    assert gradient("prod", np.array([2.0, 0.0, 4.0]), dims=(0,))[0].tolist() == [0, 8, 0]
    assert gradient("prod", np.array([0.0, 0.0, 4.0]), dims=(0,))[0].tolist() == [0, 0, 0]


# ---- dtypes ------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", [r for r in ROWS if r.kinds], ids=lambda r: r.name)
def test_dtypes_that_an_op_takes(row: Row) -> None:
    value = OPS[row.op]
    for dtype in ALL:
        ins = tuple(plain(dtype, x.shape) for x in row.ins)
        if dtype.kind in row.kinds:
            out = value.rule(ins, row.attrs).outs[0].dtype
            assert out is (row.result or of_parts(row, dtype))
        else:
            with pytest.raises(DTypeError, match=f"{row.op}: takes "):
                value.rule(ins, row.attrs)
    if len(row.ins) > 1:
        mixed = (plain(f32, row.ins[0].shape), *(plain(bf16, x.shape) for x in row.ins[1:]))
        with pytest.raises(DTypeError):
            value.rule(mixed, row.attrs)


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_narrow_floats_stay_narrow(dtype: Any) -> None:
    for row in ROWS:
        if "float" not in row.kinds or row.result is not None:
            continue
        if any(x.dtype.kind == "c" for x in row.ins):
            continue
        ins = [x.astype(np.float32).astype(dtype.numpy) for x in row.ins]
        graph = recorded(row, [plain(dtype, x.shape) for x in ins])
        got = evaluate(graph, ins)[0]
        assert got.dtype == dtype.numpy, row.name
        if row.op not in ("floor", "sign", "mod", "floordiv"):  # their steps jump with rounding
            want = expected(row, tuple(x.astype(np.float64) for x in ins))[0]
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=0.03, atol=0.03)


# ---- what an op refuses ------------------------------------------------------------------------
def on_mesh(text: str) -> TensorType:
    return parse_type(text, MESH)


REFUSED: list[tuple[str, list[str], dict[str, Any], type[TesseraError], str]] = [
    ("add", ["f32[3]", "f32[4]"], {}, ShapeError, "add: sizes 3 and 4 do not match"),
    ("contract", ["f32[3, 4]", "f32[5, 6]"], {"index": "m k, k n -> m n"}, ShapeError,
     "contract 'm k, k n -> m n': sizes 4 and 5 of dim 'k' differ"),
    ("contract", ["f32[3]"], {"index": "m k -> m"}, ShapeError,
     "einsum: 'm k -> m' names 2 dims of an argument with 1"),
    ("contract", ["f32[3]"], {"index": "m -> k"}, ShapeError,
     "einsum: 'm -> k': result letter 'k' is in no argument"),
    ("contract", ["f32[3, 3]"], {"index": "m m -> m"}, ShapeError,
     "einsum: 'm m -> m': 'm' stands twice"),
    ("contract", ["f32[3]"], {"index": "m, m -> m"}, ShapeError,
     "einsum: 'm, m -> m' is for 2 arguments, got 1"),
    ("contract", ["f32[3]", "bf16[3]", "f32[3]"], {"index": "a, a, a -> a"}, DTypeError,
     "contract: arguments have different dtypes"),
    ("where", ["f32[3]", "f32[3]", "f32[3]"], {}, DTypeError, "where (condition): takes bool"),
    ("where", ["bool[3]", "f32[3]", "bf16[3]"], {}, DTypeError,
     "where: arguments have different dtypes"),
    ("reshape", ["f32[3]"], {"shape": (2, 2)}, ShapeError,
     "reshape: 3 elements do not fit shape (2, 2)"),
    ("transpose", ["f32[3, 4]"], {"perm": (0, 0)}, ShapeError,
     "transpose: (0, 0) is not an order of 2 dims"),
    ("broadcast_to", ["f32[3]"], {"shape": (3, 4)}, ShapeError,
     "broadcast_to: (3,) does not broadcast to (3, 4)"),
    ("broadcast_to", ["f32[4]"], {"shape": (3, 4), "layout": plain(f32, (4,))}, ShapeError,
     "broadcast_to: the layout has shape (4,), not (3, 4)"),
    ("slice", ["f32[3]"], {"starts": (2,), "stops": (5,), "steps": (1,)}, ShapeError,
     "slice: 2:5:1 is not inside dim 0 with size 3"),
    ("concat", ["f32[3, 4]", "f32[3, 5]"], {"dim": 0}, ShapeError,
     "concat: argument 1 does not fit along dim 0"),
    ("concat", ["f32[3, 4]", "bf16[3, 4]"], {"dim": 0}, DTypeError,
     "concat: argument 1 does not fit along dim 0"),
    ("take", ["f32[3]", "f32[2]"], {"dim": 0}, DTypeError, "take: ids must be integers"),
    ("take", ["f32[3]", "i32[2]"], {"dim": 1}, ShapeError, "take: there is no dim 1 in rank 1"),
    ("take_along", ["f32[3, 4]", "i32[2]"], {"dim": 1}, ShapeError,
     "take_along: ids and x need the same number of dims"),
    ("put", ["i32[3]", "f32[3, 4]"], {"dim": 0, "into": "5@q"}, LayoutError,
     "layout: axis 'q' is not an axis of the mesh"),
    ("full", [], {"dtype": f32, "shape": (3,), "value": 1.0, "layout": plain(f32, (4,))},
     ShapeError, "full: the layout has shape (4,), not (3,)"),
    ("full", [], {"dtype": f32, "shape": (3,), "value": 1.0,
                  "layout": on_mesh("f32[3] +dp")}, LayoutError,
     "full: only zero can be made as a sum still to be completed"),
    ("all_gather", ["f32[8]"], {"axes": ("q",), "dim": 0}, LayoutError,
     "layout: axis 'q' is not an axis of the mesh"),
    ("shard", ["f32[8]"], {"axes": ("q",), "to_dim": 0, "into": "8"}, LayoutError,
     "layout: axis 'q' is not an axis of the mesh"),
    ("shard", ["f32[8]"], {"axes": ("tp",), "to_dim": 0, "into": "8"}, LayoutError,
     "redistribute: 8 is not dim 0 split over tp"),
    ("all_gather", ["f32[7@(dp,tp)]"], {"axes": ("tp",), "dim": 0}, LayoutError,
     "redistribute: tp cannot leave a dim that it splits unevenly with other axes"),
    ("shard", ["f32[7@dp]"], {"axes": ("tp",), "to_dim": 0, "into": "7@(dp,tp)"}, LayoutError,
     "redistribute: 7@(dp,tp) is not dim 0 split over tp"),
    ("reduce_scatter", ["f32[8] max tp"], {"axes": ("tp",), "to_dim": 0, "into": "8@tp"},
     LayoutError, "reduce_scatter: only a sum is completed in parts"),
    ("nope", [], {}, GraphError, "op 'nope' does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "ins", "attrs", "kind", "message"), REFUSED)
def test_what_an_op_refuses(
    op: str, ins: list[str], attrs: dict[str, Any], kind: type[TesseraError], message: str
) -> None:
    with pytest.raises(kind) as error:
        op_named(op).rule(tuple(on_mesh(t) for t in ins), attrs)
    assert str(error.value).startswith(message)
    assert "\n  fix" in str(error.value) or "layout: axis" in message


def test_a_partial_passes_what_is_linear_and_nothing_else() -> None:
    def result(op: str, *texts: str, **attrs: Any) -> str:
        b = Builder()
        return b(op, *(b.input(on_mesh(t)) for t in texts), **attrs).type.text

    assert result("neg", "f32[8] +dp") == "f32[8] +dp"
    assert result("exp", "f32[8] +dp") == "f32[8]"
    assert result("add", "f32[8] +dp", "f32[8] +dp") == "f32[8] +dp"
    assert result("add", "f32[8] +dp", "f32[8]") == "f32[8]"
    assert result("mul", "f32[8] +dp", "f32[8]") == "f32[8] +dp"
    assert result("mul", "f32[8] +dp", "f32[8] +dp") == "f32[8]"
    assert result("mul", "f32[8] +dp", "f32[8] +tp") == "f32[8] +dp"
    assert result("mul", "f32[8] +dp", "f32[8@dp]") == "f32[8@dp]"
    assert result("div", "f32[8] +dp", "f32[8] +tp") == "f32[8] +dp"
    assert result("stop_gradient", "f32[8] max tp") == "f32[8] max tp"
    assert result("neg", "f32[8] max tp") == "f32[8]"
    assert result("cast", "bf16[8] +dp", dtype=f32) == "f32[8] +dp"
    assert result("cast", "f32[8] +dp", dtype=bf16) == "bf16[8]"
    assert result("cast", "f32[8] +dp", dtype=int32) == "i32[8]"
    assert result("sum", "f32[8@dp, 4] +tp", dims=(0,)) == "f32[4] +dp +tp"
    assert result("max", "f32[8@dp, 4@tp]", dims=(0, 1)) == "f32[] max dp max tp"
    assert result("pad", "f32[3] max dp", starts=(1,), steps=(1,), shape=(8,)) == "f32[8]"
    assert result("where", "bool[8]", "f32[8] +dp", "f32[8] +dp") == "f32[8] +dp"
    assert result("where", "bool[8]", "f32[8] +dp", "f32[8]") == "f32[8]"
