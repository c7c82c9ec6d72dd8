"""Inspection with NumPy as the engine: origins of NaN, statistics, comparisons, stages, pictures.

tests/mesh/test_observe.py has the same tests on a mesh.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import debug, dist, graph, nn
from tessera.core.layout import plain
from tessera.observe.compare import Comparison
from tessera.observe.compare_runs import RunComparison
from tests.core.numpy_engine import Oracle
from tests.core.test_surface import NONSENSE, outcome

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
X = np.linspace(-1, 95, 64).reshape(8, 8).astype("f4")


def at(fn: Callable[..., Any], line: int) -> str:
    """The location `file:line` of the line that is `line` lines below `def fn`."""
    return f"test_observe.py:{fn.__code__.co_firstlineno + line}"


# ---- NaN ---------------------------------------------------------------------------------------
def test_the_first_infinity_is_named_and_where_it_became_nan(oracle: Oracle) -> None:
    def f(x: ts.Tensor) -> ts.Tensor:
        with ts.named_scope("mlp"):
            y = ts.exp(x * 2.0)
        return ts.sum(y - y)

    found = debug.nan_origin(f, ts.tensor(X, mesh=MESH, layout="[8@dp, 8@tp]"))
    assert found is not None and (found.loc, found.scope) == (at(f, 2), "mlp")
    assert str(found) == (
        f"""\
exp makes an infinity of finite operands
  node     : %3 = exp %2 : f32[8@dp, 8@tp]
  at       : {at(f, 2)}
  scope    : mlp
  holds    : 34 inf of 64, the others 0.1353 to 3.272e+37
  operand  : %2 = mul %0 %1 : f32[8@dp, 8@tp]
             -2 to 190; made at {at(f, 2)}
  then NaN : %4 = sub %3 %3 : f32[8@dp, 8@tp]
             34 NaN of 64, the others 0 to 0; made at {at(f, 3)}"""
    )


def test_an_origin_in_a_loop_is_a_iteration(oracle: Oracle) -> None:
    def body(c: ts.Tensor, row: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        c = c + ts.sum(row)
        return c, ts.sqrt(300.0 - c)

    def f(x: ts.Tensor) -> ts.Tensor:
        return ts.sum(ts.scan(body, ts.tensor(70.0), x)[1])

    found = debug.nan_origin(f, X)
    sums = 300 - (70 + np.cumsum(X.sum(1)))
    iteration = int(np.argmax(sums < 0))
    assert found is not None and str(found) == (
        f"""\
sqrt makes NaN of finite operands
  node    : %6 = sqrt %5 : f32[]
  at      : {at(body, 2)}
  in      : iteration {iteration + 1} of 8, loop at {at(f, 1)}
  holds   : 1 NaN of 1
  operand : %5 = sub %4 %3 : f32[]
            {sums[iteration]:.4g} to {sums[iteration]:.4g}; made at {at(body, 2)}"""
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_what_a_iteration_hands_on_is_followed_to_the_iteration_that_made_it(
    oracle: Oracle, reverse: bool
) -> None:
    def body(c: ts.Tensor, x: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
        return c * 0.5 + ts.log(x), c - c

    def f(xs: ts.Tensor) -> ts.Tensor:
        return ts.scan(body, ts.tensor(1.0), xs, reverse=reverse)[1]

    found = debug.nan_origin(f, np.array([1, 2, 0, 3, 4, 5], "f4"))
    assert found is not None and found.node.op == "log" and found.loc == at(body, 1)
    assert [i for _, i in found.first.iterations] == [2]
    assert found.became_nan is not None and found.became_nan.node.op == "sub"
    assert [i for _, i in found.became_nan.iterations] == [1 if reverse else 3]


def test_the_op_within_a_while_loop_is_named(oracle: Oracle) -> None:
    found = debug.nan_origin(
        lambda x: ts.while_loop(lambda v: ts.isfinite(v), lambda v: v * v, x), ts.tensor(2.0)
    )
    assert str(found).startswith("mul makes an infinity of finite operands")


def test_what_has_no_elements_is_no_origin(oracle: Oracle) -> None:
    empty = np.zeros((0, 3), "f4")
    assert debug.nan_origin(lambda x: ts.log(x), empty) is None
    found = debug.nan_origin(lambda x: ts.mean(ts.exp(x)) + 1.0, empty)
    assert found is not None and str(found).startswith("full is NaN\n")  # 0 / 0


@pytest.mark.parametrize("result", [float("nan"), np.float32("nan"), np.array([[0.0, np.nan]])])
def test_results_that_are_no_tensors_count(oracle: Oracle, result: Any) -> None:
    found = debug.nan_origin(lambda x: (x * 2.0, result), X)
    assert found is not None and "holds NaN already" in str(found)
    same = debug.compare(lambda x: (x, result), lambda x: (x, result), X)
    part = debug.compare(lambda x: (x, result), lambda x: (x, 1.0 - 0.0 * X[0, 0]), X)
    assert same.same and not part.same


def test_loops_in_loops(oracle: Oracle) -> None:
    def inner(c: ts.Tensor, x: ts.Tensor) -> tuple[ts.Tensor, Any]:
        return c + ts.rsqrt(x), ()

    def outer(c: ts.Tensor, row: ts.Tensor) -> tuple[ts.Tensor, Any]:
        return ts.scan(inner, c, row)[0], ()

    x = np.ones((3, 4), "f4")
    x[1, 2] = 0
    found = debug.nan_origin(lambda x: ts.scan(outer, ts.tensor(0.0), x)[0], x)
    assert found is not None and found.node.op == "rsqrt" and found.loc == at(inner, 1)
    assert [i for _, i in found.first.iterations] == [1, 2]


def test_an_infinity_that_is_written_down_is_no_origin(oracle: Oracle) -> None:
    def f(x: ts.Tensor, least: float) -> ts.Tensor:
        m = ts.where(x > least, x, float("-inf"))
        e = m - ts.max(m, dim=-1, keepdims=True)
        return ts.sum(ts.exp(e))

    assert debug.nan_origin(f, X, -9.0) is None
    assert debug.nan_origin(f, X, 90.0) is not None  # rows that are masked completely
    found = debug.nan_origin(f, X, 1e9)
    assert found is not None and found.loc == at(f, 2) and found.became_nan is None
    assert str(found).startswith("sub makes NaN of infinities\n")


def test_a_bad_input_is_the_origin_and_a_guarded_one_is_none(oracle: Oracle) -> None:
    x = np.array([1.0, np.nan], "f4")
    found = debug.nan_origin(lambda scale: ts.sum(scale * 2.0), x)
    assert str(found) == (
        "input 'scale' holds NaN already\n"
        '  node  : %0 = input "scale" : f32[2]\n'
        "  holds : 1 NaN of 2, the others 1 to 1"
    )
    guarded = debug.nan_origin(lambda x: ts.where(x > 0, ts.log(x), 0.0), np.array([0.0, 1.0]))
    assert guarded is None


def test_a_gradient_has_an_origin_too(oracle: Oracle) -> None:
    def f(w: ts.Tensor) -> ts.Tensor:
        loss = ts.sum(ts.sqrt(w))
        return ts.grad(loss, w)

    found = debug.nan_origin(f, ts.tensor([4.0, 0.0]))
    assert found is not None and found.loc == at(f, 1)


def test_the_call_leaves_everything_as_it_was(oracle: Oracle) -> None:
    ts.seed(3)
    state = {"n": ts.tensor(1.0)}
    before = ts.random.state(), state["n"]

    def f(state: dict[str, ts.Tensor]) -> ts.Tensor:
        if state["n"] > 0:  # a read of a value
            state["n"] = state["n"] + 1.0
        return ts.log(ts.random.uniform((4,)) - 2.0) * state["n"]

    found = debug.nan_origin(f, state)
    assert found is not None and found.node.op == "log"
    assert (ts.random.state(), state["n"]) == before


def test_what_has_no_values_is_refused(oracle: Oracle) -> None:
    with pytest.raises(ts.UsageError, match="argument 'x' is a type, which has no values"):
        debug.nan_origin(lambda x: x, plain(ts.f32, (2,)))
    with pytest.raises(ts.UsageError, match="a function is being recorded here"):
        graph.trace(lambda x: debug.nan_origin(ts.exp, x), plain(ts.f32, (2,)))


# ---- comparisons -------------------------------------------------------------------------------
def test_two_functions_part_at_a_node(oracle: Oracle) -> None:
    def f(x: ts.Tensor) -> ts.Tensor:
        with ts.named_scope("a"):
            y = ts.exp(x * 0.1)
        with ts.named_scope("b"):
            return ts.sum(y, dim=0) * 2.0

    def g(x: ts.Tensor) -> ts.Tensor:
        with ts.named_scope("a"):
            y = ts.exp(x * 0.1)
        with ts.named_scope("b"):
            return ts.sum(y * 1.0, dim=0) * 2.5

    x = np.log(np.array([[1.0], [2.0], [1.0]], "f4")) * 10
    found = debug.compare(f, g, x)
    assert isinstance(found, Comparison) and not found.same
    assert str(found) == (
        f"""\
they differ first at mul
  a  : %6 = mul %4 %5 : f32[1]  # {at(f, 4)}  b
  b  : %8 = mul %6 %7 : f32[1]  # {at(g, 4)}  b
  by : 2, 0.2 of the largest value; at [0] 8 and 10
  of : 5 pairs of nodes compared to 0.0001 of the largest value, 1 differ; 0 only in a, 1 only in b

scope   nodes  differ  absolute  relative
(none)      1       0         0         0
a           2       0         0         0
b           2       1         2       0.2"""
    )
    again = debug.compare(f, f, x, bitwise=True)
    assert again.same and str(again).startswith("the same\n  5 pairs of nodes compared bit by bit;")
    assert debug.compare(f, g, x, rtol=0.3).same


def test_results_are_compared_whatever_they_are_made_by(oracle: Oracle) -> None:
    rows: list[tuple[Any, Any, bool]] = [
        (lambda x: x.sum(), lambda x: x.mean(), False),
        (lambda x: ts.tanh(x), lambda x: ts.tanh(x) * 1000.0, False),
        (lambda x: ts.maximum(x - 2.0, 0.0), lambda x: x - 2.0, False),
        (lambda x: x.sum(0), lambda x: ts.broadcast_to(x.sum(0), (2, 8)), False),
        (lambda x: ts.zeros(3), lambda x: ts.ones(3), False),
        (lambda x: (x, x * 2.0), lambda x: x, False),
        (lambda x: x.sum(), lambda x: (x * 1.0).sum(), True),
        (lambda x: x.to("bf16"), lambda x: x, True),
        (lambda x: x, lambda x: x, True),
    ]
    for i, (f, g, same) in enumerate(rows):
        found = debug.compare(f, g, X)
        assert isinstance(found, Comparison) and found.same == same, i
        assert str(found).startswith("the same") == same, i
    apart = debug.compare([{"step": 0, "loss": 1.0}], [{"step": 1, "loss": 2.0}])
    assert not apart.same and str(apart).startswith("they have no step in common")


def test_the_same_function_on_two_meshes(oracle: Oracle) -> None:
    def f(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        def body(c: ts.Tensor, row: ts.Tensor) -> tuple[ts.Tensor, Any]:
            return ts.tanh(c @ w), row * 2.0

        c, _ = ts.scan(body, x @ w, ts.tensor(X))
        return ts.mean(c * c)

    def on(n: int, scale: float = 1.0) -> Any:
        mesh = dist.Mesh(("dp",), devices=n)
        w = np.eye(8, dtype="f4") * scale
        given = [ts.tensor(X, mesh=mesh, layout="[8@dp, 8]"), ts.tensor(w, mesh=mesh)]
        return f, given

    alike = debug.compare(on(1), on(8))
    assert isinstance(alike, Comparison) and alike.same and len(alike.pairs) > 6
    assert {p.a.op for p in alike.pairs} >= {"contract", "tanh", "sum"}
    other = debug.compare(on(1), on(8, 0.5))
    assert isinstance(other, Comparison) and other.first is not None
    assert other.first.text_a.startswith('%1 = input "w"')


def test_recorded_graphs_with_their_values(oracle: Oracle) -> None:
    g = graph.trace(lambda x: ts.exp(x) * 2.0, plain(ts.f32, (3,)))
    x, y = np.zeros(3, "f4"), np.array([0, 0, 1], "f4")
    found = debug.compare((g, [x]), (g, [y]))
    assert isinstance(found, Comparison) and found.first is not None
    assert (found.first.a.op, found.first.at, found.first.values) == ("input", (2,), (0.0, 1.0))
    with pytest.raises(ts.UsageError, match="a is a graph of 1 inputs with values"):
        debug.compare((g, [x, x]), (g, [y]))
    with pytest.raises(ts.UsageError, match=r"b got f32\[2\] for its input"):
        debug.compare((g, [x]), (g, [y[:2]]))


def test_training_runs_part_at_a_step(tmp_path: Path) -> None:
    for name, third in (("a", 1.0), ("b", 1.5)):
        (tmp_path / name).mkdir()
        lines = [
            f'{{"step": {i}, "loss": {loss}, "step_s": {i + third}}}\n'
            for i, loss in enumerate([3.0, 2.0, third, 0.5])
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    found = debug.compare(tmp_path / "a", str(tmp_path / "b" / "metrics.jsonl"))
    assert isinstance(found, RunComparison) and found.first is not None
    assert (found.first.name, found.first.first, found.first.values) == ("loss", 2, (1.0, 1.5))
    assert str(found) == (
        """\
they differ first at step 2, in loss: 1.0 and 1.5
  4 steps compared to 0.0001 of the value; 0 only in a, 0 only in b

metric  steps  differ  first  absolute  relative
loss        4       1      2       0.5    0.3333"""
    )
    assert debug.compare(tmp_path / "a", tmp_path / "a", bitwise=True).same
    with pytest.raises(ts.UsageError, match="No such file"):
        debug.compare(tmp_path / "a", tmp_path / "none")
    (tmp_path / "bad.jsonl").write_text('{"step": 0}\n[1]\n')
    with pytest.raises(ts.UsageError, match=r"line 2 of .* is no row"):
        debug.compare(tmp_path / "a", tmp_path / "bad.jsonl")


def test_rows_of_other_kinds(oracle: Oracle) -> None:
    a: list[dict[str, Any]] = [{"step": 0, "loss": float("nan"), "phase": "warm"}, {"step": 2}]
    b: list[dict[str, Any]] = [{"step": 0, "loss": float("nan"), "phase": "cold"}, {"step": 5}]
    found = debug.compare(a, b)
    assert isinstance(found, RunComparison) and found.first is not None
    assert (found.first.name, found.only_a, found.only_b) == ("phase", 1, 1)
    with pytest.raises(ts.UsageError, match="a row of a run cannot be"):
        debug.compare([{"loss": 1}], b)


# ---- stages and pictures -----------------------------------------------------------------------
def test_a_trace_shows_its_stages_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: ts.Tensor) -> ts.Tensor:
        y = ts.exp(x) * 1.0
        return ts.sum(y + ts.exp(x), dim=1)

    x = dist.tensor((8, 8), "[8@dp, 8@tp]", MESH)
    made = graph.trace(f, x)
    assert isinstance(made, graph.Graph) and list(made.stages) == ["recorded", "simplified"]
    assert graph.parse(made.text).text == made.text == made.stages["recorded"].text
    assert made.stages["simplified"].text == graph.simplify(made).text
    assert made.side_by_side(120) == (
        """\
    recorded                                             simplified
────────────────────────────────────────────────────────────────────────────────────────────────────
    graph f v1 mesh dp=2 tp=4                            graph f v1 mesh dp=2 tp=4
    %0 = input "x" : f32[8@dp, 8@tp]                     %0 = input "x" : f32[8@dp, 8@tp]
-   %1 = exp %0 : f32[8@dp, 8@tp]
-   %2 = full dtype=f32 shape=() value=1.0 : f32[]
-   %3 = mul %1 %2 : f32[8@dp, 8@tp]
    %4 = exp %0 : f32[8@dp, 8@tp]                        %1 = exp %0 : f32[8@dp, 8@tp]
    %5 = add %3 %4 : f32[8@dp, 8@tp]                     %2 = add %1 %1 : f32[8@dp, 8@tp]
    %6 = sum %5 dims=(1,) : f32[8@dp] +tp                %3 = sum %2 dims=(1,) : f32[8@dp] +tp
    %7 = all_reduce %6 axes=("tp",) : f32[8@dp]          %4 = all_reduce %3 axes=("tp",) : f32[8@dp]
    return %7                                            return %4"""
    )
    made.show()
    assert "recorded" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 79, 200])
def test_stages_keep_to_the_width_and_lose_no_line(width: int) -> None:
    model = nn.GPT(nn.GPTConfig(vocab=16, seq=8, d=16, layers=1, heads=2))
    made = graph.trace(model.loss, plain(ts.int32, (2, 8)), plain(ts.int32, (2, 8)))
    text = made.side_by_side(width)
    assert max(map(len, text.splitlines())) <= width
    flat = "".join(text.split())
    for g in made.stages.values():
        assert all(f"%{i}=" in flat for i in range(len(g.nodes)))
    with pytest.raises(ts.UsageError, match="width cannot be 10"):
        made.side_by_side(10)


def test_three_stages_keep_their_rows() -> None:
    from tessera.show.stages import stages_text

    texts = ["%0 = input \"x\" : f32[2]\n  %1 = exp %0 : f32[2]\n  return %1",
             "%0 = input \"x\" : f32[2]\n  %1 = neg %0 : f32[2]\n  return %1",
             "%0 = input \"x\" : f32[2]\n  %1 = exp %0 : f32[2]\n  return %1"]  # fmt: skip
    graphs = {f"s{i}": graph.parse(f"graph f  v1\n  {t}") for i, t in enumerate(texts)}
    lines = stages_text(graphs, 120).splitlines()
    assert [line.split() for line in lines[4:]] == [
        ["-", "%1", "=", "exp", "%0", ":", "f32[2]"],
        ["-", "%1", "=", "neg", "%0", ":", "f32[2]"],
        ["+", "%1", "=", "exp", "%0", ":", "f32[2]"],
        ["return", "%1"] * 3,
    ]


def test_a_picture_of_who_holds_what() -> None:
    found = str(dist.inspect(dist.tensor((6, 8), "[6@tp, 8] +dp", MESH, name="w")))
    assert found.splitlines()[6:] == [
        "6 × 8 on dp × tp mesh, 2 × 4 · 4 different slices, each on 2 devices",
        "┌──────┬────────────┬─────────────┬────────────┬────────────┐",
        "│      │    tp 0    │    tp 1     │    tp 2    │    tp 3    │",
        "├──────┼────────────┼─────────────┼────────────┼────────────┤",
        "│ dp 0 │ 0: [:2, :] │ 1: [2:4, :] │ 2: [4:, :] │ 3: nothing │",
        "├──────┼────────────┼─────────────┼────────────┼────────────┤",
        "│ dp 1 │ 4: [:2, :] │ 5: [2:4, :] │ 6: [4:, :] │ 7: nothing │",
        "└──────┴────────────┴─────────────┴────────────┴────────────┘",
    ]


def test_what_is_too_large_to_draw_is_listed_and_counted() -> None:
    line = str(dist.inspect(dist.tensor((640,), "[640@dp]", dist.Mesh(("dp",), devices=8))))
    assert line.splitlines()[-3:] == [
        "  device 6   [480:560]", "  device 7   [560:]", "  8 different parts on 8 devices",
    ]  # fmt: skip
    mesh = dist.Mesh(("dp", "tp"), shape=(64, 8))
    large = str(dist.inspect(dist.tensor((64, 64), "[64@dp, 64]", mesh))).splitlines()
    assert large[-2:] == ["  ... and 504 devices more", "  64 different parts on 512 devices"]
    pieces = str(dist.inspect(dist.tensor((64, 2), "[(16·4@tp), 2]", MESH)))
    assert "  device 5   [1:2+5:6+… 16 pieces, :]\n" in pieces


# ---- nonsense ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["activations", "compare", "nan_origin", "statistics"])
def test_nonsense_is_answered_in_our_own_words(name: str, oracle: Oracle) -> None:
    fn = getattr(debug, name)
    x = ts.tensor(X)
    wrong = {}
    for bad in NONSENSE:
        for args in ((bad,), (x, bad), (bad, x), (ts.exp, bad), (ts.exp, ts.exp, bad), (bad, bad)):
            try:
                inspect.signature(fn).bind(*args)
            except TypeError:
                continue
            if why := outcome(lambda args=args: fn(*args)):  # type: ignore[misc]
                wrong[str(args)[:80]] = why
    assert not wrong
