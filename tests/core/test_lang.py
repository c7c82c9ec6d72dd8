"""The language without the engine: types, recorded graphs, and values by the oracle.

A test that must run a program uses NumPy as the engine.
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, graph, nn
from tessera.core.dtypes import bf16, f32, held_as, int32
from tessera.core.layout import parse_type, plain
from tessera.ir.graph.oracle import evaluate
from tessera.ir.graph.verify import verify
from tessera.lang.record.tree import flatten, path_name, paths, tree_map, unflatten
from tessera.lang.value.annotations import Sizes, TensorSpec
from tessera.passes.simplify import simplify

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
RNG = np.random.default_rng(5)


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def traced(fn: Callable[..., Any], *values: np.ndarray) -> list[np.ndarray]:
    """Records `fn` on the types of `values` alone, and evaluates it with the oracle."""
    g = graph.trace(fn, *(plain(held_as(v.dtype), v.shape) for v in values))
    verify(g)
    verify(simplify(g), "simplify")
    return evaluate(simplify(g), values)


# -- functions and layers on types ----------------------------------------------------------------
def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def normalised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def turned(x: np.ndarray) -> np.ndarray:
    """Rotary embedding as a product of complex numbers."""
    seq, d = x.shape[-2:]
    rate = 10000.0 ** (-np.arange(d // 2) / (d // 2))
    z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * np.outer(np.arange(seq), rate))
    return np.concatenate([z.real, z.imag], -1)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention, the key and value heads repeated for their groups."""
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    seen = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
    return softmax(np.where(seen, scores, -np.inf)) @ v


def nll(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mean cross-entropy over the labels that are not -100."""
    rows = [-np.log(softmax(r)[k]) for r, k in zip(x, y, strict=True) if k != -100]
    return np.mean(rows)


def inverse(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


LABELS = np.array([1, -100, 4, 0], np.int32)
WHOLE = np.array([[3, -1, 2, 0], [1, 5, -2, 2]], np.int32)
HEADS = np.stack([WHOLE, WHOLE - 1])[None]
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "softmax": (nn.softmax, softmax, (real(3, 5),)),
    "softmax of a dim": (lambda x: nn.softmax(x, 0), lambda x: softmax(x.T).T, (real(3, 5),)),
    "log_softmax": (nn.log_softmax, lambda x: np.log(softmax(x)), (real(3, 5),)),
    "softmax of whole numbers": (nn.softmax, softmax, (WHOLE,)),
    "log_softmax of whole numbers": (nn.log_softmax, lambda x: np.log(softmax(x)), (WHOLE,)),
    "softplus of whole numbers": (nn.softplus, lambda x: np.log1p(np.exp(x)), (WHOLE,)),
    "layer_norm of whole numbers": (nn.layer_norm, normalised, (WHOLE,)),
    "rms_norm of whole numbers": (
        nn.rms_norm, lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True)), (WHOLE,),
    ),
    "rotary of whole numbers": (nn.rotary, turned, (WHOLE,)),
    "attention of whole numbers": (
        lambda q: nn.attention(q, q, q, causal=True), lambda q: attended(q, q, q), (HEADS,),
    ),
    "flash attention of whole numbers": (
        lambda q: nn.flash_attention(q, q, q, causal=True), lambda q: attended(q, q, q), (HEADS,),
    ),
    "gelu": (lambda x: nn.gelu(x, "none"), lambda x: x * (1 + erf(x / 2**0.5)) / 2, (real(9),)),
    "silu": (nn.silu, lambda x: x * inverse(x), (real(9),)),
    "relu": (nn.relu, lambda x: x * (x > 0), (real(9),)),
    "layer_norm": (
        nn.layer_norm, lambda x, w, b: normalised(x) * w + b, (real(3, 8), real(8), real(8)),
    ),
    "rms_norm": (
        nn.rms_norm, lambda x, w: x * w / np.sqrt((x**2).mean(-1, keepdims=True)),
        (real(3, 8), real(8)),
    ),
    "linear": (nn.linear, lambda x, w, b: x @ w + b, (real(2, 3, 4), real(4, 5), real(5))),
    "swiglu": (
        nn.swiglu, lambda x, g, u, d: (x @ g * inverse(x @ g) * (x @ u)) @ d,
        (real(3, 4), real(4, 6), real(4, 6), real(6, 4)),
    ),
    "mlp in blocks": (
        lambda x, u, d: nn.mlp(x, u, d, activation=nn.relu, rows=2),
        lambda x, u, d: np.maximum(x @ u, 0) @ d, (real(6, 4), real(4, 8), real(8, 4)),
    ),
    "rotary": (nn.rotary, turned, (real(2, 5, 6),)),
    "attention": (
        lambda q, k, v: nn.attention(q, k, v, causal=True), attended,
        (real(2, 4, 5, 6), real(2, 4, 5, 6), real(2, 4, 5, 3)),
    ),
    "attention of groups": (
        lambda q, k, v: nn.flash_attention(q, k, v, causal=True), attended,
        (real(2, 4, 5, 6), real(2, 2, 7, 6), real(2, 2, 7, 6)),
    ),
    "attention in chunks": (
        lambda q, k, v: nn.attention(q, k, v, causal=True), attended,
        (real(1, 2, 128, 4), real(1, 2, 128, 4), real(1, 2, 128, 4)),
    ),
    "embedding": (nn.embedding, lambda i, t: t[i], (np.array([[2, 0]], np.int32), real(3, 4))),
    "cross_entropy": (nn.cross_entropy, nll, (real(4, 5), LABELS)),
    "head and loss": (
        lambda x, w, y: nn.linear_cross_entropy(x, w, y, rows=2), lambda x, w, y: nll(x @ w, y),
        (real(4, 3), real(3, 5), LABELS),
    ),
    "einsum": (
        lambda x, y: ts.einsum("bsd,dn->bsn", x, y), lambda x, y: x @ y,
        (real(2, 3, 4), real(4, 5)),
    ),
    "batched matmul": (ts.matmul, np.matmul, (real(2, 1, 3, 4), real(5, 4, 2))),
    "matmul with a vector": (ts.matmul, np.matmul, (real(2, 3, 4), real(4))),
    "index": (
        lambda x: x[1, ..., None, ::-2], lambda x: x[1, ..., None, ::-2], (real(2, 3, 5),),
    ),
    "index by ids": (lambda x, i: x[:, i], lambda x, i: x[:, i], (real(2, 5), np.array([3, 0]))),
    "var": (
        lambda x: ts.var(x, 1, keepdims=True), lambda x: x.var(1, keepdims=True), (real(3, 4),),
    ),
    "stack": (lambda x, y: ts.stack([x, y], -1), lambda x, y: np.stack([x, y], -1),
              (real(2, 3), real(2, 3))),
    "split": (lambda x: ts.split(x, [1, 3], 1), lambda x: np.split(x, [1], 1), (real(2, 4),)),
    "one_hot": (lambda i: ts.one_hot(i, 4), lambda i: np.eye(4)[i], (np.array([1, 3]),)),
    "scatter_add": (
        lambda x, i, u: ts.scatter_add(x, i, u, 0),
        lambda x, i, u: x + np.array([[u[0, 0], 0], [u[1, 0], u[0, 1] + u[1, 1]]]),
        (real(2, 2), np.array([[0, 1], [1, 1]], np.int32), real(2, 2)),
    ),
    "divmod": (lambda x: sum(divmod(x, 0.75)) - divmod(2.0, abs(x) + 1)[1],
               lambda x: sum(divmod(x, 0.75)) - divmod(2.0, abs(x) + 1)[1], (real(6),)),
    "powers": (lambda x: 2.0**x - x**3 + abs(x) ** 0.5,
               lambda x: 2.0**x - x**3 + abs(x) ** 0.5, (real(6),)),
    "scan": (
        lambda x: ts.scan(lambda c, r: (c + r, c * r), ts.zeros((3,)), x),
        lambda x: (x.sum(0), (np.cumsum(x, 0) - x) * x), (real(4, 3),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_function_on_types(name: str) -> None:
    fn, formula, values = CASES[name]
    want = formula(*values)
    got = traced(fn, *values)
    for g, w in zip(got, want if isinstance(want, (list, tuple)) else [want], strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6)
        assert g.shape == np.shape(w)


def test_a_model_on_types_needs_no_values() -> None:
    model = nn.GPT(nn.GPTConfig(vocab=50_000, seq=128, d=4096, layers=2, heads=32))
    ids = plain(int32, (4, 128))
    g = graph.trace(model.loss, ids, ids)
    assert g.outputs[0].type.text == "f32[]"
    assert all(p._data is None for p in model.parameters().values())
    assert any(n.scope.endswith("blocks.1.mlp") for n in g.nodes)


def test_results_are_whole_unless_asked_otherwise() -> None:
    x = parse_type("f32[8@dp, 4]", MESH)
    assert graph.trace(ts.sum, x).outputs[0].type.text == "f32[]"
    assert graph.trace(ts.sum, x, reduce_partial=False).outputs[0].type.text == "f32[] +dp"
    other = parse_type("f32[8]", dist.Mesh(("q",), devices=2))
    with pytest.raises(ts.MeshError, match="trace: the arguments lie on 2 meshes"):
        graph.trace(lambda a, b: (a + 1.0, b + 1.0), x, other)
    with pytest.raises(ts.MeshError, match="<lambda>: results are on different meshes"):
        graph.trace(lambda a: (a + 1.0, dist.redistribute(ts.ones(8), other)), x)


# -- annotations ----------------------------------------------------------------------------------
def held(*pairs: Any, dtype: Any = bf16) -> Sizes:
    """Checks shapes against annotations, as the arguments a, b, … of a call."""
    sizes = Sizes()
    for name, (spec, shape) in zip("abcdef", pairs, strict=False):
        sizes.see(name, spec, shape, dtype)
    sizes.settle()
    return sizes


def test_annotations_bind_and_products_follow() -> None:
    spec = ts.Tensor["B", "3*D", 4, bf16]
    assert (held((spec, (5, 6, 4))).bound, held((spec, (5, 6, 4))).wrong) == ({"B": 5, "D": 2}, [])
    assert held((spec, (5, 7, 3)), dtype=f32).wrong == [
        ("a", "dtype is f32, not bf16"), ("a", "dim 2 (4) is 3, not 4"),
        ("a", "dim 1 ('3*D') is 7, no multiple of 3"),
    ]  # fmt: skip
    assert held((spec, (5,))).wrong == [("a", "has 1 dims (5,), not 3")]
    assert str(spec) == "Tensor['B', '3*D', 4, ts.bf16]"
    assert str(spec | None) == "Tensor['B', '3*D', 4, ts.bf16] | None"
    assert ts.Tensor[int32] == TensorSpec((), int32)
    # Later arguments bind names in earlier ones; a product of several names is still checked.
    qkv, heads = ts.Tensor["3*D_head*H"], ts.Tensor["H", "D_head"]
    assert held((qkv, (96,)), (heads, (4, 8))).wrong == []
    assert held((qkv, (96,)), (heads, (4, 9))).wrong == [
        ("a", "dim 0 ('3*D_head*H') is 96, not 108")
    ]
    assert held((qkv, (97,))).wrong == [("a", "dim 0 ('3*D_head*H') is 97, no multiple of 3")]
    assert held((ts.Tensor["A*B", "A*C", "B*C"], (6, 10, 14))).wrong == [
        ("a", f"dim {i} ({dim!r}) is {n}, which no sizes of the names make")
        for i, (dim, n) in enumerate([("A*B", 6), ("A*C", 10), ("B*C", 14)])
    ]
    assert held((ts.Tensor["D*D"], (12,))).wrong == [
        ("a", "dim 0 ('D*D') is 12, which no size makes")
    ]


def test_annotated_says_what_brackets_say() -> None:
    @ts.function
    def rows(
        x: Annotated[ts.Tensor, "B", "D", f32],
        bias: Annotated[ts.Tensor, "D"] | None = None,
        more: dict[str, Annotated[ts.Tensor, "D"]] = {},  # noqa: B006
    ) -> Annotated[ts.Tensor, "B"]:
        return x.sum(1)

    assert rows(ts.ones((2, 3)), None, {"a": ts.ones((3,))}).shape == (2,)
    with pytest.raises(ts.ShapeError, match=r"annotated Tensor\['D'\] \| None") as said:
        rows(ts.ones((2, 3)), ts.ones((4,)), {"a": ts.ones((5,))})
    assert "more.a: dim 0 ('D') is 5, not 3" in str(said.value).replace(" :", ":")


NAMES = st.sampled_from(["A", "B", "C"])
PRODUCTS = st.lists(NAMES | st.sampled_from(["1", "2", "3"]), min_size=1, max_size=3).map("*".join)


@given(st.lists(st.tuples(PRODUCTS, st.integers(0, 12)), min_size=1, max_size=5), st.randoms())
def test_products_hold_exactly_where_sizes_exist(dims: Any, rng: Any) -> None:
    """Compares with a search of all sizes. The order of the arguments has no effect."""

    def holds(at: dict[str, int]) -> bool:
        return all(
            math.prod(at.get(w, 0) if w.isalpha() else int(w) for w in dim.split("*")) == n
            for dim, n in dims
        )

    exists = any(
        holds(dict(zip("ABC", sizes, strict=True)))
        for sizes in itertools.product(range(13), repeat=3)
    )
    for _ in range(2):
        got = held(*((ts.Tensor[dim], (n,)) for dim, n in dims))
        assert (not got.wrong) == exists
        if exists:
            at = got.bound
            assert all(
                math.prod(at[w] if w.isalpha() else int(w) for w in dim.split("*")) == n
                for dim, n in dims
                if all(w in at for w in dim.split("*") if w.isalpha())
            )
        rng.shuffle(dims)


@pytest.mark.parametrize("bad", [1.5, "B S", "", True, None, ("B", "*")])
def test_what_is_no_annotation(bad: Any) -> None:
    with pytest.raises(ts.UsageError, match="neither a dim nor a dtype"):
        ts.Tensor[bad]


ROW, TABLE = ts.Tensor["B", "D"], ts.Tensor["D", "V"]


def test_annotations_are_read_one_by_one() -> None:
    """A name that only a type checker knows does not invalidate the other annotations."""

    @ts.function
    def scores(x: ROW, w: TABLE, note: Unknown = None) -> ts.Tensor:  # type: ignore[name-defined] # noqa: F821
        return x @ w

    types = plain(f32, (2, 3)), plain(f32, (3, 5))
    assert graph.trace(scores, *types).outputs[0].type.shape == (2, 5)
    with pytest.raises(ts.ShapeError, match="dim 0 \\('D'\\) is 4, not 3"):
        graph.trace(scores, types[0], plain(f32, (4, 5)))


# -- trees ----------------------------------------------------------------------------------------
Pair = namedtuple("Pair", "left right")


class Leaf(nn.Module):
    def __init__(self, value: Any) -> None:
        self.value, self.note = value, None


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"b": 1, "a": [2, (3, None)]}, ["b", "a.0", "a.1.0"]),
        (Pair(1, {"x": 2}), ["0", "1.x"]),
        ([], []),
        (None, []),
        (5, [""]),
        ({"m": (), 3: [[1]]}, ["3.0.0"]),
    ],
)
def test_trees_come_apart_and_together(tree: Any, names: list[str]) -> None:
    leaves, spec = flatten(tree)
    assert unflatten(spec, leaves) == tree
    assert type(unflatten(spec, leaves)) is type(tree)
    assert [path_name(p) for p in paths(tree)] == names
    assert hash(spec) == hash(flatten(tree)[1])
    assert tree_map(lambda x: x, tree) == tree


def test_modules_and_tensors_are_trees_too() -> None:
    inner = {"w": dist.tensor((2,)), "v": dist.tensor((3,))}
    leaves, spec = flatten({"m": Leaf(inner), "n": 1})
    assert leaves[0] is inner["w"] and leaves[1] is inner["v"] and leaves[2:] == [1]
    back = unflatten(spec, leaves)
    assert isinstance(back["m"], Leaf)
    assert back["m"].value["v"] is inner["v"]
    assert back["m"].note is None


def test_trees_are_matched_by_path() -> None:
    assert tree_map(lambda x, y: x - y, {"a": 5, "b": 7}, {"b": 1, "a": 2}) == {"a": 3, "b": 6}
    with pytest.raises(ts.UsageError, match="missing : b\n  extra   : c"):
        tree_map(lambda x, y: x, {"a": 1, "b": 2}, {"a": 1, "c": 2})


# -- strategies -----------------------------------------------------------------------------------
TP = dist.strategy("tensor_parallel")
WEIGHTS = {
    "embed.weight": ("[64@tp, 32]", "[64@tp, 32@dp]"),
    "position": ("[16, 32]", "[16, 32@dp]"),
    "blocks.block.norm_1.weight": ("[2, 32]", "[2, 32@dp]"),
    "blocks.block.norm_1.bias": ("[2, 32]", "[2, 32@dp]"),
    "blocks.block.attention.qkv": ("[2, 32, 3, 4@tp, 8]", "[2, 32@dp, 3, 4@tp, 8]"),
    "blocks.block.attention.out": ("[2, 4@tp, 8, 32]", "[2, 4@tp, 8, 32@dp]"),
    "blocks.block.norm_2.weight": ("[2, 32]", "[2, 32@dp]"),
    "blocks.block.norm_2.bias": ("[2, 32]", "[2, 32@dp]"),
    "blocks.block.mlp.up": ("[2, 32, 64@tp]", "[2, 32@dp, 64@tp]"),
    "blocks.block.mlp.down": ("[2, 64@tp, 32]", "[2, 64@tp, 32@dp]"),
    "norm.weight": ("[32]", "[32@dp]"),
    "norm.bias": ("[32]", "[32@dp]"),
    "head": ("[32, 64@tp]", "[32@dp, 64@tp]"),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_layouts_of_a_gpt(stage: int) -> None:
    """Tensor parallelism alone (stage 0), and with each stage of ZeRO over dp."""
    plan = TP + dist.strategy("zero_redundancy_optimizer", stage=stage) if stage else TP
    config = nn.GPTConfig(vocab=64, seq=16, d=32, layers=2, heads=4, hidden=64)
    model = dist.place(nn.GPT(config), plan, MESH)
    types = {k: p.type for k, p in model.parameters().items()}
    assert {k: p.layout for k, p in model.parameters().items()} == {
        k: whole if stage < 3 else split for k, (whole, split) in WEIGHTS.items()
    }
    for needed, find in ((2, plan.gradient), (1, plan.optimizer)):
        found = {k: find(k, t.replicated()).text.removeprefix("f32") for k, t in types.items()}
        assert found == {k: w[stage >= needed] for k, w in WEIGHTS.items()}
    assert plan.batch(plain(int32, (8, 16), MESH)).text == (
        "i32[8@dp, 16]" if stage else "i32[8, 16]"
    )


# -- inspection -----------------------------------------------------------------------------------
def test_what_inspect_says() -> None:
    t = dist.tensor((6, 8), "[6@tp, 8] +dp", MESH, name="w")
    found = dist.inspect(t)
    assert (
        str(found)
        == """\
w : f32[6@tp, 8] +dp
  global    (6, 8), 192 bytes
  mesh      dp=2 tp=4
  a device  (2, 8), 64 bytes
  dim 0     split over tp
  partial   a sum over dp is still to be completed
6 × 8 on dp × tp mesh, 2 × 4 · 4 different slices, each on 2 devices
┌──────┬────────────┬─────────────┬────────────┬────────────┐
│      │    tp 0    │    tp 1     │    tp 2    │    tp 3    │
├──────┼────────────┼─────────────┼────────────┼────────────┤
│ dp 0 │ 0: [:2, :] │ 1: [2:4, :] │ 2: [4:, :] │ 3: nothing │
├──────┼────────────┼─────────────┼────────────┼────────────┤
│ dp 1 │ 4: [:2, :] │ 5: [2:4, :] │ 6: [4:, :] │ 7: nothing │
└──────┴────────────┴─────────────┴────────────┴────────────┘"""
    )
    assert found.holds[1] == (((2, 4),), ((0, 8),))
    with pytest.raises(ts.UsageError, match="inspect: what is looked at cannot be"):
        dist.inspect(graph.trace(ts.sum, t))  # type: ignore[call-overload]


def test_inspect_of_pieces_copies_and_many_devices() -> None:
    text = str(dist.inspect(dist.tensor((12,), "[(3·4@tp)]", MESH)))
    assert "  copies    replicated over dp\n" in text
    assert "│ 1: [1:2+5:6+9:10] │" in text
    large = str(dist.inspect(dist.tensor((64,), "[64@dp]", dist.Mesh(("dp",), devices=64))))
    assert large.endswith("  ... and 56 devices more\n  64 different parts on 64 devices")
    assert (
        str(dist.inspect(dist.tensor((2, 2)))) == "tensor : f32[2, 2]\n  global    (2, 2), 16 bytes"
    )
