"""`x.at[...]`, `ts.scatter` and `ts.nonzero` against JAX, NumPy and PyTorch's rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, op
from tests.quickly import quickly

RNG = np.random.default_rng(2)
X = RNG.normal(size=(8, 4, 6)).astype(np.float32)
WAYS = ("set", "add", "mul", "max", "min")
IDS = np.array([2, 0, -1, 5], np.int32)
TWICE = np.array([[1, 1, 2], [-1, 3, 3]], np.int32)
KEYS: dict[str, Any] = {
    "number": 3,
    "negative": -2,
    "slice": slice(2, 6),
    "steps": (slice(None), slice(0, 4, 2), slice(5, 1, -2)),
    "number and slice": (1, slice(None), slice(1, 3)),
    "dots": (..., 2),
    "new dim": (slice(0, 2), None, 1),
    "ids": IDS,
    "ids twice": TWICE,
    "ids of another dim": (slice(None), np.array([3, 0], np.int32)),
    "ids and slice": (slice(1, 7, 2), np.array([1, 2, 2], np.int32), slice(None, None, -1)),
    "two ids": (IDS, np.array([0, 1, 2, 3], np.int32)),
    "ids apart": (IDS, slice(None), np.array([0, 5, 5, 1], np.int32)),
    "ids that broadcast": (IDS[:, None], np.array([0, 2, 2], np.int32)),
    "mask": X > 0,
    "mask of rows": X[:, 0, 0] > 0,
    "all": slice(None),
    "none": slice(3, 3),
}
every_key = pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
LAYOUTS = ("", "[8@dp, 4, 6]", "[8@tp, 4@dp, 6]", "[8, 4@tp, 6@dp]")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quickly():
        yield


def tensors(key: Any) -> Any:
    """`key` with its ids as tensors, which the host knows nothing of in a recorded function."""
    if isinstance(key, tuple):
        return tuple(map(tensors, key))
    return ts.tensor(key) if isinstance(key, np.ndarray) and key.dtype != bool else key


def value_for(key: Any, whole: bool) -> np.ndarray[Any, Any]:
    shape = X[key].shape
    if not whole or (isinstance(key, np.ndarray) and key.dtype == bool):
        shape = shape[-1:] if len(shape) else ()
    return RNG.normal(size=shape).astype(np.float32)


def theirs(x: Any, v: Any, key: Any, way: str) -> Any:
    """JAX's result. JAX leaves open which of several values for one place is set (here the last
    is), and has no gradient of several factors for one place."""
    if way not in ("set", "mul") or not has_ids(key):
        return getattr(x.at[key], {"mul": "multiply"}.get(way, way))(v)
    places = np.arange(X.size).reshape(X.shape)[key].ravel()
    here = jnp.asarray(places == np.arange(X.size)[:, None])  # [places of x, values]
    values = jnp.broadcast_to(v, X[key].shape).reshape(-1)
    if way == "mul":
        return x * jnp.prod(jnp.where(here, values, 1.0), 1).reshape(X.shape)
    last = here.shape[1] - 1 - jnp.argmax(here[:, ::-1], 1)
    return jnp.where(here.any(1), values[last], x.reshape(-1)).reshape(X.shape)


def has_ids(key: Any) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, np.ndarray) for k in keys)


@every_key
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_jax(key: Any, way: str, mesh: dist.Mesh) -> None:
    for i, layout in enumerate(LAYOUTS):
        v = value_for(key, bool(i % 2))
        x = ts.tensor(X, mesh, layout) if layout else ts.tensor(X)

        def run(x: Any, v: Any) -> Any:
            y = getattr(x.at[tensors(key)], way)(v)
            return y, *ts.grad(ts.sum(y * y * 0.5), [x, v])

        got = (ts.jit(run) if i else run)(x, ts.tensor(v))
        want = theirs(jnp.asarray(X), v, key, way)
        loss = lambda x, v: jnp.sum(theirs(x, v, key, way) ** 2 * 0.5)  # noqa: E731
        slopes = jax.grad(loss, (0, 1))(jnp.asarray(X), v)
        for a, b in zip(got, (want, *slopes), strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-4)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_generated_writes(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    x = RNG.integers(-9, 9, shape).astype(np.int32)
    keys: list[Any] = []
    for n in shape:
        kind = data.draw(st.sampled_from(["int", "slice", "ids", "all"]))
        at = st.integers(-n, n - 1)
        if kind == "int":
            keys.append(data.draw(at))
        elif kind == "slice":
            ends = st.none() | st.integers(-n - 1, n + 1)
            step = data.draw(st.sampled_from([None, 1, 2, -1, -2]))
            keys.append(slice(data.draw(ends), data.draw(ends), step))
        elif kind == "ids":
            keys.append(np.array(data.draw(st.lists(at, min_size=3, max_size=3)), np.int32))
        else:
            keys.append(slice(None))
    if has_ids(tuple(keys)):  # beside ids a number is an id in NumPy, and a slice in PyTorch
        keys = [slice(k, k + 1 or None) if isinstance(k, int) else k for k in keys]
    key = tuple(keys)
    v = RNG.integers(-9, 9, x[key].shape).astype(np.int32)
    for way, ufunc in (("set", None), ("add", np.add), ("max", np.maximum), ("mul", np.multiply)):
        want = x.copy()
        if ufunc is None:
            want[key] = v
        else:
            ufunc.at(want, key, v)
        got = getattr(ts.tensor(x).at[tensors(key)], way)(ts.tensor(v))
        np.testing.assert_array_equal(got.numpy(), want, err_msg=f"{way} {key}")


# -- ids outside ----------------------------------------------------------------------------------
def test_ids_outside_are_errors_marks_or_left_out() -> None:
    x = ts.tensor(np.arange(4, dtype=np.float32))
    far = np.array([1, 4], np.int32)
    with pytest.raises(ts.ShapeError, match="outside -4 to 3"):
        x.at[far].set(0.0)
    f = ts.jit(lambda x, i, mode: x.at[i + 0].add(1.0, mode))
    assert np.isnan(f(x, ts.tensor(far), "mark").numpy()).all()
    assert f(x, ts.tensor(far), "drop").numpy().tolist() == [0, 2, 2, 3]
    whole = ts.jit(lambda x, i: x.to(ts.int32).at[i + 0].set(7))(x, ts.tensor(far)).numpy()
    assert (whole == -(2**31)).all()
    assert x.at[far].set(9.0, mode="drop").numpy().tolist() == [0, 9, 2, 3]


def test_values_in_the_order_of_a_mask() -> None:
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    mask = x > 0

    @ts.jit
    def run(x: Any, mask: Any, values: Any) -> Any:
        places = ts.nonzero(mask, size=12, fill_value=len(x))
        return x.at[places].set(values, mode="drop"), x[ts.nonzero(mask, size=12)]

    values = np.arange(12, dtype=np.float32)
    got, picked = run(ts.tensor(x), ts.tensor(mask), ts.tensor(values))
    want = x.copy()
    want[mask] = values[: mask.sum()]
    np.testing.assert_array_equal(got.numpy(), want)
    np.testing.assert_array_equal(picked.numpy()[: mask.sum()], x[mask])


# -- scatter --------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("layout", ["", "[8@dp, 4, 6@tp]", "[8, 4@tp, 6@dp]"])
def test_scatter_is_that_of_pytorch(way: str, dim: int, layout: str, mesh: dist.Mesh) -> None:
    sizes = [6, 3, 5]
    sizes[dim] = 7
    at = RNG.integers(0, X.shape[dim], sizes).astype(np.int32)
    v = RNG.normal(size=sizes).astype(np.float32)
    want = X.copy()
    for place in np.ndindex(*sizes):
        key = list(place)
        key[dim] = at[place]
        old, new = want[tuple(key)], v[place]
        want[tuple(key)] = {"set": new, "add": old + new, "mul": old * new, "max": max(old, new),
                            "min": min(old, new)}[way]  # fmt: skip
    x = ts.tensor(X, mesh, layout) if layout else ts.tensor(X)
    got = ts.jit(lambda x, i, v: ts.scatter(x, i, v, dim, op=way))(x, ts.tensor(at), ts.tensor(v))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


def test_scatter_writes_slices_and_numbers() -> None:
    x, at = ts.zeros((4, 3)), ts.tensor([3, 1])
    rows = ts.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert ts.scatter(x, at, rows, dim=0).numpy().tolist()[3] == [1, 2, 3]
    assert ts.scatter(x, at, 2.0, dim=0).numpy().sum(1).tolist() == [0, 6, 0, 6]
    assert ts.scatter(x, ts.tensor([[9]]), 2.0, dim=0, mode="drop").numpy().sum() == 0
    with pytest.raises(ts.ShapeError, match="must match"):
        ts.scatter(x, ts.tensor([[1, 1, 1, 1]]), ts.ones((1, 4)), dim=0)


def test_a_device_writes_into_its_own_block() -> None:
    @op.kernel
    def body(x: Any) -> Any:
        return x.at[ts.mesh.current().rank % 2].set(-1.0)

    mesh = dist.Mesh(("dp",), devices=4)
    got = body(ts.tensor(np.arange(8, dtype=np.float32), mesh, "[8@dp]")).numpy()
    assert got.tolist() == [-1, 1, 2, -1, -1, 5, 6, -1]


# -- nonzero --------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["", "[8@dp, 6@tp]"])
@pytest.mark.parametrize("size", [0, 5, 48, 60])
def test_nonzero_is_that_of_jax(size: int, layout: str, mesh: dist.Mesh) -> None:
    x = (RNG.random((8, 6)) > 0.6).astype(np.float32)
    t = ts.tensor(x, mesh, layout) if layout else ts.tensor(x)
    want = jnp.nonzero(x, size=size, fill_value=(7, -1))
    for a, b in zip(ts.jit(lambda x: ts.nonzero(x, size, (7, -1)))(t), want, strict=True):
        np.testing.assert_array_equal(a.numpy(), b)
    for a, b in zip(ts.nonzero(t), np.nonzero(x), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


ERRORS: dict[str, tuple[Any, str]] = {
    "a mask of unknown size": (lambda x: x[x > 0], r"ts.nonzero\(mask, size=n\)"),
    "values of a mask": (lambda x: x.at[x > 0].set(ts.ones(3)), "nonzero"),
    "no size": (lambda x: ts.nonzero(x), "size=n"),
    "a value that does not fit": (lambda x: x.at[:2].set(ts.ones(3)), "broadcasts"),
    "floats into integers": (lambda x: x.to(ts.int32).at[0].set(0.5), "cannot be written"),
    "ids that do not broadcast": (lambda x: x[ts.arange(2), ts.arange(3)], "do not broadcast"),
    "fill values": (lambda x: ts.nonzero(x, 3, (1,)), "one for each dim"),
    "in place": (lambda x: x.__setitem__(0, 1.0), r"x.at\[key\].set"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_to_do(name: str) -> None:
    run, text = ERRORS[name]
    with pytest.raises(ts.TesseraError, match=text):
        ts.jit(run)(ts.ones((4, 2)))
