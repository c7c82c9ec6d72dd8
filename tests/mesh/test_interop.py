"""Conversion between Tessera, JAX, NumPy and DLPack, and the start of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts
from tessera import dist

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)


# -- JAX ------------------------------------------------------------------------------------------
def jax_mesh() -> jax.sharding.Mesh:
    ts.mesh.auto()  # starts the devices
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (PartitionSpec(), "[8, 4]"),
        (PartitionSpec("dp"), "[8@dp, 4]"),
        (PartitionSpec(None, "tp"), "[8, 4@tp]"),
        (PartitionSpec("tp", "dp"), "[8@tp, 4@dp]"),
        (PartitionSpec(("dp", "tp")), "[8@(dp,tp), 4]"),
        (PartitionSpec(("tp", "dp"), None), "[8@(tp,dp), 4]"),
    ],
)
def test_named_shardings_both_ways(spec: PartitionSpec, layout: str) -> None:
    where = NamedSharding(jax_mesh(), spec)
    t = ts.from_jax(jax.device_put(VALUE, where))
    assert (t.layout, t.mesh) == (layout, MESH)
    np.testing.assert_array_equal(t.numpy(), VALUE)
    np.testing.assert_array_equal((t * 2.0).numpy(), VALUE * 2)
    made = ts.tensor(VALUE, mesh=MESH, layout=layout).jax()
    assert made.sharding.is_equivalent_to(where, 2)
    np.testing.assert_array_equal(np.asarray(made), VALUE)


def test_an_array_of_one_device_goes_anywhere() -> None:
    array = jax.numpy.asarray(VALUE)
    t = ts.from_jax(array)
    assert (t.layout, t.mesh) == ("[8, 4]", None)
    assert ts.tensor(array, mesh=MESH, layout="[8@tp, 4]").layout == "[8@tp, 4]"
    np.testing.assert_allclose((ts.exp(array) + array).numpy(), np.exp(VALUE) + VALUE, 1e-6)
    np.testing.assert_array_equal(ts.jit(lambda x: x + 1.0)(array).numpy(), VALUE + 1)


def test_an_array_that_was_put_on_one_device_comes_to_a_mesh() -> None:
    array = jax.device_put(VALUE, jax.devices()[3])
    for t in (ts.tensor(array, mesh=MESH), ts.from_jax(array, MESH)):
        assert (t.layout, t.mesh) == ("[8, 4]", MESH)
        np.testing.assert_array_equal((t + 1).numpy(), VALUE + 1)
    with MESH:
        np.testing.assert_array_equal(ts.sum(ts.tensor(array), 0).numpy(), VALUE.sum(0))


@pytest.mark.parametrize(
    "mesh",
    [
        dist.Mesh(("dp",), devices=[4, 5, 6, 7]),
        dist.Mesh(("dp",), devices=[3, 2, 1, 0]),
        dist.Mesh(("dp",), devices=8).fold(onto=4),
        dist.Mesh(("x",), devices=4),
        MESH,
    ],
    ids=lambda m: f"{m.text()} {m.device_ids[0]}",
)
def test_an_array_of_another_mesh_comes_to_the_one_that_is_given(mesh: dist.Mesh) -> None:
    four = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("dp",))
    for spec in (PartitionSpec("dp"), PartitionSpec()):
        t = ts.from_jax(jax.device_put(VALUE, NamedSharding(four, spec)), mesh)
        assert (t.layout, t.mesh) == ("[8, 4]", mesh)
        np.testing.assert_array_equal((t + 1).numpy(), VALUE + 1)


def test_an_array_keeps_its_dtype_and_names_its_own_axes() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("rows", "cols"))
    array = jax.numpy.zeros((6, 4), jax.numpy.bfloat16)
    t = ts.from_jax(jax.device_put(array, NamedSharding(mesh, PartitionSpec("rows", "cols"))))
    assert str(t.type) == "bf16[6@rows, 4@cols]"
    assert t.mesh is not None
    assert (t.mesh.text(), t.mesh.device_ids) == ("rows=3 cols=2", [0, 1, 2, 3, 4, 5])


def test_the_array_behind_a_layout_has_a_dim_for_each_factor() -> None:
    fused = ts.tensor(VALUE, mesh=MESH, layout="[(2·4@tp), 4]").jax()
    assert fused.shape == (2, 4, 4)
    assert fused.sharding.spec == PartitionSpec(None, "tp", None)
    open_ = ts.sum(ts.tensor(VALUE, mesh=MESH, layout="[8@dp, 4]"), 0).jax()
    assert open_.shape == (2, 4)  # a partial value from each device along dp
    np.testing.assert_array_equal(np.asarray(open_).sum(0), VALUE.sum(0))
    padded = ts.tensor(VALUE[:5], mesh=MESH, layout="[5@tp, 4]").jax()
    assert padded.shape == (8, 4)


# -- NumPy and DLPack -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.float64, "f32"), (np.int64, "i32"), (np.uint16, "i32"), (np.bool_, "bool"),
        (np.float16, "f16"), (ml_dtypes.bfloat16, "bf16"), (ml_dtypes.float8_e4m3fn, "f8e4m3"),
        (np.uint8, "u8"),
    ],
)  # fmt: skip
def test_numpy_both_ways(given: Any, dtype: str) -> None:
    x = np.arange(6).reshape(2, 3).astype(given)
    t = ts.tensor(x, mesh=MESH, layout="[2@dp, 3@tp]")
    assert t.dtype.name == dtype
    np.testing.assert_array_equal(np.asarray(t).astype(np.float64), x.astype(np.float64))


def test_numpy_operators_take_the_tensor() -> None:
    t = ts.tensor(VALUE)
    for got, want in (
        (VALUE + t, VALUE + VALUE),
        (VALUE.T @ t, VALUE.T @ VALUE),
        (7 // (t + 1.0), 7 // (VALUE + 1)),
        (7 % (t + 1.0), 7 % (VALUE + 1)),
    ):
        assert isinstance(got, ts.Tensor)
        np.testing.assert_allclose(got.numpy(), want)


class Capsule:
    """An array of another library, with no more than the DLPack protocol."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **how: Any) -> Any:
        return self.x.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_dlpack_both_ways() -> None:
    t = ts.tensor(Capsule(VALUE), mesh=MESH, layout="[8@dp, 4@tp]")
    np.testing.assert_array_equal(t.numpy(), VALUE)
    np.testing.assert_array_equal(np.from_dlpack(t), VALUE)  # type: ignore[arg-type]


# -- parts of a mesh ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("part", "ids"),
    [(MESH["tp"], [0, 1, 2, 3]), (MESH["dp"], [0, 4]), (MESH.slice(dp=1), [4, 5, 6, 7]),
     (MESH.slice(tp=range(1, 3)), [1, 2, 5, 6])],
    ids=["tp", "dp", "second row", "two columns"],
)  # fmt: skip
def test_a_part_of_a_mesh_holds_and_computes(part: dist.Mesh, ids: list[int]) -> None:
    axis = part.axes[-1]
    t = ts.tensor(VALUE, mesh=part, layout=f"[8, 4@{axis}]")
    assert sorted(d.id for d in t.jax().devices()) == ids
    total = ts.jit(lambda x: ts.sum(x * x, 1))(t)
    np.testing.assert_allclose(total.numpy(), (VALUE**2).sum(1))
    assert sorted(d.id for d in total.jax().devices()) == ids


def test_a_mesh_larger_than_the_machine_is_inspected_and_not_run() -> None:
    large = dist.Mesh(("dp", "tp"), shape={"dp": 512, "tp": 8})
    w = dist.tensor((4096, 4096), "[4096@dp, 4096@tp]", large)
    assert len(dist.inspect(w).holds) == 4096
    assert w.type.local_shape == (8, 512)
    graph = ts.graph.trace(lambda w: ts.sum(w * w), w)
    assert [n.op for n in graph.nodes][-1] == "all_reduce"
    with pytest.raises(ts.BackendError, match="needs 4096 devices"):
        w.numpy()


# -- how devices start ----------------------------------------------------------------------------
def python(code: str, **environment: str) -> str:
    """The output of a new process, with its errors."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TESSERA_", "XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_importing_needs_no_jax_and_devices_start_by_themselves() -> None:
    out = python(
        "import sys, tessera as ts\n"
        "mesh = ts.dist.Mesh(('dp',), devices=12)\n"
        "w = ts.dist.tensor((24, 2), '[24@dp, 2]', mesh, init='ones')\n"
        "print('jax' in sys.modules, ts.dist.inspect(w).type.local_shape)\n"
        "print(w.numpy().sum(), ts.mesh.auto().size)\n"
    )
    assert out == "False (2, 2)\n48.0 12\n"


def test_the_switch_says_how_many_devices() -> None:
    out = python(
        "import tessera as ts\n"
        "print(ts.mesh.auto().size)\n"
        "try:\n"
        "    ts.tensor([1.0, 2.0], mesh=ts.dist.Mesh(('dp',), devices=4)).numpy()\n"
        "except ts.BackendError as error:\n"
        "    print(error)\n",
        TESSERA_DEVICES="3",
    )
    assert out == (
        "3\n"
        "mesh: needs 4 devices, this machine has 3\n"
        "  backend : 3 x cpu\n"
        "  at      : <string>:4\n"
        "  fix     : mesh.fold(onto=2), a smaller mesh,"
        " or TESSERA_DEVICES=4 (virtual CPU devices)\n"
    )


def test_where_jax_ran_first_it_is_said_what_helps() -> None:
    out = python(
        "import jax, tessera as ts\n"
        "jax.numpy.ones(3)\n"
        "try:\n"
        "    ts.tensor([1.0, 2.0], mesh=ts.dist.Mesh(('dp',), devices=2)).numpy()\n"
        "except ts.BackendError as error:\n"
        "    print(error)\n",
        TESSERA_DEVICES="3",
    )
    assert "mesh: needs 2 devices, this machine has 1\n" in out
    assert out.endswith(
        'make the mesh, or call jax.config.update("jax_num_cpu_devices", 2), before the first array'
        " of jax, which started the backend\n"
    )


def test_a_switch_that_is_no_number_is_named() -> None:
    out = python("import tessera as ts; ts.mesh.auto()", TESSERA_DEVICES="many")
    assert "tessera.UsageError: TESSERA_DEVICES: 'many' is not a number of at least 1" in out
    assert "fix : set TESSERA_DEVICES=8" in out


def test_functions_of_jax_lax_say_what_to_write() -> None:
    x = ts.ones((4,))
    for call in (
        lambda: jax.lax.stop_gradient(x),
        lambda: jax.lax.cond(True, lambda x: x, lambda x: -x, x),
        lambda: jax.lax.scan(lambda c, x: (c + x, c), ts.tensor(0.0), x),
    ):
        with pytest.raises(ts.TesseraError, match="of JAX does not compute with a Tensor"):
            call()
    assert isinstance(jax.numpy.ones(4) + x, ts.Tensor)
