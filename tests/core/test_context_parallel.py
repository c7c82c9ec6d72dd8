"""Context-parallel attention, by the oracle: equality with whole attention, balanced work on all
devices, and the cost of layout changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op
from tessera.core.layout import parse_type
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.nn import blockwise
from tessera.nn.context_parallel import split_sequence, whole_sequence, zigzag_positions
from tessera.passes.simplify import simplify
from tests.core.numpy_engine import Oracle
from tests.messages import Golden

RNG = np.random.default_rng(11)
ATTENTION = {"ring": nn.ring_attention, "all_to_all": nn.all_to_all_attention}


def reference(q: Any, k: Any, v: Any, bias: Any, causal: bool) -> Any:
    """Softmax attention in NumPy, f64: [B, H, S, D] with G heads of keys."""
    shared = q.shape[1] // k.shape[1]
    k, v = (np.repeat(t.astype(np.float64), shared, 1) for t in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias[:, None]
    if causal:
        s = np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v


def collectives(g: Graph) -> Counter[tuple[str, tuple[str, ...]]]:
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for n, times in g.collectives():
        found[n.op, n.attrs["axes"]] += times
    return found


# -- values and gradients -------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["ring", "all_to_all"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [8, 4])
def test_it_is_attention_and_so_are_its_gradients(how: str, causal: bool, groups: int) -> None:
    mesh = dist.Mesh(("dp", "cp"), shape={"dp": 2, "cp": 4})
    shapes = [(2, 8, 16, 6), (2, groups, 16, 6), (2, groups, 16, 6), (8, 16)]
    x = [RNG.normal(size=s).astype(np.float32) for s in shapes]
    order = np.arange(16)
    if how == "ring" and causal:
        order = np.array([0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9])
    laid = [a[..., order, :] for a in x[:3]] + [x[3][:, order]]
    c = RNG.normal(size=shapes[0])

    def run(q: Any, k: Any, v: Any, bias: Any, c: Any) -> Any:
        y = ATTENTION[how](q, k, v, causal=causal, bias=bias)
        return y, ts.grad((y * c).sum(), [q, k, v, bias])

    text = "f32[{}@dp, {}, {}@cp, {}]".format
    types = [parse_type(text(*s), mesh) for s in shapes[:3]] + [parse_type("f32[8, 16@cp]", mesh)]
    g = graph.trace(run, *types, types[0])
    verify(g)
    # The slope along one direction, by central differences of the formula.
    steps, eps = [RNG.normal(size=a.shape) for a in x], 1e-6
    ahead, behind = (
        reference(*(a + sign * eps * s for a, s in zip(x, steps, strict=True)), causal)
        for sign in (1, -1)
    )
    slope = ((ahead - behind) / (2 * eps) * c).sum()
    for each in (evaluate, evaluate_blocks):
        y, *grads = each(g, [*laid, c[..., order, :].astype(np.float32)])
        np.testing.assert_allclose(y, reference(*x, causal)[..., order, :], atol=2e-6)
        moved = [s[..., order, :] for s in steps[:3]] + [steps[3][:, order]]
        found = sum((a * s).sum() for a, s in zip(grads, moved, strict=True))
        np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-4)


MORE = np.random.default_rng(12)
MASKS = {
    "keys": MORE.uniform(size=(2, 1, 1, 16)) < 0.6,
    "keys of heads": MORE.uniform(size=(8, 1, 16)) < 0.6,
    "scores": MORE.uniform(size=(16, 16)) < 0.6,
    "scores of heads": MORE.uniform(size=(2, 8, 16, 16)) < 0.6,
    "queries": MORE.uniform(size=(2, 1, 16, 1)) < 0.6,
    "left padding": np.arange(16) >= np.array([9, 3]).reshape(2, 1, 1, 1),
    "added": MORE.normal(size=(2, 8, 1, 16)).astype(np.float32),
    "added, some hidden": np.where(np.arange(16) % 5 < 2, -np.inf, MORE.normal(size=(2, 1, 1, 16))),
    "lowest float": np.full((2, 1, 1, 16), np.finfo(np.float32).min),
}


@pytest.mark.parametrize(("mask", "groups"), [(m, (8, 4)[i % 2]) for i, m in enumerate(MASKS)])
@pytest.mark.parametrize("how", ["ring", "all_to_all"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_hide_what_they_hide_in_the_whole(
    how: str, causal: bool, mask: str, groups: int
) -> None:
    mesh = dist.Mesh(("dp", "cp"), shape={"dp": 2, "cp": 4})
    shapes = [(2, 8, 16, 6), (2, groups, 16, 6), (2, groups, 16, 6), (2, 8, 16, 6)]
    x = [MORE.normal(size=s).astype(np.float32) for s in shapes]
    m = MASKS[mask].astype(bool if MASKS[mask].dtype == bool else np.float32)
    order = np.arange(16)
    if how == "ring" and causal:
        order = zigzag_positions(16, 4).numpy()
    laid = [a[..., order, :] for a in x]
    placed = m[..., order] if m.shape[-1] > 1 else m
    placed = placed[..., order, :] if m.ndim > 1 and m.shape[-2] > 1 else placed

    def run(fn: Any) -> Any:
        def both(q: Any, k: Any, v: Any, c: Any, m: Any) -> Any:
            y = fn(q, k, v, causal=causal, mask=m)
            leaves = [q, k, v, m] if m.dtype.is_float else [q, k, v]
            return y, ts.grad((y * c).sum(), leaves)

        return both

    text = "f32[{}@dp, {}, {}@cp, {}]".format
    types = [parse_type(text(*s), mesh) for s in shapes]
    split = graph.trace(run(ATTENTION[how]), *types, placed)
    verify(split)
    whole = graph.trace(run(nn.attention), *x, m)
    want = list(evaluate(whole, [*x, m]))
    want[:4] = [a[..., order, :] for a in want[:4]]
    if len(want) > 4:
        want[4] = want[4][..., order]
    for each in (evaluate, evaluate_blocks):
        for found, w in zip(each(split, [*laid, placed]), want, strict=True):
            np.testing.assert_allclose(found, w, atol=5e-6)


def test_a_ring_takes_no_float_mask_of_all_scores() -> None:
    mesh = dist.Mesh(("cp",), devices=2)
    x = ts.tensor(np.ones((1, 2, 8, 4)), mesh=mesh, layout="[1, 2, 8@cp, 4]")
    with pytest.raises(ts.UsageError, match="a float mask of all scores would have no gradient"):
        nn.ring_attention(x, x, x, mask=np.zeros((8, 8), np.float32))
    with pytest.raises(ts.ShapeError, match="the mask does not broadcast to the scores"):
        nn.ring_attention(x, x, x, mask=np.ones((4, 8), bool))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores computed in loops over blocks of 2 queries equal those computed at once."""
    mesh = dist.Mesh(("cp",), shape={"cp": 2})
    t = parse_type("f32[1, 2, 32@cp, 4]", mesh)

    def run(q: Any, k: Any, v: Any) -> Any:
        y = nn.ring_attention(q, k, v, causal=True)
        return y, ts.grad((y * y).sum(), [q, k, v])

    x = [RNG.normal(size=t.shape).astype(np.float32) for _ in range(3)]
    one = graph.trace(run, t, t, t)
    monkeypatch.setattr(blockwise, "SCORES", 1)
    monkeypatch.setattr(blockwise, "ROWS", 2)
    many = graph.trace(run, t, t, t)
    assert "scan" not in one.text and "scan" in many.text
    # 8·8 scores at a time in one piece, 2·8 in blocks: neither has 16·16.
    for a, b in zip(evaluate(one, x), evaluate(many, x), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def everything(nodes: Any) -> Iterator[Node]:
    for n in nodes:
        yield n
        if n.op == "scan":
            yield from everything(n.attrs["body"].nodes)


def test_no_device_ever_holds_all_scores_of_a_part() -> None:
    mesh = dist.Mesh(("cp",), shape={"cp": 4})
    seq, heads, d = 1 << 16, 4, 8
    t = parse_type(f"f32[1, {heads}, {seq}@cp, {d}]", mesh)

    def run(q: Any, k: Any, v: Any) -> Any:
        return ts.grad((nn.ring_attention(q, k, v, causal=True) ** 2).sum(), [q, k, v])

    g = simplify(graph.trace(run, t, t, t))
    largest = max(int(np.prod(x.local_shape)) for n in everything(g.nodes) for x in n.types)
    part, scores = heads * seq // 4 * d, heads * blockwise.ROWS * seq // 4
    assert largest == max(part, scores) < heads * (seq // 4) ** 2 / 100


def test_in_a_local_body_it_takes_blocks(oracle: Oracle) -> None:
    mesh = dist.Mesh(("cp",), shape={"cp": 2})
    x = RNG.normal(size=(1, 2, 8, 4)).astype(np.float32)
    t = ts.tensor(x, mesh=mesh, layout="[1, 2, 8@cp, 4]")

    @op.kernel
    def body(x: Any) -> Any:
        return nn.ring_attention(x, x, x).transpose(0, 2)  # blocks are joined along dim 0

    found = body(t).numpy().swapaxes(0, 2)
    np.testing.assert_allclose(found, reference(x, x, x, np.zeros((2, 8)), False), atol=1e-6)


# -- the share of each device ---------------------------------------------------------------------
def products(nodes: Any) -> Iterator[tuple[Node, int]]:
    """Yields the score products with the number of times each runs."""
    for n in nodes:
        if n.op == "scan":
            yield from ((m, k * n.attrs["length"]) for m, k in products(n.attrs["body"].nodes))
        elif n.op == "contract" and n.attrs["index"] == "bgrsd,bgtd->bgrst":
            yield n, 1


@pytest.mark.parametrize("n", [2, 4, 8])
def test_causal_work_is_balanced_in_every_step(oracle: Oracle, n: int) -> None:
    size, d = 64, 4
    mesh = dist.Mesh(("cp",), shape={"cp": n})
    t = parse_type(f"f32[1, 1, {2 * n * size}@cp, {d}]", mesh)
    g = graph.trace(lambda q, k, v: nn.ring_attention(q, k, v, causal=True), t, t, t)
    # One program for all: no device takes a branch that others do not.
    assert not [m for m in g.nodes if m.op == "cond"]
    found, handed = [0], 0
    flops = 2 * size * size * d  # FLOPs of one chunk of queries with one of keys
    for m in g.nodes:
        if m.op == "permute":
            handed += 1
            if handed % 2:  # the bytes of keys and values
                found.append(0)
        for node, times in products([m]):
            assert node.type.varying == ("cp",)
            found[-1] += times * 2 * int(np.prod(node.type.shape)) * d
    # First, a device's own two chunks against each other: 3 of 4 pairs are seen, one of them whole.
    assert found[0] == 3 * flops and found[1:] == [2 * flops] * (n - 1)

    # The minimum by the masks on device i in step s: pairs of chunks that are seen.
    def needed(order: Any) -> Any:
        chunks = order.reshape(n, 2, size)[:, :, 0] // size
        return np.array([
            [sum(a >= b for a in chunks[i] for b in chunks[(i - s) % n]) for s in range(n)]
            for i in range(n)
        ])  # fmt: skip

    zigzag = needed(zigzag_positions(2 * n * size, n).numpy())
    assert (zigzag[:, 0] == 3).all() and (zigzag[:, 1:] == 2).all()
    plain = needed(np.arange(2 * n * size))
    assert plain.sum() == zigzag.sum() and plain.sum(1).max() == 4 * n - 1
    assert zigzag.sum(1).max() == 2 * n + 1


def test_keys_travel_and_are_not_collected() -> None:
    """Forward, k and v make n-1 hops; backward makes these again, and n for the gradients."""
    mesh = dist.Mesh(("cp",), shape={"cp": 4})
    t = parse_type("f32[1, 2, 16@cp, 4]", mesh)

    def run(q: Any, k: Any, v: Any) -> Any:
        return ts.grad((nn.ring_attention(q, k, v, causal=True) ** 2).sum(), [q, k, v])

    g = simplify(graph.trace(run, t, t, t))
    assert collectives(g) == {("permute", ("cp",)): 2 * 3 + 2 * 3 + 2 * 4}


# -- layouts between layers -----------------------------------------------------------------------
@pytest.mark.parametrize("shared", [1, 2])
def test_two_exchanges_forward_and_two_back(shared: int) -> None:
    mesh = dist.Mesh(("dp", "cp", "tp"), shape={"dp": 2, "cp": 2, "tp": 2})
    q = parse_type(f"f32[4@dp, {4 * shared}@tp, 16@cp, 8]", mesh)
    k = parse_type("f32[4@dp, 4@tp, 16@cp, 8]", mesh)

    def run(q: Any, k: Any, v: Any, c: Any) -> Any:
        y = nn.all_to_all_attention(q, k, v, causal=True)
        return y, ts.grad((y * c).sum(), [q, k, v])

    g = simplify(graph.trace(run, q, k, k, q))
    assert collectives(g) == {("all_to_all", ("cp",)): 4}
    assert [o.type for o in g.outputs] == [q, q, k, k]


def step(model: Any, ids: Any, labels: Any) -> Any:
    loss = model.loss(ids, labels)
    return loss, ts.grad(loss, model.parameters())


def traced(axes: dict[str, int], **options: Any) -> Graph:
    mesh = dist.Mesh(tuple(axes), shape=axes)
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    config = {"vocab": 64, "seq": 32, "d": 32, "layers": 2, "heads": 4, **options}
    model = dist.place(nn.GPT(nn.GPTConfig(**config)), plan, mesh)
    batch = np.zeros((4, 32), np.int32)
    return simplify(graph.trace(step, model, *dist.place((batch, batch), plan, mesh, kind="batch")))


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(
    ("options", "sublayers"),
    [
        ({"norm": "rms", "positions": "rotary"}, 2),
        ({"biases": ("qkv", "out", "mlp")}, 2),
        ({"block": "parallel", "biases": ("out", "mlp")}, 1),
        ({"heads": 8, "kv_heads": 4, "hidden": 64, "activation": "swiglu", "tied": True}, 2),
    ],
)
def test_sequence_parallelism_puts_two_halves_in_place_of_each_all_reduce(
    options: dict[str, Any], sublayers: int, loop: bool
) -> None:
    whole = traced({"dp": 2, "tp": 4}, loop=loop, **options)
    split = traced({"dp": 2, "tp": 4}, loop=loop, sequence_parallel="tp", **options)
    before, after = collectives(whole), collectives(split)
    tp = ("tp",)
    # Per sublayer one of each, forward and backward, and one of each for embedding and head.
    each = 2 * 2 * sublayers + 2
    learned = options.get("positions") != "rotary"  # its gradient is gathered
    assert after["reduce_scatter", tp] == each
    assert after["all_gather", tp] == each + learned
    assert not [k for k in after if k[0] not in ("all_gather", "reduce_scatter", "all_reduce")]
    # Of the all_reduces over tp alone only the loss's three statistics remain.
    assert after["all_reduce", tp] == 3 and before["all_reduce", tp] == 3 + each


def test_sequence_parallelism_costs_no_byte() -> None:
    options: dict[str, Any] = {"norm": "rms", "positions": "rotary"}
    whole = traced({"dp": 1, "tp": 4}, **options)
    split = traced({"dp": 1, "tp": 4}, sequence_parallel="tp", **options)
    assert split.wire_bytes == whole.wire_bytes
    residuals = [n for n in split.nodes if n.op == "add" and n.type.shape == (4, 32, 32)]
    assert residuals and all(str(n.type) == "f32[4, 32@tp, 32]" for n in residuals)


def test_the_order_is_made_once_and_not_in_the_layers() -> None:
    g = traced({"dp": 2, "cp": 2, "tp": 2}, context="ring", positions="rotary", norm="rms")
    found = collectives(g)
    assert {k[0] for k in found} == {"permute", "all_reduce"}
    assert not [n for n in g.nodes if n.op == "take" and "layers" in n.scope]
    g = traced({"dp": 2, "cp": 2, "tp": 2}, context="all_to_all", sequence_parallel="tp")
    assert collectives(g)["all_to_all", ("cp",)] == 2 * 2 * 2


def test_without_a_mesh_it_is_the_plain_model(oracle: Oracle) -> None:
    ids = RNG.integers(0, 16, (2, 8))
    losses = []
    for options in ({}, {"context": "ring", "sequence_parallel": "tp"}):
        ts.seed(1)
        config = nn.GPTConfig(vocab=16, seq=8, d=8, layers=1, heads=2, **options)  # type: ignore[arg-type]
        losses.append(nn.GPT(config).loss(ts.tensor(ids), ts.tensor(ids)).item())
    assert losses[0] == losses[1]


# -- the order ------------------------------------------------------------------------------------
def test_zigzag_comes_back(oracle: Oracle) -> None:
    x = ts.tensor(RNG.normal(size=(2, 24, 3)))
    assert nn.zigzag(x, 1) is x
    y = nn.zigzag(x, 3)
    np.testing.assert_array_equal(y.numpy()[:, :8], x.numpy()[:, [0, 1, 2, 3, 20, 21, 22, 23]])
    np.testing.assert_array_equal(nn.unzigzag(y, 3).numpy(), x.numpy())


def test_split_and_whole_undo_each_other() -> None:
    mesh = dist.Mesh(("tp",), shape={"tp": 4})
    t = parse_type("f32[2, 8, 4]", mesh)
    g = graph.trace(lambda x: whole_sequence(split_sequence(x, "tp"), "tp"), t)
    assert [(n.op, str(n.type)) for n in g.nodes[1:]] == [
        ("shard", "f32[2, 8@tp, 4]"),
        ("all_gather", "f32[2, 8, 4]"),
    ]


# -- what it says to bad input --------------------------------------------------------------------
def qkv(heads: int, groups: int, seq: int, axis: str = "cp") -> list[ts.Tensor]:
    mesh = dist.Mesh((axis,), shape={axis: 4})
    sizes = (heads, groups, groups)
    return [dist.tensor((1, n, seq, 2), f"[1, {n}, {seq}, 2]", mesh, init="zeros") for n in sizes]


BAD: dict[str, Callable[[], Any]] = {
    "a sequence of 10": lambda: nn.ring_attention(*qkv(2, 2, 10)),
    "a causal sequence of 12": lambda: nn.ring_attention(*qkv(2, 2, 12), causal=True),
    "another axis": lambda: nn.ring_attention(*qkv(2, 2, 16, "dp")),
    "too few heads of keys": lambda: nn.all_to_all_attention(*qkv(8, 2, 16)),
    "chunks of a sequence": lambda: nn.zigzag(ts.zeros((2, 10)), 4),
    "the kind of context": lambda: nn.GPTConfig(context="rings"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_before_anything_runs(oracle: Oracle, name: str, golden: Golden) -> None:
    with pytest.raises(ts.TesseraError) as info:
        BAD[name]()
    golden(info.value)


def test_a_model_on_a_mesh_without_the_axis(oracle: Oracle) -> None:
    mesh = dist.Mesh(("dp",), devices=4)
    model = dist.place(
        nn.GPT(nn.GPTConfig(vocab=8, seq=8, d=8, heads=2, context="ring")), None, mesh
    )
    with pytest.raises(ts.MeshError, match="GPT: axis 'cp' is not an axis of the mesh"):
        model.loss(ts.zeros((4, 8), "int32"), ts.zeros((4, 8), "int32"))


def test_what_the_user_scatters_is_gathered_once_for_all_gradients() -> None:
    mesh = dist.Mesh(("tp",), shape={"tp": 4})
    texts = "f32[8, 16]", "f32[16, 32@tp]", "f32[32@tp, 16]", "f32[8@tp, 16]"
    types = [parse_type(t, mesh) for t in texts]

    def run(x: Any, up: Any, down: Any, c: Any) -> Any:
        y = dist.reduce_scatter(ts.tanh(x @ up) @ down, "tp", dim=0)
        return ts.grad((y * c).sum(), [x, up, down])

    g = simplify(graph.trace(run, *types))
    # From there on the gradient of y is whole; that of x is a partial sum, as y was.
    assert collectives(g) == {("all_gather", ("tp",)): 1, ("all_reduce", ("tp",)): 1}
    assert [o.type for o in g.outputs] == types[:3]
