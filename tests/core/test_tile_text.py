"""Kernels of tiles: values, text, sizes, and the errors of texts."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.dtypes import f32
from tessera.core.errors import GraphError, ShapeError, TesseraError, UsageError
from tessera.ir.tile.body import Load, Loop, Op, Ref, Signal, Store, When
from tessera.ir.tile.index import Index, Test
from tessera.ir.tile.kernel import Kernel, with_sizes
from tessera.ir.tile.kernels import FLASH, MLP_UP, TEXTS
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse, to_text
from tessera.ir.tile.verify import faults

Array = Any


@pytest.mark.parametrize("name", TEXTS)
def test_examples_are_read_back(name: str) -> None:
    k = parse(TEXTS[name])
    assert k.name == name and to_text(k) == TEXTS[name] == str(k)
    for again in (parse(to_text(k)), pickle.loads(pickle.dumps(k)), copy.deepcopy(k)):
        assert again == k and hash(again) == hash(k) and again.types == k.types


def test_a_kernel_is_a_value_that_python_can_make() -> None:
    m, bm, i = Index("M"), Index("bm"), Index("i")
    made = Kernel(
        "twice", dims=(("M", 8),), tune=(("bm", 4),), grid=(("i", Index("M // bm")),),
        refs=(Ref("in", "x", f32, (m,), (bm,)), Ref("out", "y", f32, (m,), (bm,))),
        body=(Load("%0", "x", (i,)), Op("%1", "mul", ("%0", "2.50")), Store("y", (i,), "%1")),
    )  # fmt: skip
    assert str(made) == (
        "kernel twice  v1\n  dims M=8\n  tune bm=4\n  grid i=M//bm\n"
        "  in x : f32[M] tiles [bm]\n  out y : f32[M] tiles [bm]\n"
        "  %0 = load x[i]\n  %1 = mul %0 2.5\n  store y[i] = %1"
    )
    assert parse(str(made)) == made and str(made.types["%1"]) == "f32[4]"


def test_what_has_no_text_is_no_kernel() -> None:
    ref = Ref("in", "x", f32, (), ())
    with pytest.raises(ShapeError, match=r"has no dims\n  line : in x : f32\[\] tiles \[\]\n"):
        Kernel("k", refs=(ref,))
    with pytest.raises(ShapeError, match="a signal has no dims"):
        Kernel("k", mesh=(("x", 2),), signals=(Signal("got", ()),))
    with pytest.raises(GraphError, match=r"no statements\n  line : loop i in 0..2\n"):
        Kernel("k", body=(Loop((), "i", Index("0"), Index("2"), (), ()),))
    with pytest.raises(GraphError, match=r"no statements\n  line : when 1 > 0:\n"):
        Kernel("k", body=(When(Test("1 > 0"), ()),))
    one, two = (Load("%x", "x", (Index(i), Index("j")), (0, "%ids")) for i in "01")
    assert one == two


def test_spaces_comments_and_the_order_of_declarations_do_not_count() -> None:
    loose = """
    kernel   mlp_up v1   # ours

        in x : bf16 [M,K] tiles [ bm , bk ]
        in w : bf16[K, N] tiles [bk, bn]
        grid i = M // bm  j=N // (bn)
        tune bm=64 bn = 64 bk=64   # sizes
        dims M=256 K=256 N=256
        speed warps=4 stages=3
        in b : f32[N] tiles [bn]
        out y : bf16[M, N] tiles [bm, bn]
        %zero = full dtype=f32 shape=bm, bn value=0.0
        %dots = loop k in 0 .. K // bk carry %zero
              %x = load x[i, k]
              %w = load w[k,j]
              %part = dot  %x %w
              %next = add %zero %part
              next %next
        %b = load b[j]
        %across = row %b
        %sum = add %dots %across
        %act = gelu %sum
        %y = cast %act to=bfloat16
        store y[(i), j] = %y
    """
    assert to_text(parse(loose)) == MLP_UP.replace("value=0", "value=0.0")


def test_the_hash_is_that_of_what_changes_bits() -> None:
    k = parse(MLP_UP)
    assert with_sizes(k, warps=8).hash == k.hash != with_sizes(k, bk=32).hash
    assert with_sizes(k, warps=8) != k and len(k.hash) == 16


def test_with_sizes_changes_sizes_by_name() -> None:
    k = with_sizes(parse(FLASH), T=96, S=96, bq=32, bk=24, warps=8, D=np.int64(8))
    assert "T=96 S=96 D=8" in k.text and "tune bq=32 bk=24" in k.text and "warps=8" in k.text
    assert str(k.types["%s"]) == "f32[32, 24]" and faults(k) == ()
    assert with_sizes(k) == k


def test_with_sizes_refuses_what_does_not_fit() -> None:
    k = parse(MLP_UP)
    with pytest.raises(UsageError) as unknown:
        with_sizes(k, BM=128)
    assert str(unknown.value).splitlines()[0] == "with_sizes: mlp_up has no size 'BM'"
    assert "tune  : bm=64 bn=64 bk=64" in str(unknown.value)
    with pytest.raises(ShapeError) as odd:
        with_sizes(k, bm=96)
    assert str(odd.value) == (
        "tile: tiles of 96 do not divide 256\n"
        "  line : 6: in x : bf16[M, K] tiles [bm, bk]\n"
        "  dim  : M = 256\n"
        "  tile : bm = 96\n"
        "  fix  : make bm a size that divides 256, such as 32, 64, 128"
    )
    for size in (0, -1, 1.5, True, 2**31):
        with pytest.raises(UsageError, match="bm cannot be"):
            with_sizes(k, bm=size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a Kernel"):
        with_sizes("kernel", bm=1)  # type: ignore[arg-type]


# ---- expressions -------------------------------------------------------------------------------
@given(st.recursive(
    st.sampled_from(["i", "j", "bm", "0", "1", "7"]),
    lambda inner: st.tuples(
        inner, st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]), inner
    ).map(lambda t: f"{t[1]}({t[0]}, {t[2]})" if t[1].isalpha() else f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=12,
))  # fmt: skip
@settings(deadline=None)
def test_an_index_keeps_its_value_in_its_one_form(text: str) -> None:
    index, names = Index(text), {"i": 5, "j": 3, "bm": 4}
    assert Index(index.text) == index and " " not in index.text
    try:
        want = eval(text, {"min": min, "max": max}, dict(names))
    except ZeroDivisionError:
        with pytest.raises(GraphError, match="divides by zero"):
            index.value(names)
    else:
        assert index.value(names) == want


@pytest.mark.parametrize(
    "text",
    [
        "i + 1.5", "i / 2", "f(i)", "i.real", "x[i]", "i if j else k", "i ** 2", "~i", "+i", "True",
        "'a'", "", "i +", "lambda: 0", "i < 2", "i := 2", "%3", "i + %3", "(" * 300, "2**31",
        "max(i)", "min(i, j, 1)", "9999999999", "i\n+1", "ï", "__import__('os')",
    ],
)  # fmt: skip
def test_an_index_is_nothing_else(text: str) -> None:
    with pytest.raises(GraphError, match="is not an index"):
        Index(text)


@pytest.mark.parametrize("text", ["i", "i < f(2)", "i in j", "i is j", "%3 > 0", "not i", "", "1"])
def test_a_condition_compares_indices(text: str) -> None:
    with pytest.raises(GraphError, match="is not a condition"):
        Test(text)


def test_conditions_are_joined() -> None:
    test = Test("not (i<2 and(j == 1 or i*2>=j))")
    assert test.text == "not (i < 2 and (j == 1 or i*2 >= j))" and Test(test.text) == test
    assert test.value({"i": 2, "j": 1}) and not test.value({"i": 1, "j": 1})
    assert Test("0 <= i < 4").value({"i": 3})


# ---- generated kernels -------------------------------------------------------------------------
UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative, "abs": np.abs, "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)),
}  # fmt: skip
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


@st.composite
def kernels(draw: st.DrawFn) -> tuple[str, Callable[[Array], Array]]:
    """The text of a kernel of ops on each element, in loops and conditions, and what it computes
    of a whole array."""
    bm, bn = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3]))
    m, n = bm * draw(st.integers(1, 3)), bn * draw(st.integers(1, 3))
    lines = [
        f"kernel made  v1\n  dims M={m} N={n}\n  tune bm={bm} bn={bn}\n  grid i=M//bm j=N//bn",
        "  in x : f32[M, N] tiles [bm, bn]",
        "  out y : f32[M, N] tiles [bm, bn]",
        "  %0 = load x[i, j]",
    ]
    steps: list[tuple[str, Any, int]] = []  # op, operand, turns
    for number in range(1, draw(st.integers(1, 5)) + 1):
        last = f"%{number - 1}"
        turns = draw(st.integers(0, 2))
        pad, to = ("    ", f"%in{number}") if turns else ("  ", f"%{number}")
        if turns:
            lines.append(f"  %{number} = loop t{number} in 0..{turns} carry {last}")
        if draw(st.booleans()):
            op = draw(st.sampled_from(sorted(UNARY)))
            lines.append(f"{pad}{to} = {op} {last}")
            steps.append((op, None, turns or 1))
        else:
            op, by = draw(st.sampled_from(sorted(BINARY))), draw(st.integers(-3, 3)) / 2
            text = str(int(by)) if by == int(by) and draw(st.booleans()) else repr(by)
            lines.append(f"{pad}{to} = {op} {last} {text}")
            steps.append((op, by, turns or 1))
        if turns:
            lines.append(f"    next {to}")
    value = f"%{len(steps)}"
    if draw(st.booleans()):
        lines.append(
            f"  when i > 0: store y[i, j] = {value}\n  when i == 0: store y[i, j] = {value}"
        )
    else:
        lines.append(f"  store y[i, j] = {value}")

    def whole(x: Array) -> Array:
        for op, by, turns in steps:
            for _ in range(turns):
                x = UNARY[op](x) if by is None else BINARY[op](x, by)
        return x

    return "\n".join(lines), whole


@given(kernels(), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_generated_kernels_are_read_back_verified_and_computed(
    made: tuple[str, Callable[[Array], Array]], seed: int
) -> None:
    text, whole = made
    k = parse(text)
    assert to_text(k) == text and parse(to_text(k)) == k and faults(k) == ()
    x = np.random.default_rng(seed).normal(size=k.shape(k.ref("x"))).astype(np.float32)
    (y,) = evaluate(k, x)
    (exact,) = evaluate(k, x, wide=True)
    np.testing.assert_allclose(y, whole(x.astype(np.float64)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(exact, whole(x.astype(np.float64)), rtol=1e-12, atol=1e-12)


# ---- errors of texts ---------------------------------------------------------------------------
HEAD = "kernel k  v1\n  in x : f32[4] tiles [2]\n  out y : f32[4] tiles [2]\n"
LINES = [
    ("", "tile text, line 1: a kernel begins with its name"),
    ("kernel k  v2", "tile text, line 1: a kernel begins with its name"),
    ("kernel k  v1  mesh x", "tile text, line 1: expected sizes by name"),
    ("kernel k  v1\n  dims M=4.5", "tile text, line 2: M is not a whole number"),
    ("kernel k  v1\n  dims M=4\n\n  dims N=4", "tile text, line 4: dims is given twice"),
    ("kernel k  v1\n  in x f32[4]", "tile text, line 2: cannot read a reference"),
    ("kernel k  v1\n  sig got x", "tile text, line 2: cannot read a signal"),
    ("kernel k  v1\n  in x : f65[4] tiles [4]", "dtype 'f65' is not known"),
    ("kernel k  v1\n  dims if=4", "tile: 'if' is not a name"),
    ("kernel k  v1\n  dims M=4\n  tune M=4", "tile: the name 'M' is given twice"),
    ("kernel k  v1\n  dims M=0", "tile: M cannot be 0"),
    (HEAD + "  %0 = load x", "tile text, line 4: cannot read the statement"),
    (HEAD + "  store y[0] %0", "tile text, line 4: cannot read the statement"),
    (HEAD + "  %0 = load x[0]\n    %1 = neg %0",
     "tile text, line 5: it is indented by 4 spaces, its block by 2"),
    (HEAD + "  loop i in 0..2\n  store y[i] = %0",
     "tile text, line 4: no statements are indented below it"),
    (HEAD + "  loop i in 0\n    quiet", "tile text, line 4: cannot read a loop"),
    (HEAD + "  next %0", "tile text, line 4: next is outside of a loop"),
    (HEAD + "  loop i in 0..2\n    next 3", "tile text, line 5: cannot read next"),
    (HEAD + "  loop i in 0..2\n    next %0\n    quiet",
     "tile text, line 6: a statement follows next in its block"),
    (HEAD + "  when i > 0 store y[0] = %0", "tile text, line 4: a condition ends with a colon"),
    (HEAD + "  when 1 > 0:\n    next %0", "tile text, line 5: next is outside of a loop"),
    (HEAD + "  %0 = load x[rows %1, rows %2]", "tile text, line 4: rows of two dims are gathered"),
    (HEAD + "  %0 = load x[0]\n quiet",
     "tile text, line 5: the line is indented less than the kernel's first"),
    (HEAD + "\t%0 = load x[0]", "tile text: a line has a tab"),
    (HEAD + "  %0 = full shape=2", "tile: full needs its value"),
    (HEAD + "  %0 = full shape=2 value=x", "tile: 'x' is not a number"),
    (HEAD + "  %0 = full shape=2 value=1 size=3", "tile: full does not take size"),
    (HEAD + "  %0 = iota shape=2 dim=1", "tile: iota: i32[2] has no dim 1"),
    (HEAD + "  %0 = add 1", "tile: add takes 2 operands, 1 are given"),
    (HEAD + "  %0 = full shape=N value=1", "tile: 'N' is not a known name in 'N'"),
    (HEAD + "  %0 = full shape=2 value=300 dtype=u8", "tile: 300 is not a number of u8"),
    (HEAD + "  %0 = full shape=2 value=-1 dtype=u32", "tile: -1 is not a number of u32"),
    (HEAD + "  %0 = full shape=2 value=0.5 dtype=i32", "tile: 0.5 is not a number of i32"),
    (HEAD + "  %0 = full shape=0 value=1", "tile: shape [0] has a dim below 1"),
    (HEAD + "  %0 = load x[0]\n  %1 = dot %0 %0 transpose=c",
     "tile: transpose=c is not a, b or a,b"),
    (HEAD + "  %0 = full shape=1,2 value=1\n  %1 = col %0",
     "tile: col takes one dim, not f32[1, 2]"),
    (HEAD + "  loop i in 0..1e5\n    %0 = load x[i]", "tile: '1e5' is not an index"),
    (HEAD + "  %é = load x[0]", "tile: '%é' is not the name of a value"),
    (HEAD + "  %0 = fft 1", "tile: there is no op 'fft'"),
    (HEAD + "  %0 = dot 1 2", "tile: dot takes values, not numbers"),
    (HEAD + "  %0 = add 1 2", "tile: add of numbers alone has no dtype"),
    (HEAD + "".join("  " * i + f"  loop i{i} in 0..1\n" for i in range(40)),
     "more than 32 blocks are within each other"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), LINES, ids=range(len(LINES)))
def test_errors_of_texts_name_the_line(text: str, words: str) -> None:
    with pytest.raises(TesseraError) as error:
        parse(text)
    first, *rest = str(error.value).splitlines()
    assert words in first and any(row.startswith("  fix") for row in rest)


def test_texts_are_texts_and_kernels_kernels() -> None:
    with pytest.raises(UsageError, match="the text cannot be 3"):
        parse(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a Kernel"):
        to_text("kernel")  # type: ignore[arg-type]


@given(st.sampled_from(sorted(TEXTS)), st.data())
@settings(deadline=None, max_examples=150)
def test_a_damaged_text_is_an_error_of_ours_or_a_kernel(name: str, data: st.DataObject) -> None:
    text = TEXTS[name]
    at, end = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    new = data.draw(st.text(alphabet=" %=:[]()\n0a,.-x", max_size=3))
    damaged = text[:at] + new + text[min(end, at + 5) :]
    try:
        k = parse(damaged)
    except TesseraError as error:
        assert str(error).splitlines()[0]
    else:
        assert parse(to_text(k)) == k


def test_import_tessera_imports_no_texts_of_kernels() -> None:
    code = "import sys, tessera; print([m for m in sys.modules if 'ir.tile' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    late = [f"tessera.ir.tile.{m}" for m in ("text", "verify", "trace", "order", "oracle")]
    assert "tessera.ir.tile.node" in done.stdout
    assert not [name for name in late if f"'{name}'" in done.stdout]
