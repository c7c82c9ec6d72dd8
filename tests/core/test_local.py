"""Bodies of the local view, by the oracle, in global terms and block by block: values and
gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.core.layout import TensorType, parse_type
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.text import parse
from tessera.ir.graph.verify import verify
from tessera.passes.simplify import simplify
from tests.core.local_cases import CASES, MESH, Array, Case, N
from tests.core.numpy_engine import Oracle

RNG = np.random.default_rng(3)


def whole_type(case: Case) -> TensorType:
    rows, *rest = case.block
    return parse_type(f"f32[{', '.join(map(str, [f'{N * rows}@(dp,tp)', *rest]))}]", MESH)


def checked(g: Graph) -> Graph:
    """Returns `g` simplified. Verifies both graphs, and parses their texts."""
    short = simplify(g)
    for each in (g, short):
        verify(each)
        assert parse(each.text).text == each.text
    return short


def expected(case: Case, x: Array) -> Array:
    """The results of all devices, concatenated along dim 0."""
    found = case.expect(np.split(x, N))
    return np.concatenate([found] * N if isinstance(found, np.ndarray) else list(found))


def each_own(case: Case) -> Callable[[ts.Tensor], ts.Tensor]:
    """The body of `case` with a result that varies by device even if all results are equal."""
    return op.kernel(lambda x: case.body(x) + 0.0 * x.sum())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_each_body_gives_what_its_devices_would(case: Case) -> None:
    t = whole_type(case)
    g = checked(graph.trace(each_own(case), t))
    x = RNG.normal(size=t.shape).astype(np.float32)
    for how in (evaluate, evaluate_blocks):
        (found,) = how(g, [x])
        np.testing.assert_allclose(found, expected(case, x), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients_through_it_are_those_of_the_formula(case: Case) -> None:
    t = whole_type(case)
    body = each_own(case)
    x = RNG.normal(size=t.shape)
    out = expected(case, x)
    c, step = RNG.normal(size=out.shape), RNG.normal(size=t.shape)

    def loss(x: ts.Tensor, c: ts.Tensor) -> ts.Tensor:
        total = (body(x) * c).sum()
        return ts.grad(total, x)  # type: ignore[no-any-return]

    g = checked(graph.trace(loss, t, parse_type(f"f32{list(out.shape)}", MESH)))
    # Along one direction, by central differences of the formula in f64.
    eps = 1e-6
    slope = (expected(case, x + eps * step) - expected(case, x - eps * step)) / (2 * eps)
    for how in (evaluate, evaluate_blocks):
        (found,) = how(g, [x.astype(np.float32), c.astype(np.float32)])
        np.testing.assert_allclose((found * step).sum(), (slope * c).sum(), rtol=2e-3, atol=1e-3)


# -- the ops by themselves ------------------------------------------------------------------------
def test_types_say_what_each_device_has() -> None:
    seen = {}

    @op.kernel(mesh_axes="tp")
    def body(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        seen["x"], seen["w"], seen["rank"] = x.type, w.type, ts.mesh.current().rank.type
        seen["shape"], seen["size"] = w.shape, ts.mesh.current().size
        seen["sum"] = dist.all_reduce(w.sum(), "tp").type
        seen["other axis"] = x.sum(0).type
        return w

    t = parse_type("f32[8@dp, 4]", MESH)
    g = graph.trace(body, t, parse_type("f32[4, (3·4@tp)]", MESH))
    assert {k: str(v) for k, v in seen.items()} == {
        "x": "f32[8@dp, 4]",
        "w": "f32[4, 6] varying tp",
        "rank": "i32[] varying tp",
        "shape": "(4, 6)",
        "size": "2",
        "sum": "f32[]",
        "other axis": "f32[4] +dp",
    }
    assert str(g.outputs[0].type) == "f32[8@tp, 6]"


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("f32[8@dp]", "f32[8] varying dp"),
        ("f32[8@dp]", "f32[4]"),
        ("f32[4] varying dp", "f32[4]"),
        ("f32[4] varying dp", "f32[4] max tp"),
        ("f32[4]", "f32[4] +dp"),
        ("f32[4] varying dp", "f32[8@tp]"),
    ],
)
def test_reinterpret_reads_the_same_blocks_or_refuses(have: str, want: str) -> None:
    with pytest.raises(ts.TesseraError, match="reinterpret: the two types are not readings"):
        graph.trace(
            lambda x: (
                ts.save_for_backward(x) if x is None else _reinterpret(x, parse_type(want, MESH))
            ),
            parse_type(have, MESH),
        )


def _reinterpret(x: ts.Tensor, to: TensorType) -> ts.Tensor:
    from tessera.lang.record.operands import emit

    return emit("reinterpret", x, layout=to)


def test_a_body_without_its_rank_is_recorded_once() -> None:
    runs = []

    @op.kernel
    def body(x: ts.Tensor) -> ts.Tensor:
        runs.append(1)
        return dist.all_reduce(x * ts.mesh.current().rank.to(ts.f32))

    graph.trace(body, parse_type("f32[8@(dp,tp)]", MESH))
    assert len(runs) == 1


def test_what_all_ranks_do_stands_once_and_the_rest_in_branches() -> None:
    @op.kernel
    def body(x: ts.Tensor) -> ts.Tensor:
        y = ts.exp(x)  # on all ranks
        if ts.mesh.current().rank == 1:
            return ts.tanh(y) + 1.0
        return y

    g = simplify(graph.trace(body, parse_type("f32[8@(dp,tp)]", MESH)))
    ops = [n.op for n in g.nodes]
    assert ops.count("exp") == 1 and ops.count("cond") == 1 and "tanh" not in ops
    (cond,) = (n for n in g.nodes if n.op == "cond")
    assert [n.op for n in cond.attrs["yes"].nodes if n.op != "input"] == ["tanh", "full", "add"]


def test_equal_ranks_leave_no_branch() -> None:
    @op.kernel
    def body(x: ts.Tensor) -> ts.Tensor:
        ranks = [k for k in range(4) if ts.mesh.current().rank == k]
        return dist.all_reduce(x, "tp") * float(len(ranks))

    g = simplify(graph.trace(body, parse_type("f32[8@(dp,tp)]", MESH)))
    assert "cond" not in [n.op for n in g.nodes]
    assert [n.op for n, _ in g.collectives()] == ["all_reduce"]


# -- strategies -----------------------------------------------------------------------------------
BATCH, LABELS = (16, 6), 5


def model(batch: dict[str, ts.Tensor], weights: dict[str, ts.Tensor]) -> ts.Tensor:
    h = ts.nn.dropout(ts.nn.gelu(batch["x"] @ weights["a"]), 0.25)
    return ts.nn.cross_entropy(h @ weights["b"], batch["y"])


def step(batch: dict[str, ts.Tensor], weights: dict[str, ts.Tensor]) -> Any:
    loss = model(batch, weights)
    return loss, ts.grad(loss, weights)


def values() -> tuple[dict[str, Array], dict[str, Array]]:
    y = RNG.integers(0, LABELS, BATCH[0]).astype(np.int32)
    y[:5] = -100  # the devices count different numbers of rows
    batch = {"x": RNG.normal(size=BATCH).astype(np.float32), "y": y}
    return batch, {
        "a": RNG.normal(size=(6, 8)).astype(np.float32),
        "b": RNG.normal(size=(8, LABELS)).astype(np.float32),
    }


@pytest.mark.parametrize("mesh_axes", [("dp",), ("dp", "tp"), ("tp",)])
def test_data_parallel_equals_the_global_view(mesh_axes: tuple[str, ...], oracle: Oracle) -> None:
    batch, weights = values()
    wrapped = ts.distribute(strategy="data_parallel", mesh_axes=mesh_axes, mesh=MESH)(step)
    found = []
    for fn in (wrapped, step):
        ts.seed(11)
        found.append(ts.jit(fn)(batch, weights))
    (loss, grads), (want, wanted) = found
    np.testing.assert_allclose(loss.numpy(), want.numpy(), rtol=1e-5)
    for k in weights:
        assert grads[k].shape == weights[k].shape and not grads[k].type.split_axes
        np.testing.assert_allclose(grads[k].numpy(), wanted[k].numpy(), rtol=1e-4, atol=1e-6)


def owners(weights: Any, gradients: Any, optimizer_state: Any, factor: Any) -> Any:
    """Guide 4's ZeRO update; each gradient is multiplied by `factor` from the right."""
    mesh, new = ts.mesh.current(), {}
    for i, (name, g) in enumerate(gradients.items()):
        owner = i % mesh.size
        if mesh.rank == owner:
            state = optimizer_state[name]
            state["m"] = state["m"] * 0.5 + (g if factor is None else g @ factor)
            new[name] = weights[name] - state["m"] * 0.1
        else:
            new[name] = ts.distributed.recv_from(owner, name)
    return new


@pytest.mark.parametrize("layout", ["[4@dp, 2]", "[4, 2]", None])
@pytest.mark.parametrize("elementwise", [True, False])
def test_owners_update_and_others_receive(
    oracle: Oracle, elementwise: bool, layout: str | None
) -> None:
    """Each device does elementwise work for its block, as with ZeRO-1: the state is stored in
    parts, and a weight is gathered once. The owner alone does other work."""
    update = ts.distribute(strategy="zero_redundancy_optimizer", mesh=MESH)(owners)
    factor = None if elementwise else RNG.normal(size=(2, 2)).astype(np.float32)
    names = "abcde"  # more than there are devices
    w = {k: RNG.normal(size=(4, 2)).astype(np.float32) for k in names}
    g = {k: RNG.normal(size=(4, 2)).astype(np.float32) for k in names}
    m = {k: RNG.normal(size=(4, 2)).astype(np.float32) for k in names}
    where = {"mesh": MESH, "layout": layout} if layout else {}
    state = {k: {"m": ts.tensor(v, **where)} for k, v in m.items()}
    new: Any = w
    for _ in range(2):
        new = update(new, g, state, factor)
        for k in names:
            m[k] = m[k] * 0.5 + (g[k] if factor is None else g[k] @ factor)
            w[k] = w[k] - m[k] * 0.1
            np.testing.assert_allclose(state[k]["m"].numpy(), m[k], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(new[k].numpy(), w[k], rtol=1e-5, atol=1e-6)
            assert str(new[k].type) == "f32[4, 2]"
    ops = [n.op for n in update.graph.nodes]
    split = {str(state[k]["m"].type) for k in names} == {"f32[4@dp, 2]"}
    assert split == (elementwise or layout == "[4@dp, 2]")
    if elementwise:
        moved = [(n.op, n.wire_bytes) for n, _ in update.graph.collectives()]
        assert moved == [("all_gather", 2 * 2 * 4)] * len(names) and "cond" not in ops
    else:  # each weight's update is a branch taken by one rank
        assert ops.count("cond") >= len(names)


def test_an_owner_whose_gradient_is_its_own_works_alone(oracle: Oracle) -> None:
    """A value that differs between ranks is the owner's, neither an average nor a block of each."""

    @ts.distribute(strategy="zero_redundancy_optimizer", mesh=MESH, batch="x")
    def update(w: ts.Tensor, x: ts.Tensor) -> Any:
        if ts.mesh.current().rank == 1:
            return {"w": w - x}
        return {"w": ts.distributed.recv_from(1, "w")}

    x = RNG.normal(size=(8, 2)).astype(np.float32)
    got = update(np.ones((4, 2), np.float32), x)["w"]
    np.testing.assert_allclose(got.numpy(), 1 - x[4:], rtol=1e-6)


def test_tensor_parallel_attention_equals_the_global_view(oracle: Oracle) -> None:
    heads, d = 4, 8

    def attention(x: ts.Tensor, w_qkv: ts.Tensor, w_out: ts.Tensor, num_heads: int) -> ts.Tensor:
        b, s, _ = x.shape
        q, k, v = (
            t.reshape(b, s, num_heads, d // heads).transpose(1, 2)
            for t in ts.split(x @ w_qkv, sections=3, dim=-1)
        )
        out = ts.nn.flash_attention(q, k, v, causal=True).transpose(1, 2).reshape(b, s, -1)
        return out @ w_out

    @ts.distribute(strategy="tensor_parallel", mesh_axes=["tp"], mesh=MESH)
    def local(x: ts.Tensor, w_qkv: ts.Tensor, w_out: ts.Tensor, num_heads: int) -> ts.Tensor:
        part = attention(x, w_qkv, w_out, num_heads // ts.mesh.current().size)
        return ts.distributed.all_reduce(part, axis="tp")

    x, w_qkv, w_out = (
        RNG.normal(size=s).astype(np.float32) * 0.5 for s in ((2, 6, d), (d, 3 * d), (d, d))
    )

    def trained(fn: Callable[..., ts.Tensor]) -> Any:
        def run(x: ts.Tensor, a: ts.Tensor, b: ts.Tensor) -> Any:
            y = fn(x, a, b, num_heads=heads)
            return y, ts.grad((y * y).mean(), (x, a, b))

        return ts.jit(run)(x, w_qkv, w_out)

    y, grads = trained(local)
    want, wanted = trained(attention)
    for a, b in zip((y, *grads), (want, *wanted), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-4, atol=1e-5)


def test_layouts_say_it_by_argument(oracle: Oracle) -> None:
    spec = dist.ShardSpec(("col",), ("tp",))

    @ts.distribute(layouts={"w": spec, "return": spec}, mesh_axes="tp", mesh=MESH)
    def body(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        assert w.shape == (3, 2)
        return x @ w

    x, w = RNG.normal(size=(2, 3)).astype(np.float32), RNG.normal(size=(3, 4)).astype(np.float32)
    y = body(x, w)
    assert str(y.type) == "f32[2, 4@tp]"
    np.testing.assert_allclose(y.numpy(), x @ w, rtol=1e-5)


def test_closures_are_seen_as_blocks_too(oracle: Oracle) -> None:
    w = ts.tensor(np.arange(8, dtype=np.float32), mesh=MESH, layout="[8@dp]")

    @op.kernel(mesh_axes="dp")
    def body(x: ts.Tensor) -> ts.Tensor:
        assert (x + w).shape == (4,)
        return x + w

    y = body(ts.ones((8,)) * ts.tensor(np.ones(8, np.float32), mesh=MESH, layout="[8@dp]"))
    np.testing.assert_array_equal(y.numpy(), np.arange(8) + 1)


def test_methods_and_nested_bodies(oracle: Oracle) -> None:
    class Model:
        @op.kernel
        def total(self, x: ts.Tensor) -> ts.Tensor:
            return inner(x)

    @op.kernel
    def inner(x: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce(x.sum())

    x = ts.tensor(np.arange(8, dtype=np.float32), mesh=MESH, layout="[8@(dp,tp)]")
    assert Model().total(x).item() == 28.0


def test_without_a_mesh_axis_of_one_device_changes_nothing(oracle: Oracle) -> None:
    mesh = dist.Mesh(("dp",), devices=1)

    @op.kernel
    def body(x: ts.Tensor) -> ts.Tensor:
        if ts.mesh.current().rank == 0:
            x = dist.shift(dist.all_gather(dist.all_reduce(x, "dp"), "dp"), "dp")
        return dist.all_to_all(dist.reduce_scatter(x, "dp"), "dp")

    x = ts.tensor(np.arange(4, dtype=np.float32), mesh=mesh)
    np.testing.assert_array_equal(body(x).numpy(), np.arange(4))
