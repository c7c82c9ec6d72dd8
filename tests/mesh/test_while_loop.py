"""`while_loop` against `jax.lax.while_loop`, in every layout, and on each device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, graph, op
from tessera.core.context import replaced
from tessera.core.layout import parse_type
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.text import parse, to_text
from tessera.ir.graph.verify import verify
from tessera.ir.schedule.schedule import Loop
from tessera.passes.plan import plan

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
LAYOUTS = ["[8, 8]", "[8@dp, 8]", "[8, 8@tp]", "[8@dp, 8@tp]", "[8@(dp,tp), 8]", "[8@tp, 8@dp]"]
DEVICES = np.arange(8, dtype=np.int32)


def powers(np_: Any, w: Any, x: Any, until: float, most: int, loop: Any) -> Any:
    """A power iteration: products, sums, a counter, a bool, and a carry that stays the same."""

    def going(s: Any) -> Any:
        return (s["change"] > until) & (s["turn"] < most)

    def turn(s: Any) -> Any:
        y = w @ s["x"]
        y = y / np_.sum(y * y) ** 0.5
        sums = s["sums"] + np_.sum(y * w)
        return {**s, "x": y, "change": np_.sum(np_.abs(y - s["x"])), "turn": s["turn"] + 1,
                "sums": sums}  # fmt: skip

    one = np_.zeros((), dtype=np_.float32 if np_ is jnp else ts.f32)
    none = np_.zeros((), dtype=np_.int32 if np_ is jnp else ts.int32)
    start = {"x": x, "change": one + 1.0, "turn": none, "sums": one, "rests": w}
    end = loop(going, turn, start)
    return end["x"], end["change"], end["turn"], end["sums"], end["rests"]


def ours(w: ts.Tensor, x: ts.Tensor, until: float, most: int) -> Any:
    return powers(ts, w, x, until, most, ts.while_loop)


@settings(max_examples=8)
@given(st.integers(0, 99), st.sampled_from(LAYOUTS), st.sampled_from(["[8]", "[8@dp]", "[8@tp]"]),
       st.sampled_from([0.0, 1e-3, 0.3, 9.0]), st.integers(0, 6),
       st.sampled_from(["fused", "stepped", "eager"]))  # fmt: skip
def test_as_jax_does(
    seed: int, layout: str, of_x: str, until: float, most: int, executor: str
) -> None:
    rng = np.random.default_rng(seed)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((8, 8), (8,)))
    want = powers(jnp, w, x, until, most, jax.lax.while_loop)
    given = ts.tensor(w, layout=layout, mesh=MESH), ts.tensor(x, layout=of_x, mesh=MESH)
    if executor == "eager":
        found = ours(*given, until, most)
    else:
        with replaced(executor=executor):
            found = ts.jit(ours)(*given, until, most)
    assert found[2].item() == int(want[2])
    for a, b in zip(found, want, strict=True):
        assert a.dtype.numpy == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a.numpy(), b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oracle_reads_it(layout: str) -> None:
    rng = np.random.default_rng(1)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((8, 8), (8,)))
    t = parse_type(f"f32{layout}", MESH)
    g = graph.trace(lambda w, x: ours(w, x, 0.1, 5), t, parse_type("f32[8]", MESH))
    verify(g)
    assert to_text(parse(to_text(g))) == to_text(g)
    s = plan(g)
    assert any(isinstance(step, Loop) for step in s.steps) == (layout != "[8, 8]")
    assert ts.schedule.parse(s.text).text == s.text
    want = powers(jnp, w, x, 0.1, 5, jax.lax.while_loop)
    for run in (evaluate, evaluate_blocks):
        for a, b in zip(run(g, [w, x]), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_promised_bits_do_not_depend_on_the_fold() -> None:
    rng = np.random.default_rng(2)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((8, 8), (8,)))
    found = set()
    with dist.deterministic():
        for mesh in (MESH, MESH.fold("dp=1"), MESH.fold("dp=1,tp=1")):
            for executor in ("fused", "stepped"):
                with replaced(executor=executor):
                    made = ts.jit(ours)(ts.tensor(w, layout="[8@dp, 8@tp]", mesh=mesh), x, 0.1, 9)
                found.add(b"".join(t.numpy().tobytes() for t in made))
    assert len(found) == 1


def own_turns(x: ts.Tensor, ranks: ts.Tensor) -> ts.Tensor:
    """Each device doubles its part as many times as its rank. A replicated carry becomes
    device-dependent through another one, an iteration later."""
    rank = ranks[0]
    _, y, _, late = ts.while_loop(
        lambda s: s[0] < rank,
        lambda s: (s[0] + 1, s[1] * 2.0, s[2] + rank, s[3] + s[2]),
        (0, x, 0, 0),
    )
    return y + late.to(ts.f32)


@pytest.mark.parametrize("onto", [None, "dp=1", "dp=1,tp=1"])
def test_each_device_of_a_local_body_goes_on_by_its_own_bool(onto: str | None) -> None:
    mesh = MESH if onto is None else MESH.fold(onto)
    x = np.ones((8, 3), np.float32)
    t = parse_type("f32[8@(dp,tp), 3]", mesh)
    late = np.array([r * r * (r - 1) // 2 for r in DEVICES])
    want = np.broadcast_to((2.0**DEVICES + late)[:, None], x.shape)
    body = op.kernel(own_turns)
    ranks = ts.tensor(DEVICES, mesh=mesh, layout="[8@(dp,tp)]")
    found = ts.jit(body)(ts.tensor(x, mesh=mesh, layout=t), ranks)
    np.testing.assert_array_equal(found.numpy(), want)
    g = graph.trace(body, t, ranks.type)
    for run in (evaluate, evaluate_blocks):
        np.testing.assert_array_equal(run(g, [x, DEVICES, *[np.int32(0)] * 3])[0], want)


def test_rows_of_vmap_stop_each_at_its_own_turn() -> None:
    def halved(x: Any) -> Any:
        return ts.while_loop(lambda v: v > 1.0, lambda v: v / 2.0, x)

    x = np.array([9.0, 0.5, 3.0], np.float32)
    want = jax.vmap(lambda x: jax.lax.while_loop(lambda v: v > 1.0, lambda v: v / 2.0, x))(x)
    np.testing.assert_array_equal(ts.vmap(halved)(ts.tensor(x)).numpy(), want)


def test_a_gradient_goes_past_it() -> None:
    """If its result is no float, or is passed through `stop_gradient`, as in JAX."""

    def fn(x: ts.Tensor) -> ts.Tensor:
        n = ts.while_loop(lambda n: n * ts.stop_gradient(x) < 10.0, lambda n: n + 1, ts.tensor(1))
        y = ts.while_loop(lambda v: v < 9.0, lambda v: v * x, ts.stop_gradient(x))
        return x**2 * n.to(ts.f32) + ts.stop_gradient(y)

    assert ts.jit(lambda x: ts.grad(fn(x), x))(ts.tensor(3.0)).item() == 24.0


def test_numbers_begin_a_carry() -> None:
    """Also in a loop over rows; and a device-dependent carry may end with one value for all."""
    n, total = ts.scan(lambda c, x: ((c[0] + 1, c[1] + x), ()), (0, ts.tensor(0.0)), ts.ones(3))[0]
    assert (n.item(), total.item()) == (3, 3.0)
    last = op.kernel(lambda x: ts.scan(lambda c, r: (ts.tensor(1.0), c), x[0], x)[1])
    x = ts.tensor(DEVICES.astype(np.float32), mesh=MESH, layout="[8@(dp,tp)]")
    np.testing.assert_array_equal(ts.jit(last)(x).numpy(), DEVICES)


def test_questions_about_a_program_pass_it_by() -> None:
    def fn(x: ts.Tensor) -> ts.Tensor:
        return ts.log(ts.while_loop(lambda v: v > 0.0, lambda v: v - 1.0, x))

    found = ts.debug.nan_origin(fn, ts.tensor(1.5))
    assert found is not None and found.first.node.op == "log"
    found = ts.debug.nan_origin(
        lambda x: ts.while_loop(lambda v: v < 9.0, lambda v: v / (v - v), x), ts.tensor(1.0)
    )
    assert found is not None and found.first.node.op == "div"  # in the iteration that creates it
    alike = ts.debug.compare(fn, fn, ts.tensor(1.0))
    assert alike.same


# -- structures ------------------------------------------------------------------------------------
def turned(loops: Any, zero: Any, rows: Any) -> list[Any]:
    """Loops whose bodies return a carry's keys in another order."""

    def step(c: Any, x: Any) -> Any:
        return {"c": c["c"] * 2, "h": c["h"] + x, "in": {"q": c["in"]["q"] - x, "p": c["c"]}}, None

    def turn(s: Any) -> Any:
        return {"b": s["b"] * 2, "i": s["i"] + 1, "a": s["a"] + 3}

    start = {"h": zero, "c": zero + 1, "in": {"p": zero, "q": zero}}
    last, _ = loops.scan(step, start, rows)
    end = loops.while_loop(lambda s: s["i"] < 3, turn, {"a": zero, "b": zero + 1, "i": zero})
    return [last["h"], last["c"], last["in"]["p"], last["in"]["q"], end["a"], end["b"], end["i"]]


@pytest.mark.parametrize("jitted", [False, True])
def test_the_keys_of_a_carry_may_come_in_another_order(jitted: bool) -> None:
    rows = np.arange(4, dtype=np.float32)
    want = turned(jax.lax, jnp.zeros(()), rows)
    ours = lambda x: turned(ts, ts.tensor(0.0), x)  # noqa: E731
    found = (ts.jit(ours) if jitted else ours)(ts.tensor(rows))
    assert [t.item() for t in found] == [float(t) for t in want]


def test_a_carry_keeps_the_order_that_it_came_in_with() -> None:
    body = lambda c, x: ({"a": c["a"] + x, "b": c["b"]}, None)  # noqa: E731
    last, _ = ts.scan(body, {"b": ts.tensor(0.0), "a": ts.tensor(0.0)}, ts.ones((3,)))
    assert [*last] == ["b", "a"] and last["a"].item() == 3.0


ZERO = ts.tensor(0.0)
OTHERS: list[tuple[Any, Any, str]] = [
    ((ZERO, ZERO), lambda c: [c[0], c[1]], "tuple, then list"),
    ((ZERO, ZERO), lambda c: (c[0],), "tuple of 2, then of 1"),
    ({"a": ZERO}, lambda c: {**c, "new": ZERO}, "dict of a, then of a, new"),
    ({"a": {"b": ZERO}}, lambda c: {"a": {"d": ZERO}}, "a: dict of b, then of d"),
    ({"a": ZERO, "b": (ZERO,)}, lambda c: {"b": ZERO, "a": ZERO}, "b: tuple, then tensor"),
    ({"a": ZERO, "b": None}, lambda c: {"b": ZERO, "a": ZERO}, "b: None, then tensor"),
    (
        {"a": ZERO, "b": (ZERO, ZERO)},
        lambda c: {"b": (ZERO, ts.ones((2,))), "a": ts.tensor(1)},
        "a: f32[], then i32[]; b.1: f32[], then f32[2]",
    ),
]


@pytest.mark.parametrize(("start", "body", "where"), OTHERS, ids=[r[2] for r in OTHERS])
def test_an_error_says_where_a_carry_differs(start: Any, body: Any, where: str) -> None:
    for call in (
        lambda: ts.scan(lambda c, x: (body(c), None), start, ts.ones((2,))),
        lambda: ts.while_loop(lambda c: ts.tensor(True), body, start),
    ):
        with pytest.raises(ts.ShapeError) as caught:
            call()
        assert f"  where  : {where}\n" in str(caught.value).replace("where :", "where  :")
