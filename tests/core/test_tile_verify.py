"""The verifier of kernels: each kind of mistake, seeded, and what it lets through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.errors import DTypeError, GraphError, ShapeError, TesseraError, UsageError
from tessera.ir.tile.kernel import with_sizes
from tessera.ir.tile.kernels import AG_MATMUL, DISPATCH, FLASH_CAUSAL, MATMUL_RS, MLP_UP, TEXTS
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse
from tessera.ir.tile.trace import enumerated, reduced
from tessera.ir.tile.verify import faults, verify

SIZES: dict[str, list[dict[str, int]]] = {
    "mlp": [{"M": 64, "K": 192, "bn": 128}, {"bm": 1, "M": 3, "K": 64, "N": 64}],
    "product": [{"M": 128, "K": 64, "N": 384, "bm": 32}],
    "flash": [
        {"B": 2, "H": 1, "G": 3, "T": 96, "bq": 32}, {"bq": 32, "bk": 8}, {"bq": 8, "bk": 32},
        {"T": 16}, {"S": 16}, {"T": 48, "bq": 24, "S": 80}, {"T": 80, "S": 48, "bk": 24},
    ],
    "adamw": [{"N": 64, "bn": 8}],
    "cross": [{"V": 32}, {"N": 48, "C": 48, "V": 128, "bv": 16}],
    "dispatch": [{"S": 16, "N": 7}],
    "unpack": [{"S": 16}],
    "combine": [{"N": 16, "K": 5}],
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_examples_are_right_at_all_sizes(name: str) -> None:
    on_mesh = [{"x": n} for n in (1, 2, 3, 5, 8)]
    for sizes in ({}, *(on_mesh if "  mesh" in TEXTS[name] else SIZES[name.split("_")[0]])):
        assert faults(with_sizes(parse(TEXTS[name]), **sizes)) == ()


# ---- seeded mistakes ---------------------------------------------------------------------------
def edit(text: str, *changes: str) -> str:
    """The text with each pair of `changes` made: what was there, and what is there now."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


COPY = """\
kernel copy  v1
  dims M=8
  tune bm=2
  speed warps=4
  grid i=M//bm
  in x : f32[M] tiles [bm]
  out y : f32[M] tiles [bm]
  %0 = load x[i]
  store y[i] = %0"""
PASS = """\
kernel pass  v1  mesh x=4
  dims M=8
  in a : f32[M] tiles [M]
  out y : f32[M] tiles [M]
  sym s : f32[2, M] tiles [1, M]
  sig got [2]
  enter x
  %0 = load a[0]
  store s[0, 0] = %0
  put s[0, 0] -> s[1, 0] at (rank_x+1)%x sig got[0]
  wait got[0]
  %1 = load s[1, 0]
  store y[0] = %1
  quiet"""
PUT = "put s[0, 0] -> s[1, 0] at (rank_x+1)%x sig got[0]"

# Found when the kernel is made: name, text, the error, its first line.
MADE: list[tuple[str, str, type[TesseraError], str]] = [
    ("tiles do not divide", edit(COPY, "bm=2", "bm=3"), ShapeError,
     "tile: tiles of 3 do not divide 8"),
    ("tile of size 0", edit(COPY, "in x : f32[M] tiles [bm]", "in x : f32[M] tiles [bm-2]"),
     ShapeError, "tile: the size bm-2 is 0"),
    ("tile sizes and dims", edit(COPY, "in x : f32[M]", "in x : f32[M, M]"), ShapeError,
     "tile: 2 dims and 1 tile sizes"),
    ("carry of another shape", edit(MLP_UP, "next %next", "next %x"), DTypeError,
     "tile: %zero is carried as f32[64, 64], and next is bf16[64, 64]"),
    ("carry of another dtype", edit(MLP_UP, "bm=64 bn=64 bk=64", "bm=64 bn=64 bk=32", "next %next",
     "%t = cast %x to=f32\n    next %t"), ShapeError,
     "tile: %zero is carried as f32[64, 64], and next is f32[64, 32]"),
    ("missing next", edit(MLP_UP, "    next %next\n", ""), GraphError,
     "tile: next is missing, and 1 are carried"),
    ("next of too many", edit(MLP_UP, "next %next", "next %next %next"), GraphError,
     "tile: next gives 2 values, and 1 are carried"),
    ("results of a loop", edit(MLP_UP, "%dots = loop", "loop", "add %dots", "add %zero"),
     GraphError, "tile: 1 values are carried, 0 named"),
    ("a value carried twice", edit(MLP_UP, "%dots = loop", "%dots %b = loop", "carry %zero",
     "carry %zero %zero", "next %next", "next %next %next"), GraphError,
     "tile: a value is carried twice"),
    ("use outside of the loop", edit(MLP_UP, "add %dots %across", "add %next %across"), GraphError,
     "tile: %next is used outside of the block that defines it"),
    ("use outside of a condition", edit(COPY, "%0 = load x[i]", "when i > 0: %0 = load x[i]"),
     GraphError, "tile: %0 is used outside of the block that defines it"),
    ("use before definition", edit(COPY, "= %0", "= %1"), GraphError,
     "tile: %1 is used before it is defined"),
    ("defined twice", edit(COPY, "  store", "  %0 = load x[i]\n  store"), GraphError,
     "tile: %0 is defined twice"),
    ("dot of one dim", edit(COPY, "  store", "  %1 = dot %0 %0\n  store"), ShapeError,
     "tile: dot of f32[2] and f32[2]"),
    ("dot that does not fit", edit(MLP_UP, "bk=64", "bk=32", "dot %x %w", "dot %x %w transpose=b"),
     ShapeError, "tile: dot of bf16[64, 32] and bf16[32, 64] with transpose=b sums over 32 and 64"),
    ("dot of dtypes", edit(MLP_UP, "in w : bf16", "in w : f32"), DTypeError,
     "tile: dot of bf16[64, 64] and f32[64, 64]"),
    ("store of a dtype", edit(MLP_UP, "= %y", "= %act"), DTypeError,
     "tile: %act is f32[64, 64], a tile of y is bf16[64, 64]"),
    ("store of a shape", edit(COPY, "out y : f32[M] tiles [bm]", "out y : f32[M] tiles [4]"),
     ShapeError, "tile: %0 is f32[2], a tile of y is f32[4]"),
    ("store to an input", edit(COPY, "store y", "store x"), GraphError, "tile: x is an input"),
    ("unknown name", edit(COPY, "load x[i]", "load x[k]"), GraphError,
     "tile: 'k' in 'k' is not a known name"),
    ("loop index outside", edit(MLP_UP, "load b[j]", "load b[k]"), GraphError,
     "tile: 'k' in 'k' is not a known name"),
    ("own rank without a mesh", edit(COPY, "load x[i]", "load x[rank_x]"), GraphError,
     "tile: 'rank_x' in 'rank_x' is not a known name"),
    ("speed in an index", edit(COPY, "load x[i]", "load x[i%warps]"), GraphError,
     "tile: 'warps' in 'i%warps' is a speed: it does not change what is computed"),
    ("condition on a value", edit(COPY, "store", "when %0 > 0: store"), GraphError,
     "tile: '%0 > 0' is not a condition: it reads a value, known only at run time"),
    ("condition on an index alone", edit(COPY, "store", "when i: store"), GraphError,
     "tile: 'i' is not a condition: 'i' compares nothing"),
    ("index that hides another", edit(MLP_UP, "loop k in", "loop i in"), GraphError,
     "tile: 'i' has a meaning already"),
    ("number of indices", edit(COPY, "load x[i]", "load x[i, 0]"), ShapeError,
     "tile: x has 1 dims, 2 indices are given"),
    ("unknown reference", edit(COPY, "load x", "load z"), GraphError,
     "tile: there is no reference 'z'"),
    ("rows by a float", edit(DISPATCH, "in ids : i32", "in ids : f32"), DTypeError,
     "tile: rows cannot be f32[16]"),
    ("rows of an output", edit(DISPATCH, "load x[rows", "load y[rows"), GraphError,
     "tile: rows of y, which is no input"),
    ("ops of two dtypes", edit(MLP_UP, "%sum = add %dots %across",
     "%c = cast %across to=bf16\n  %sum = add %dots %c"), DTypeError,
     "tile: add of f32[64, 64] and bf16[1, 64]"),
    ("shapes without broadcast", edit(MLP_UP, "add %dots %across", "add %dots %b"), ShapeError,
     "tile: add of f32[64, 64] and f32[64]"),
    ("choice by a number", edit(COPY, "  store y[i] = %0",
     "  %1 = where %0 %0 0\n  store y[i] = %1"),
     DTypeError, "tile: where chooses by a bool, not f32[2]"),
    ("float op on ints", edit(DISPATCH, "  %x = load", "  %e = exp %ids\n  %x = load"), DTypeError,
     "tile: exp takes floats, not i32"),
    ("put to an output", edit(PASS, "-> s[1, 0]", "-> y[0]"), GraphError,
     "tile: y is not symmetric memory"),
    ("put of another type", edit(PASS, "in a : f32[M] tiles [M]", "in a : f32[M] tiles [4]",
     "store s[0, 0] = %0", "store s[0, 0] = %z", "%0 = load a[0]", "%z = full shape=M value=0",
     "put s[0, 0]", "put a[0]"), ShapeError, "tile: a tile of a is f32[4], of s f32[8]"),
    ("rank of two coordinates", edit(PASS, "at (rank_x+1)%x", "at (rank_x+1)%x, 0"), GraphError,
     "tile: the rank has 2 coordinates"),
    ("unknown signal", edit(PASS, "wait got", "wait done"), GraphError,
     "tile: there is no signal 'done'"),
    ("slot of two indices", edit(PASS, "wait got[0]", "wait got[0, 0]"), ShapeError,
     "tile: got has 1 dims, 2 indices are given"),
    ("communication in a grid", edit(COPY, "copy  v1", "copy  v1  mesh x=2", "  store",
     "  quiet\n  store"),
     GraphError, "tile: a kernel with a grid does not communicate"),
    ("communication without a mesh", edit(COPY, "  grid i=M//bm\n", "", "  store",
     "  quiet\n  store", "load x[i]", "load x[0]", "y[i]", "y[0]"),
     GraphError, "tile: the kernel has no mesh"),
    ("symmetric memory without a mesh", edit(COPY, "in x", "sym x"), GraphError,
     "tile: the kernel has no mesh for symmetric memory"),
    ("enter of another axis", edit(PASS, "enter x", "enter y"), GraphError,
     "tile: enter takes axes of the mesh, each once"),
]  # fmt: skip

# Found by enumeration: kind, text, what is wrong.
SEEDED: list[tuple[str, str, str]] = [
    ("in bounds", edit(COPY, "load x[i]", "load x[i+1]"), "x[4] is outside of 4 tiles"),
    ("in bounds", edit(COPY, "load x[i]", "load x[i-1]"), "x[-1] is outside of 4 tiles"),
    ("out bounds", edit(COPY, "store y[i]", "store y[i*2]"), "y[4] is outside of 4 tiles"),
    ("sym bounds", edit(PASS, "%1 = load s[1, 0]", "%1 = load s[2, 0]"),
     "s[2, 0] is outside of 2 x 1 tiles"),
    ("sym bounds", edit(PASS, "-> s[1, 0]", "-> s[1, 1]"), "s[1, 1] is outside of 2 x 1 tiles"),
    ("slot", edit(PASS, "wait got[0]", "wait got[2]"), "got[2] is outside of 2 slots"),
    ("slot", edit(PASS, "sig got[0]", "sig got[rank_x]"), "got[2] is outside of 2 slots"),
    ("rank", edit(PASS, "(rank_x+1)%x", "rank_x+1"), "rank 4 is outside of mesh x=4"),
    ("hole", edit(COPY, "grid i=M//bm", "grid i=M//bm-1"), "y[3] is never written"),
    ("hole", edit(COPY, "store y", "when i != 2: store y"), "y[2] is never written"),
    ("hole", edit(PASS, "store y", "when rank_x > 0: store y"), "y[0] is never written on rank 0"),
    ("race", edit(COPY, "store y[i]", "store y[i//2*2]"),
     "y[0] is written by the steps (0) and (1) of the grid"),
    ("race", edit(COPY, "grid i=M//bm", "grid i=M//bm j=2"),
     "y[0] is written by the steps (0, 0) and (0, 1) of the grid"),
    ("other step", edit(COPY, "= %0", "= %0\n  when i > 0: %1 = load y[i-1]"),
     "step (1) of the grid reads y[0] of (0)"),
    ("unwritten", edit(COPY, "%0 = load x[i]", "%1 = load x[i]\n  %0 = load y[i]"),
     "y[0] is read before it is written"),
    ("unwritten", edit(PASS, "  store s[0, 0] = %0\n", ""),
     "s[0, 0] on rank 0 is read before it is written"),
    ("unwaited", edit(PASS, "  wait got[0]\n", ""),
     "got[0] on rank 1 is set, and nobody waits for it"),
    ("early read", edit(PASS, "  wait got[0]\n  %1 = load s[1, 0]\n",
     "  %1 = load s[1, 0]\n  wait got[0]\n"),
     "s[1, 0] on rank 1 is read while a put to it is under way"),
    ("unset", edit(PASS, "  " + PUT + "\n", ""),
     "got[0] on rank 0 is waited for, and no put sets it"),
    ("unset", edit(PASS, "wait got[0]", "wait got[0]\n  wait got[1]"),
     "got[1] on rank 0 is waited for, and no put sets it"),
    ("reused slot", edit(PASS, PUT, PUT + "\n  " + PUT), "two puts set got[0] on rank 1"),
    ("reused slot", edit(AG_MATMUL, "sig got[s+1]", "sig got[1]"), "two puts set got[1] on rank 1"),
    ("overwrite", edit(PASS, PUT, PUT + "\n  store s[0, 0] = %0"),
     "s[0, 0] on rank 0 is written while a put from it is under way"),
    ("overwrite", edit(PASS, PUT, PUT + "\n  store s[1, 0] = %0"),
     "s[1, 0] on rank 1 is written while a put to it is under way"),
    ("overwrite", edit(AG_MATMUL, "buf[s+1, 0, 0] at", "buf[0, 0, 0] at", "load buf[s, 0, 0]",
     "load buf[0, 0, 0]", "put buf[s, 0, 0]", "put buf[0, 0, 0]"),
     "buf[0, 0, 0] on rank 0 is written while a put to it is under way"),
    ("two puts", edit(PASS, PUT, PUT + "\n  " + PUT.replace("got[0]", "got[1]"), "wait got[0]",
     "wait got[0]\n  wait got[1]"), "two puts use s[1, 0] on rank 1 at once"),
    ("entry", edit(PASS, "  enter x\n", ""), "rank 0 puts to rank 1, which may not have begun"),
    ("entry", edit(PASS, "  enter x\n", "", PUT, PUT + "\n  enter x"),
     "rank 0 puts to rank 1, which may not have begun"),
    ("entry", edit(PASS, "mesh x=4", "mesh z=2 x=4", "at (rank_x+1)%x", "at (rank_z+1)%z, rank_x"),
     "rank 0, 0 puts to rank 1, 0, which may not have begun"),
    ("quiet", edit(PASS, "\n  quiet", ""), "a put of rank 0 may be under way at the end"),
    ("quiet", edit(PASS, "  quiet", "", PUT, "quiet\n  " + PUT),
     "a put of rank 0 may be under way at the end"),
    ("itself", edit(PASS, PUT, PUT + "\n  put s[0, 0] -> s[0, 0] at rank_x sig got[1]",
     "wait got[0]", "wait got[0]\n  wait got[1]"), "rank 0 puts s[0, 0] onto itself"),
    ("cycle", edit(PASS, "  wait got[0]\n", "", "  " + PUT, "  wait got[0]\n  " + PUT),
     "devices wait for each other: rank 0 at got[0], rank 1 at got[0], rank 2 at got[0], "
     "rank 3 at got[0]"),
    ("cycle", edit(PASS, "enter x", "when rank_x == 0: wait got[0]\n  enter x"),
     "devices wait for each other: rank 0 at got[0], rank 1 at enter, rank 2 at enter, "
     "rank 3 at enter"),
    ("barrier", edit(PASS, "enter x", "when rank_x != 1: enter x"),
     "devices wait for each other: rank 0 at enter, rank 1 at got[0], rank 2 at enter, "
     "rank 3 at enter"),
]  # fmt: skip


def names(rows: list[Any]) -> list[str]:
    return [f"{i}-{row[0].replace(' ', '_')}" for i, row in enumerate(rows)]


@pytest.mark.parametrize(("what", "text", "error", "first"), MADE, ids=names(MADE))
def test_mistakes_in_names_types_and_scopes(
    what: str, text: str, error: type[TesseraError], first: str
) -> None:
    with pytest.raises(error) as raised:
        parse(text)
    line, *rest = str(raised.value).splitlines()
    assert line == first and type(raised.value) is error
    assert [row.split(" : ")[0].strip() for row in rest][:1] == ["line"]
    assert any(row.strip().startswith("fix") for row in rest)


@pytest.mark.parametrize(("kind", "text", "what"), SEEDED, ids=names(SEEDED))
def test_seeded_mistakes_are_found(kind: str, text: str, what: str) -> None:
    k = parse(text)
    found = faults(k)
    first = next((f for f in found if f.kind == kind), None)
    assert first is not None, found
    assert first.what == what and first.fix and first.line.split(":")[0].isdecimal()
    with pytest.raises(GraphError) as error:
        verify(k)
    assert str(error.value).startswith(f"verify: {found[0].what}\n  line : {found[0].line}\n")


def test_every_kind_of_mistake_is_seeded() -> None:
    assert len({kind for kind, *_ in SEEDED}) == 20 and len(MADE) > 40


def test_unharmed_texts_have_no_mistakes() -> None:
    for text in (COPY, PASS):
        verify(parse(text))
    with pytest.raises(UsageError, match="takes a Kernel"):
        verify(PASS)  # type: ignore[arg-type]


def test_an_error_shows_the_line_the_other_mistakes_and_a_fix() -> None:
    with pytest.raises(GraphError) as error:
        verify(parse(edit(PASS, "\n  quiet", "", "  enter x\n", "")))
    assert str(error.value) == (
        "verify: rank 0 puts to rank 1, which may not have begun\n"
        f"  line : 9: {PUT}\n"
        f"  also : a put of rank 0 may be under way at the end, line 9: {PUT}\n"
        "  fix  : enter the axis before the first put"
    )


# ---- what is right -----------------------------------------------------------------------------
RIGHT = {
    "a local put": edit(PASS, "(rank_x+1)%x", "rank_x"),
    "the sender knows by a chain of puts": edit(
        PASS, "  quiet", "  put s[1, 0] -> s[3, 0] at (rank_x+x-1)%x sig got[1]\n  wait got[1]\n"
        "  store s[0, 0] = %0\n  quiet", "f32[2, M]", "f32[4, M]"),
    "a source is free after quiet": edit(PASS, PUT, PUT + "\n  quiet\n  store s[0, 0] = %0"),
    "a barrier orders": edit(PASS, "  quiet", "  quiet\n  enter x\n  store s[1, 0] = %0"),
    "axes by themselves": edit(PASS, "mesh x=4", "mesh z=2 x=4", "at (rank", "at rank_z, (rank"),
    "both axes": edit(PASS, "mesh x=4", "mesh z=2 x=4", "at (rank", "at (rank_z+1)%z, (rank",
                      "enter x", "enter z x"),
    "two writes of a step": edit(COPY, "= %0", "= %0\n  store y[i] = %0\n  %1 = load y[i]"),
    "a put of an input": edit(PASS, "put s[0, 0]", "put a[0]"),
    "waits that are repeated": edit(PASS, "wait got[0]", "wait got[0]\n  wait got[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_is_let_through(name: str) -> None:
    assert faults(parse(RIGHT[name])) == ()


def test_an_overwrite_after_a_chain_needs_the_whole_chain() -> None:
    text = RIGHT["the sender knows by a chain of puts"]
    shorter = edit(
        text, "  wait got[1]\n  store s[0, 0] = %0\n", "  store s[0, 0] = %0\n  wait got[1]\n"
    )
    assert [f.kind for f in faults(parse(shorter))] == ["overwrite"]


def blocks(name: str, k: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(*(n for _, n in k.mesh), *k.shape(r))).astype(np.float32)
        for r in k.refs
        if r.kind == "in"
    ]


@given(st.sampled_from([PASS, AG_MATMUL, MATMUL_RS]), st.data())
@settings(deadline=None, max_examples=120)
def test_what_the_verifier_lets_through_gives_one_result_in_all_orders(
    text: str, data: st.DataObject
) -> None:
    """Lines of communication are lost, doubled or moved at random."""
    lines = text.split("\n")
    words = ("put", "wait", "quiet", "enter", "store", "when")
    for _ in range(data.draw(st.integers(1, 2))):
        moved = [i for i, line in enumerate(lines) if line.split()[0] in words]
        at = data.draw(st.sampled_from(moved))
        line = lines.pop(at)
        if data.draw(st.booleans()):
            to = data.draw(st.integers(min(moved), max(moved)))
            lines.insert(to, line)
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            lines.insert(at, line)
    try:
        k = parse("\n".join(lines))
        k = with_sizes(k, x=3)
    except TesseraError:
        return
    given_blocks = blocks("x", k)
    if not faults(k):
        want = evaluate(k, *given_blocks)
        for order in ("reversed", 0, 1, 2):
            for y, z in zip(want, evaluate(k, *given_blocks, order=order), strict=True):
                assert np.array_equal(y, z) and not np.isnan(y).any()


# ---- large kernels -----------------------------------------------------------------------------
def test_large_kernels_are_verified_at_a_few_tiles() -> None:
    k = with_sizes(parse(FLASH_CAUSAL), B=64, H=8, G=4, T=1 << 15, S=1 << 15)
    small, steps = enumerated(k)
    assert (
        dict(small.dims) == {"B": 4, "H": 4, "G": 4, "T": 64, "S": 64, "D": 16}
        and len(steps) == 256
    )
    assert faults(k) == () and reduced(k, 2).hash != k.hash
    wrong = parse(k.text.replace("load v[b, h, j", "load v[b, h+1, j"))
    first, *_ = faults(wrong)
    assert first.kind == "in bounds"
    assert (
        first.what
        == "at B=4 H=4 G=4 T=64 S=64 D=16: v[0, 4, 0, 0] is outside of 4 x 4 x 4 x 1 tiles"
    )


def test_a_division_by_zero_names_its_line() -> None:
    with pytest.raises(GraphError) as error:
        verify(parse(edit(COPY, "load x[i]", "load x[i//i]")))
    assert str(error.value) == (
        "tile: 'i//i' divides by zero\n  line : 8: %0 = load x[i//i]\n  i    : 0\n"
        "  fix  : make the divisor at least 1"
    )


def test_a_kernel_that_is_large_at_every_size_is_refused() -> None:
    k = parse(
        edit(
            COPY, "  %0 = load x[i]", "  loop r in 0..1000000\n    %1 = load x[i]\n  %0 = load x[i]"
        )
    )
    with pytest.raises(GraphError, match="has more than 200000 accesses"):
        verify(k)
    with pytest.raises(GraphError, match="has more than 200000 accesses"):
        verify(parse(edit(COPY, "grid i=M//bm", "grid i=2147483647")))
