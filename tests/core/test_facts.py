"""Properties that each op declares: true, complete, and declared in one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.core.dtypes import dtype_of
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.cost.liveness import Liveness
from tessera.cost.program import of_graph
from tessera.ir.graph.build import Builder
from tessera.ir.graph.oracle import evaluate
from tessera.ops.elementwise import unary
from tessera.ops.op import OPS, Inferred, Op
from tessera.ops.redistribute import CHANGES
from tessera.passes.plan import need_kept
from tessera.passes.simplify import simplify
from tests.core.table import ROWS, Row

SOURCE = Path(ts.__file__).parent
BY_OP: dict[str, list[Row]] = defaultdict(list)
for _row in ROWS:
    BY_OP[_row.op].append(_row)
every_op = pytest.mark.parametrize("op", BY_OP)


def results(row: Row, ins: list[Any]) -> list[np.ndarray[Any, Any]]:
    """The results of the row's op on `ins`, by NumPy."""
    b = Builder(row.op)
    args = [b.input(plain(dtype_of(x.dtype), x.shape)) for x in ins]
    node = b(row.op, *args, **row.attrs)
    if len(node.types) == 1 and not node.kind.many:
        return [np.asarray(x) for x in evaluate(b.graph([node]), ins)]
    items = [b("item", node, index=i) for i in range(len(node.types))]
    return [np.asarray(x) for x in evaluate(b.graph(items), ins)]


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


# -- what the elements of the result are ----------------------------------------------------------
def elementwise(row: Row) -> bool:
    """Returns whether a change of one input element changes that element of the result alone."""
    (out, *more) = results(row, list(row.ins))
    shapes = [x.shape for x in row.ins]
    try:
        fits = bool(shapes) and np.broadcast_shapes(*shapes) == out.shape
    except ValueError:
        return False
    if more or not fits or out.size < 2:
        return False
    whole = [np.array(np.broadcast_to(x, out.shape)) for x in row.ins]
    out = results(row, whole)[0]
    for at in (1, out.size // 2, out.size - 1):
        for x, given in zip(whole, row.ins, strict=True):
            x[...] = np.broadcast_to(given, out.shape)
            x.flat[0] = x.flat[at]
        want = out.copy()
        want.flat[0] = out.flat[at]
        if not same(results(row, whole)[0], want):
            return False
    return True


def places(row: Row) -> str:
    """Returns "moved" if each result holds all elements of the one argument, "chosen" if it holds
    some of them, for large and small values."""
    if len(row.ins) != 1 or not row.ins[0].size:
        return ""
    x = row.ins[0]
    count = np.arange(x.size)
    for order in (count, count[::-1], np.random.default_rng(0).permutation(count)):
        named = order.reshape(x.shape).astype(x.dtype)
        outs = results(row, [named])
        first = results(row, [count.reshape(x.shape).astype(x.dtype)])
        for out, plain_out in zip(outs, first, strict=True):
            inside = np.isin(plain_out, count).all() and plain_out.dtype == x.dtype
            if not inside or not same(out, order[plain_out.astype(int)].astype(x.dtype)):
                return ""
    whole = all(np.isin(count, out.astype(int)).all() for out in outs)
    return "moved" if whole else "chosen"


def seen(op: str) -> str:
    """The kind of the op's result elements, as its rows show it."""
    rows = BY_OP[op]
    if all(elementwise(r) for r in rows):
        copies = all(
            same(results(r, list(r.ins))[0], np.broadcast_to(r.ins[0], r.expect(*r.ins).shape))
            for r in rows
        )
        return "same" if copies else "computed"
    found = {places(r) for r in rows}
    if "" in found:
        return ""
    return "chosen" if "chosen" in found else "moved"


@every_op
def test_the_elements_of_a_result_are_what_the_op_says(op: str) -> None:
    assert OPS[op].elements == seen(op)


# -- linear ---------------------------------------------------------------------------------------
def floats(row: Row) -> list[int]:
    return [i for i, x in enumerate(row.ins) if x.dtype == np.float32]


def times(row: Row, factor: float, which: list[int]) -> list[Any]:
    ins = [x * np.float32(factor) if i in which else x for i, x in enumerate(row.ins)]
    return results(row, ins)


@pytest.mark.parametrize("op", [op for op in BY_OP if OPS[op].degree])
def test_an_op_that_says_it_is_linear_is(op: str) -> None:
    for row in BY_OP[op]:
        which = floats(row)
        if not which:
            continue
        once = results(row, list(row.ins))
        if once[0].dtype.kind != "f":  # a rounding cast
            continue
        match OPS[op].degree:
            case "each" | "joint":
                tries = [(which, 2.0)]
            case "product" | "alone":
                tries = [([i], 2.0) for i in which]
            case "quotient":
                tries = [(which[:1], 2.0), (which[1:], 0.5)]
            case _:
                raise AssertionError(op)
        for args, factor in tries:
            for x, y in zip(once, times(row, 2.0, args), strict=True):
                np.testing.assert_allclose(y, factor * x, rtol=1e-5, atol=1e-5)


# -- complete -------------------------------------------------------------------------------------
def test_every_op_says_why_its_bits_are_the_same() -> None:
    # A user's function declares elementwise dims by its index. Attention as one op is for GPUs,
    # whose kernels do not keep that level; fp8 is for theirs.
    refused = {name for name, op in OPS.items() if not op.mesh_invariance}
    assert refused == {"user", "attention", "attention_grad", "contract_fp8"}


def test_what_computes_or_moves_elements_says_where_its_result_lies() -> None:
    """The memory plan takes a buffer for an op that declares nothing. XLA allocates none for these,
    except for those that communicate."""
    silent = {name for name, op in OPS.items() if op.elements and op.memory == "buffer"}
    assert silent == CHANGES
    computes = {op.memory for op in OPS.values() if op.elements == "computed"}
    assert computes == {"cheap", "expensive", "moves"}
    made = {name for name, op in OPS.items() if op.memory == "created"}
    assert made == {"full", "iota"} and all(OPS[name].creates for name in made)


def test_an_op_with_graphs_among_its_attributes_says_so() -> None:
    """Passes, the verifier and the counts enter the bodies of these ops."""
    held = {"scan": "body", "cond": "yes no", "custom": "backward"}
    assert {name for name, op in OPS.items() if op.bodies} == set(held)
    assert all(set(words.split()) <= set(OPS[name].attrs.split()) for name, words in held.items())


def test_one_definition_says_all_of_an_op_that_computes_each_element() -> None:
    def local(c: Any, x: Any) -> Any:
        return c.xp.div(x, c.xp.add(c.xp.full((), 1.0, c.out.dtype), c.xp.abs(x)))

    try:
        unary("softsign", None, local=local)
        b = Builder("f")
        x = b.input(parse_type("f32[8@dp]", Mesh(("dp",), shape={"dp": 2})))
        graph = b.graph([b("sum", b("softsign", x), dims=(0,))])
        need_kept(graph)
        assert [n.op for n in Liveness(of_graph(graph)).held] == ["sum"]
        given = np.arange(-4, 4, dtype=np.float32)
        want = np.sum(given / (1 + np.abs(given)))
        np.testing.assert_allclose(evaluate(simplify(graph), [given])[0], want, atol=1e-6)
    finally:
        OPS.pop("softsign", None)


def test_an_op_that_says_nothing_is_taken_for_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Op("bare", lambda ins, attrs: Inferred(ins, ins), lambda c, x: x)
    monkeypatch.setitem(OPS, "bare", bare)
    b = Builder("f")
    x = b.input(plain(dtype_of(np.dtype("float32")), (8,)))
    node = b("bare", b("exp", x))
    graph = b.graph([b("sum", node, dims=(0,))])
    with pytest.raises(ts.UsageError, match="mesh_invariant: bare may add up"):
        need_kept(graph)
    live = Liveness(of_graph(graph))
    assert [n.op for n in live.held] == ["exp", "bare", "sum"]
    assert not bare.hands_on and not bare.degree and not bare.incidental


# -- nowhere else ---------------------------------------------------------------------------------
# Graphs consist of these three besides inputs: item, loop and branch.
STRUCTURE = {"item", "scan", "cond"}
# A transfer of a table of rounds has an `op` too: copy or add.
ROUNDS = {
    "ir/schedule/algorithms", "runtime/algorithms.py", "cost/collectives.py",
    "cost/collective_time.py",
    "runtime/kernels_gpu",  # the ops of kernels, which have their own names
}  # fmt: skip
# Collectives for which users choose tables, reduction kinds, steps of a layout change, and public
# functions, which modules list in `__all__`, TT-NN's too. The ops that kernels have.
OTHER = ROUNDS | {
    "core/reshard.py", "core/layout.py", "ir/graph/oracle.py", "runtime/fixed_order.py",
    "lang/math/functions.py", "lang/autodiff/linalg.py", "lang/math/shape.py",
    "lang/math/scatter.py",
    "lang/record/operands.py", "lang/math/operators.py", "lang/parallel/collectives.py",
    "interop/aten/", "lang/foreign/jax_rules", "runtime/jax_keys.py", "runtime/jaxprs.py",
    "ttnn/elementwise.py", "lang/program/kernel_trace.py",
    "lang/program/kernel_values.py",
}  # fmt: skip


def words(n: ast.AST) -> Iterator[str]:
    """Yields the words of the strings in `n`."""
    if isinstance(n, ast.Constant) and isinstance(n.value, str):
        yield from n.value.split()
    elif isinstance(n, ast.Tuple | ast.Set | ast.List):
        for e in n.elts:
            yield from words(e)
    elif isinstance(n, ast.Dict):
        for key in n.keys:
            yield from words(key) if key is not None else ()


def files(*but: str) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if not name.startswith(("ops/", *but)):
            yield name, ast.parse(file.read_text())


def compared(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields each op name that is compared with a node's `.op`, and its line."""
    for n in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(n, ast.Compare):
            sides = [n.left, *n.comparators]
        elif isinstance(n, ast.Match):
            cases = [p.value for c in n.cases for p in ast.walk(c) if isinstance(p, ast.MatchValue)]
            sides = [n.subject, *cases]
        if any(isinstance(s, ast.Attribute) and s.attr == "op" for s in sides):
            yield from ((n.lineno, w) for s in sides for w in words(s) if w in OPS)


def listed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields each collection of op names, except a module's `__all__`."""
    own = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign)
           and any(isinstance(t, ast.Name) and t.id == "__all__" for t in n.targets)]  # fmt: skip
    for n in ast.walk(tree):
        if n not in own and isinstance(n, ast.Tuple | ast.Set | ast.List | ast.Dict):
            found = list(words(n))
            known = [w for w in found if w in OPS]
            if len(known) > 1 and 2 * len(known) >= len(found):
                yield n.lineno, " ".join(found)


def test_no_file_asks_for_an_op_by_its_name() -> None:
    asked = [
        f"{name}:{line} {word}"
        for name, tree in files(*ROUNDS)
        for line, word in compared(tree)
        if word not in STRUCTURE
    ]
    assert not asked, "a fact about an op stands in the op (ops/op.py), or import the op's value"


def test_no_file_lists_names_of_ops() -> None:
    lists = [f"{name}:{line} {text}" for name, tree in files(*OTHER) for line, text in listed(tree)]
    assert not lists, "what ops have in common is a fact of each (ops/op.py)"


def test_both_searches_find_what_they_search() -> None:
    tree = ast.parse('if n.op == "exp" or n.op in ("log", "tanh"): F = {"sin": 1, "cos": 2}')
    assert [w for _, w in compared(tree)] == ["exp", "log", "tanh"]
    assert {text for _, text in listed(tree)} == {"log tanh", "sin cos"}
    chosen = ast.parse('match n.op:\n    case "erf": pass')
    assert [w for _, w in compared(chosen)] == ["erf"]
