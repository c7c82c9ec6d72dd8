"""The NumPy oracle of kernels: ops, arguments, and orders of devices."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera.core.errors import DTypeError, GraphError, ShapeError, UsageError
from tessera.ir.tile.kernels import AG_MATMUL, DISPATCH
from tessera.ir.tile.ops import OPS, REDUCTIONS
from tessera.ir.tile.oracle import evaluate
from tessera.ir.tile.text import parse

Array = Any
ORDERS: tuple[str | int, ...] = ("in turn", "reversed", 0, 1, 2)


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def close(a: Array, b: Array, tolerance: float) -> None:
    np.testing.assert_allclose(a.astype(np.float64), b, rtol=tolerance, atol=tolerance)


# ---- ops ---------------------------------------------------------------------------------------
def one(op: str, *inputs: Array, out: str = "f32") -> Array:
    """The result of one op on whole arrays."""
    kinds = {"f": "f32", "V": "bf16", "i": "i32", "b": "bool"}
    dims = ", ".join(map(str, inputs[0].shape))
    lines = ["kernel one  v1"]
    for n, x in enumerate(inputs):
        shape = ", ".join(map(str, x.shape))
        tiles = shape.replace("1", "N") if "1" in shape.split(", ") else shape
        lines.append(f"  in x{n} : {kinds[x.dtype.kind]}[{shape}] tiles [{tiles}]")
    lines.insert(1, "  dims N=1")
    lines.append(f"  out y : {out}[{dims}] tiles [{dims}]")
    lines += [f"  %{n} = load x{n}[{', '.join('0' * x.ndim)}]" for n, x in enumerate(inputs)]
    args = " ".join(f"%{n}" for n in range(len(inputs)))
    lines.append(
        f"  %y = {op.replace('*', args)}\n  store y[{', '.join('0' * inputs[0].ndim)}] = %y"
    )
    return evaluate(parse("\n".join(lines)), *inputs)[0]


EXPECT: list[tuple[str, Any]] = [
    ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide),
    ("max", np.maximum), ("min", np.minimum), ("neg", np.negative), ("abs", np.abs),
    ("exp", np.exp), ("log", np.log), ("tanh", np.tanh), ("sqrt", np.sqrt),
    ("rsqrt", lambda x: x**-0.5), ("erf", np.vectorize(math.erf)),
    ("sigmoid", lambda x: 1 / (1 + np.exp(-x))), ("silu", lambda x: x / (1 + np.exp(-x))),
    ("gelu", lambda x: x * 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))),
    ("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal),
    ("eq", np.equal), ("ne", np.not_equal),
]  # fmt: skip
OTHERS = {"and", "or", "not", "where", "full", "iota", "cast", "dot", "row", "col"}


def test_every_op_is_tested() -> None:
    assert OPS.keys() == {op for op, _ in EXPECT} | OTHERS and len(REDUCTIONS) == 3


@pytest.mark.parametrize(("op", "expect"), EXPECT)
def test_ops_on_each_element(op: str, expect: Any) -> None:
    xs = [np.abs(normal(i, 4, 6)).round(1) + 0.1 for i in range(OPS[op].operands)]
    want = expect(*(x.astype(np.float64) for x in xs))
    compares = want.dtype == np.bool_
    have = one(f"{op} *", *xs, out="bool" if compares else "f32")
    close(have, want, 1e-5)
    narrow = [x.astype(ml_dtypes.bfloat16) for x in xs]
    want = expect(*(x.astype(np.float64) for x in narrow))
    have = one(f"{op} *", *narrow, out="bool" if compares else "bf16")
    close(have, want, 0 if compares else 2**-7)


def test_ops_on_bools_and_choices() -> None:
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    assert one("and *", a, b, out="bool").tolist() == (a & b).tolist()
    assert one("or *", a, b, out="bool").tolist() == (a | b).tolist()
    assert one("not *", a, out="bool").tolist() == (~a).tolist()
    x = normal(0, 4)
    assert np.array_equal(one("where * -inf", a, x), np.where(a, x, -np.inf))
    assert np.array_equal(one("where %0 0.5 %1", a, x), np.where(a, np.float32(0.5), x))


def test_dims_of_size_1_broadcast() -> None:
    x = normal(0, 4, 6)
    for shape in ((1, 6), (4, 1)):
        y = normal(1, *shape)
        assert np.array_equal(one("add *", x, y), x + y)


@pytest.mark.parametrize("flags", ["", "a", "b", "a,b"])
def test_products_are_summed_in_f32(flags: str) -> None:
    x, y = normal(0, 6, 6, dtype=ml_dtypes.bfloat16), normal(1, 6, 6, dtype=ml_dtypes.bfloat16)
    left = x.T if "a" in flags.split(",") else x
    right = y.T if "b" in flags.split(",") else y
    want = left.astype(np.float64) @ right.astype(np.float64)
    close(one("dot *" + (f" transpose={flags}" if flags else ""), x, y), want, 1e-5)
    ones = np.full((1024, 1024), 1, ml_dtypes.bfloat16)
    assert (one("dot *", ones, ones) == 1024).all()  # bf16 would stop at 256


def test_reductions_and_iota() -> None:
    lines = """kernel r  v1
      in x : bf16[3, 500] tiles [3, 500]
      out s : bf16[3] tiles [3]
      out m : bf16[500] tiles [500]
      out l : bf16[3] tiles [3]
      out n : i32[2, 3] tiles [2, 3]
      out u : u32[2] tiles [2]
      %x = load x[0, 0]
      %s = sum %x dim=1
      %m = max %x dim=0
      %l = min %x dim=1
      %n = iota shape=2,3 dim=1 start=4-5
      %u = full shape=2 value=7 dtype=u32
      store s[0] = %s
      store m[0] = %m
      store l[0] = %l
      store n[0, 0] = %n
      store u[0] = %u"""
    x = np.full((3, 500), 1, ml_dtypes.bfloat16)
    s, m, low, n, u = evaluate(parse(lines), x)
    assert (s == 500).all() and (m == 1).all() and (low == 1).all()  # the sum is made in f32
    assert n.tolist() == [[-1, 0, 1]] * 2 and u.tolist() == [7, 7] and u.dtype == np.uint32


# ---- devices -----------------------------------------------------------------------------------
RACE = """\
kernel race  v1  mesh x=2
  in a : f32[2] tiles [2]
  out y : f32[2] tiles [2]
  sym s : f32[2, 2] tiles [1, 2]
  sig got [1]
  enter x
  %0 = load a[0]
  store s[0, 0] = %0
  put s[0, 0] -> s[1, 0] at (rank_x+1)%x sig got[0]
  %1 = neg %0
  store s[0, 0] = %1
  wait got[0]
  %2 = load s[1, 0]
  store y[0] = %2
  quiet"""


def test_a_race_shows_as_a_difference_between_orders() -> None:
    a = normal(0, 2, 2)
    early, late = (evaluate(parse(RACE), a, order=o)[0] for o in ("in turn", "reversed"))
    assert np.array_equal(early, a[::-1]) and np.array_equal(late, -a[::-1])
    random = [evaluate(parse(RACE), a, order=seed)[0] for seed in range(20)]
    assert any(np.array_equal(r, early) for r in random)
    assert any(not np.array_equal(r, early) for r in random)
    assert np.array_equal(evaluate(parse(RACE), a, order=7)[0], random[7])


def test_what_nobody_wrote_is_nan() -> None:
    text = RACE.replace("  wait got[0]\n", "")
    assert np.isnan(evaluate(parse(text), normal(0, 2, 2), order="reversed")[0]).any()


def test_a_deadlock_names_the_devices_and_their_slots() -> None:
    put = "  put s[0, 0] -> s[1, 0] at (rank_x+1)%x sig got[0]\n"
    text = RACE.replace(put, "").replace("  wait got[0]\n", "  wait got[0]\n" + put)
    for order in ORDERS:
        with pytest.raises(GraphError) as error:
            evaluate(parse(text), normal(0, 2, 2), order=order)
        assert str(error.value) == (
            "evaluate: devices wait for ever\n"
            "  rank 0 : wait got[0]\n"
            "  rank 1 : wait got[0]\n"
            "  fix    : put to each slot that is waited for, before the own wait"
        )
    with pytest.raises(GraphError, match=r"wait for ever\n  rank 0 : enter\n"):
        evaluate(parse(RACE.replace("enter x", "when rank_x == 0: enter x")), normal(0, 2, 2))


def test_barriers_are_along_axes() -> None:
    text = RACE.replace("mesh x=2", "mesh z=2 x=2").replace("at (rank", "at rank_z, (rank")
    a = normal(0, 2, 2, 2)
    assert np.array_equal(evaluate(parse(text), a)[0], a[:, ::-1])
    both = text.replace("enter x", "enter z\n  enter x z")
    assert np.array_equal(evaluate(parse(both), a)[0], a[:, ::-1])


# ---- arguments ---------------------------------------------------------------------------------
def test_arrays_are_those_of_the_inputs() -> None:
    k = parse(DISPATCH)
    x, ids = np.zeros((64, 64), ml_dtypes.bfloat16), np.zeros(96, np.int32)
    with pytest.raises(UsageError, match="dispatch has 2 inputs, 1 arrays are given"):
        evaluate(k, x)
    with pytest.raises(ShapeError, match=r"x is bf16\[64, 64\], not \[64, 63\]"):
        evaluate(k, x[:, 1:], ids)
    with pytest.raises(DTypeError, match="x is bf16, not f32"):
        evaluate(k, x.astype(np.float32), ids)
    with pytest.raises(ShapeError, match=r"a is f32\[8, 16, 32\], not \[16, 32\]"):
        evaluate(parse(AG_MATMUL), normal(0, 16, 32), normal(0, 32, 24))
    for order in ("random", 1.5, True, None):
        with pytest.raises(UsageError, match="the order cannot be"):
            evaluate(k, x, ids, order=order)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a Kernel"):
        evaluate(DISPATCH, x, ids)  # type: ignore[arg-type]
    (y,) = evaluate(k, x, ids.astype(np.int64))
    assert y.shape == (96, 64)


def test_indices_out_of_bounds_are_errors_and_never_wrap() -> None:
    x, ids = np.zeros((64, 64), ml_dtypes.bfloat16), np.zeros(96, np.int32)
    for wrong, text in ((64, DISPATCH), (-1, DISPATCH.replace("max %ids 0", "max %ids -1"))):
        with pytest.raises(ShapeError, match="x has no rows"):
            evaluate(parse(text), x, np.where(np.arange(96) == 5, wrong, ids).astype(np.int32))
    with pytest.raises(ShapeError, match=r"ids\[-1\] does not exist\n  line : 9: %ids = load ids"):
        evaluate(parse(DISPATCH.replace("load ids[i]", "load ids[i-1]")), x, ids)
    with pytest.raises(ShapeError, match=r"there is no rank \(2,\)"):
        evaluate(parse(RACE.replace("(rank_x+1)%x", "rank_x+1")), normal(0, 2, 2))
    with pytest.raises(ShapeError, match=r"got\[1\] does not exist"):
        evaluate(parse(RACE.replace("wait got[0]", "wait got[1]")), normal(0, 2, 2))
