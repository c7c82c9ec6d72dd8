"""`ts.autocast` for each op by the rules of docs/precision.md, and fp16 with overflow.

The rules are checked in the dtypes of the recorded graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.core.dtypes import DType
from tessera.ir.graph.node import Graph, reachable
from tessera.lang.jit.trace import trace
from tessera.passes.plan import prepared
from tessera.train import recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "precision.md"
NARROW = (ts.bf16, ts.f16)
W = np.ones((8, 8), np.float32)
LABELS = np.zeros(4, np.int32)
HEADS = np.ones((1, 2, 4, 8), np.float32)
IMAGE = np.ones((3, 3, 8, 8), np.float32)


@dataclass(frozen=True)
class Row:
    """An op with its autocast rule, and the op of its graph to check."""

    name: str
    rule: str
    call: Callable[[ts.Tensor], ts.Tensor]
    inside: str = ""  # the op of the graph whose operands have the dtype of the computation
    shape: tuple[int, ...] = (4, 8)


def attend(x: ts.Tensor) -> ts.Tensor:
    return nn.attention(x, x, x, causal=True)


ROWS = [
    Row("matmul", "product", lambda x: x @ ts.tensor(W), "contract"),
    Row("einsum", "product", lambda x: ts.einsum("ab,bc->ac", x, ts.tensor(W)), "contract"),
    Row("nn.linear", "product", lambda x: nn.linear(x, ts.tensor(W), ts.tensor(W[0])), "contract"),
    Row("nn.mlp", "product", lambda x: nn.mlp(x, ts.tensor(W), ts.tensor(W)), "contract"),
    Row("nn.swiglu", "product", lambda x: nn.swiglu(x, *[ts.tensor(W)] * 3), "contract"),
    Row("nn.attention", "product", attend, "contract", HEADS.shape),
    Row("nn.flash_attention", "product", lambda x: nn.flash_attention(x, x, x), "contract",
        HEADS.shape),
    Row("nn.conv1d", "product", lambda x: nn.conv1d(x, ts.ones((2, 3, 3))), "conv", (1, 3, 8)),
    Row("nn.conv2d", "product", lambda x: nn.conv2d(x, ts.ones((2, 3, 3, 3))), "conv", IMAGE.shape),
    Row("nn.conv3d", "product", lambda x: nn.conv3d(x, ts.ones((2, 3, 3, 3, 3))), "conv",
        (1, 3, 4, 4, 4)),
    Row("sum", "wide", lambda x: x.sum(), "sum"),
    Row("mean", "wide", lambda x: x.mean(-1), "sum"),
    Row("var", "wide", lambda x: ts.var(x, -1), "sum"),
    Row("prod", "wide", lambda x: ts.prod(x), "prod"),
    Row("cumsum", "wide", lambda x: ts.cumsum(x), "cumsum"),
    Row("exp", "wide", ts.exp, "exp"),
    Row("log", "wide", ts.log, "log"),
    Row("rsqrt", "wide", ts.rsqrt, "rsqrt"),
    Row("logsumexp", "wide", lambda x: ts.logsumexp(x, -1), "exp"),
    Row("nn.softmax", "inside", nn.softmax, "exp"),
    Row("nn.log_softmax", "inside", nn.log_softmax, "exp"),
    Row("nn.layer_norm", "inside", nn.layer_norm, "rsqrt"),
    Row("nn.rms_norm", "inside", nn.rms_norm, "rsqrt"),
    Row("nn.group_norm", "inside", lambda x: nn.group_norm(x, 1), "rsqrt", IMAGE.shape),
    Row("nn.cross_entropy", "loss", lambda x: nn.cross_entropy(x, ts.tensor(LABELS)), "exp"),
    Row("nn.linear_cross_entropy", "loss",
        lambda x: nn.linear_cross_entropy(x, ts.tensor(W), ts.tensor(LABELS)), "exp"),
    Row("add", "operands", lambda x: x + x, "add"),
    Row("mul", "operands", lambda x: x * x, "mul"),
    Row("div", "operands", lambda x: x / x, "div"),
    Row("maximum", "operands", lambda x: ts.maximum(x, 0.0), "maximum"),
    Row("where", "operands", lambda x: ts.where(x > 0, x, 0.0), "where"),
    Row("max", "operands", lambda x: x.max(), "max"),
    Row("sqrt", "operands", ts.sqrt, "sqrt"),
    Row("tanh", "operands", ts.tanh, "tanh"),
    Row("sigmoid", "operands", ts.sigmoid, "sigmoid"),
    Row("nn.relu", "operands", nn.relu, "where"),
    Row("nn.gelu", "inside", nn.gelu, "sigmoid"),
    Row("nn.silu", "inside", nn.silu, "sigmoid"),
    Row("nn.dropout", "operands", lambda x: nn.dropout(x, 0.5), "where"),
    Row("nn.rotary", "operands", nn.rotary, "concat"),
    Row("nn.embedding", "operands", lambda x: nn.embedding(ts.tensor(LABELS), x), "take"),
    Row("reshape", "operands", lambda x: x.reshape(-1), "reshape"),
    Row("concat", "operands", lambda x: ts.concat([x, x]), "concat"),
]  # fmt: skip
# For (f32 operands, narrow operands), a rule's dtype of the computation and dtype of the result.
N, F, SAME = "narrow", "f32", "operands'"
RULES = {
    "product": (N, N, N, N),
    "wide": (F, F, F, F),
    "inside": (F, F, F, N),
    "loss": (F, F, F, F),
    "operands": (F, F, N, N),
}


def every(graph: Graph) -> list[Any]:
    """All nodes that the results need, with those of loop bodies."""
    found = []
    for n in reachable(graph.outputs):
        found.append(n)
        if "body" in n.attrs:
            found += every(n.attrs["body"])
    return found


def recorded(row: Row, operand: DType, to: DType) -> Graph:
    """The graph of `row` on an operand of dtype `operand`, inside autocast to `to`."""

    def run(x: ts.Tensor) -> ts.Tensor:
        with ts.autocast(to):
            return row.call(x)

    return trace(run, ts.ones(row.shape, operand))


@pytest.mark.parametrize("to", NARROW, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_an_op_has_the_dtypes_of_its_rule(row: Row, to: DType) -> None:
    for operand, (inside, result) in zip((ts.f32, to), (RULES[row.rule][:2], RULES[row.rule][2:])):
        graph = recorded(row, operand, to)
        want = {N: to, F: ts.f32}
        at = [n for n in every(graph) if n.op == row.inside]
        floats = {a.type.dtype for n in at for a in n.args if a.type.dtype.is_float}
        assert floats == {want[inside]}, row.inside
        assert graph.outputs[0].type.dtype is want[result]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_outside_and_switched_off_an_op_goes_by_its_operands(row: Row) -> None:
    def off(x: ts.Tensor) -> ts.Tensor:
        with ts.autocast(ts.bf16), ts.autocast(enabled=False):
            return row.call(x)

    def made(fn: Callable[[ts.Tensor], ts.Tensor], x: ts.Tensor) -> list[tuple[str, str]]:
        return [(n.op, str(n.types)) for n in every(trace(fn, x))]

    for operand in (ts.f32,) if row.rule == "product" else (ts.f32, ts.bf16):
        x = ts.ones(row.shape, operand)
        assert sorted(made(off, x)) == sorted(made(row.call, x))


def test_the_page_lists_each_op_under_its_rule() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for rule in RULES:
        line = re.search(rf"^\| {rule} \| (.*?) \|", text, re.M)
        assert line is not None, rule
        names = re.findall(r"`([\w.]+)`", line[1])
        assert names == [r.name for r in ROWS if r.rule == rule]


def test_gradients_are_summed_in_the_dtype_that_is_asked_for() -> None:
    mesh, rng = dist.Mesh.parse("dp=2"), np.random.default_rng(0)
    x, g = (rng.normal(size=(64, n)).astype(np.float32) for n in (8, 4))
    rows, cotangent = (ts.tensor(v, mesh=mesh, layout=f"[64@dp, {v.shape[1]}]") for v in (x, g))
    w = ts.tensor(np.zeros((8, 4), np.float32), mesh=mesh)

    def found(dtype: Any) -> Any:
        def run(w: ts.Tensor, rows: ts.Tensor, cotangent: ts.Tensor) -> Any:
            with ts.autocast(ts.bf16):
                loss = ((rows @ w).to(ts.f32) * cotangent).sum()
            return ts.grad(loss, w, reduce_dtype=dtype)

        return ts.jit(run)(w, rows, cotangent).numpy()

    def rounded(v: Any) -> Any:
        return ts.tensor(v).to(ts.bf16).to(ts.f32).numpy()

    terms = [rounded(rounded(x[i : i + 32]).T @ rounded(g[i : i + 32])) for i in (0, 32)]
    np.testing.assert_array_equal(found(ts.f32), terms[0] + terms[1])
    for dtype in (None, "bf16"):
        np.testing.assert_array_equal(found(dtype), rounded(terms[0] + terms[1]))


def test_narrow_and_wide_operands_meet_in_f32() -> None:
    def residual(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        with ts.autocast(ts.f16):
            return x + x @ w

    assert trace(residual, ts.ones((4, 8)), ts.tensor(W)).outputs[0].type.dtype is ts.f32


@pytest.mark.parametrize("to", NARROW, ids=str)
def test_gradients_and_products_of_the_backward_pass(to: DType) -> None:
    def loss_and_grad(x: ts.Tensor, w: ts.Tensor) -> Any:
        with ts.autocast(to):
            loss = nn.cross_entropy(nn.gelu(x @ w) @ w, ts.tensor(LABELS))
        return loss, ts.grad(loss, w)

    graph = trace(loss_and_grad, ts.ones((4, 8)), ts.tensor(W))
    assert [n.type.dtype for n in graph.outputs] == [ts.f32, ts.f32]
    products = [n for n in every(graph) if n.op == "contract"]
    assert len(products) == 5
    assert {a.type.dtype for n in products for a in n.args} == {to}


# -- fp16: overflow, skip, recover ----------------------------------------------------------------
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "sequence_length": 8,
    "batch_size": 4, "learning_rate": 1e-2, "mixed_precision": "fp16", "loss_scale_interval": 3,
}  # fmt: skip


def test_a_run_that_overflows_halves_the_scale_skips_the_update_and_recovers() -> None:
    weights = recipe.initialize_model_weights(SMALL)
    state = recipe.initialize_optimizer_state(weights, SMALL)
    state["loss_scale"] = ts.tensor(2.0**23)
    step = recipe.make_step(SMALL)
    ids = np.arange(32, dtype=np.int32).reshape(4, 8)
    data = {"input_ids": ids, "labels": ids}
    rows = []
    for _ in range(16):
        before, count = weights["head"].numpy().copy(), state["step"].item()
        scale = state["loss_scale"].item()
        loss, weights, state = step(data, weights, state)
        skipped = state["step"].item() == count
        assert np.array_equal(before, weights["head"].numpy()) is skipped
        assert all(np.isfinite(t.numpy()).all() for t in state["v"].values())
        rows.append((skipped, scale, state["loss_scale"].item(), loss.item()))
    skips = [r for r in rows if r[0]]
    assert skips and rows[0][0] and len(skips) < 12
    assert all(after == scale / 2 for _, scale, after, _ in skips)
    assert any(after == 2 * scale for _, scale, after, _ in rows)  # doubled after 3 good steps
    losses = [loss for skipped, _, _, loss in rows if not skipped]
    assert all(np.isfinite(losses)) and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_mixed_precision_learns_what_f32_learns(to: str) -> None:
    ids = np.arange(32, dtype=np.int32).reshape(4, 8)
    found = []
    for precision in (False, to):
        c = {k: v for k, v in SMALL.items() if not k.startswith("loss_scale")}
        c |= {"mixed_precision": precision}
        weights = recipe.initialize_model_weights(c)
        state = recipe.initialize_optimizer_state(weights, c)
        step = recipe.make_step(c)
        for _ in range(12):
            loss, weights, state = step({"input_ids": ids, "labels": ids}, weights, state)
        found.append(loss.item())
        assert {w.dtype for w in (*weights.values(), *state["m"].values())} == {ts.f32}
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_what_a_narrow_weight_gets_of_many_iterations_is_added_up_in_f32() -> None:
    rows = np.full((512, 1), 2.0**-8, np.float32)

    def loss(w: ts.Tensor, xs: ts.Tensor) -> Any:
        total, _ = ts.scan(lambda c, x: (c + (w * x).to("f32").sum(), ()), ts.zeros(()), xs)
        return ts.grad(total, w)

    (found,) = ts.jit(loss)(ts.ones((1,)).to("bf16"), ts.tensor(rows).to("bf16")).numpy()
    assert found == 2.0  # a sum in bf16 stops at 1: the next one is 1 + 2^-7


@pytest.mark.parametrize("stage", [1, 3])
def test_in_bf16_half_of_the_bytes_cross_wires_also_where_layers_run_in_chunks(stage: int) -> None:
    mesh = dist.Mesh.parse("dp=8")
    plan = dist.strategy("zero_redundancy_optimizer", stage=stage)
    config = nn.GPTConfig(vocab=64, seq=256, d=256, layers=2, heads=4)
    model = dist.place(nn.GPT(config), plan, mesh)
    ids = ts.tensor(np.zeros((128, 256), np.int32), mesh=mesh, layout="[128@dp, 256]")

    def received(narrow: bool) -> int:
        def step(model: nn.GPT, ids: ts.Tensor) -> Any:
            with ts.autocast("bf16", enabled=narrow):
                loss = model.loss(ids, ids)
            return loss, ts.grad(loss, model.parameters(), layout=plan)

        graph = prepared(trace(step, model, ids))
        loops = [n for n in graph.nodes if n.op == "scan"]
        assert loops, "the MLP's rows are so many that it runs in chunks"
        return graph.wire_bytes

    assert received(True) < 0.55 * received(False)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_weight_that_is_set_is_what_is_updated(dtype: DType, devices: int) -> None:
    """In PyTorch the weight has no copy; here its f32 master is set with it."""
    mesh = dist.Mesh("dp", devices=devices)
    plan = dist.strategy("zero_redundancy_optimizer", stage=1)
    opt = ts.optim.SGD(1e-4)
    start = np.float32([1.0, 1.0, 100.0, -3.0])
    weights = {"w": ts.tensor(start, mesh=mesh).to(dtype)}
    state = opt.init(weights, plan)
    grads = {"w": ts.ones(4)}

    @ts.jit
    def step(weights: Any, state: Any) -> Any:
        return opt.update(weights, grads, state)

    for _ in range(100):  # each too small to change the narrow weight
        weights, state = step(weights, state)
    np.testing.assert_allclose(state["master"]["w"].numpy(), start - 0.01, rtol=1e-5, atol=1e-5)
    first = np.array([True, True, True, False])
    weights = {"w": ts.where(first, ts.tensor(5.0).to(dtype), weights["w"])}
    weights, state = step(weights, state)
    want = np.float32([5.0, 5.0, 5.0, -3.01]) - 1e-4
    np.testing.assert_allclose(state["master"]["w"].numpy(), want, rtol=1e-5, atol=1e-5)
    weights, state = step({"w": ts.minimum(weights["w"], 2.0)}, state)
    want = np.float32([2.0, 2.0, 2.0, -3.0101]) - 1e-4
    np.testing.assert_allclose(state["master"]["w"].numpy(), want, rtol=1e-5, atol=1e-5)
    assert state["master"]["w"].type.split_axes == (("dp",) if devices > 1 else ())
