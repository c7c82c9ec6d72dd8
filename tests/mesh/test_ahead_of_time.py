"""Compilation for described GPUs, as far as it needs no compiler for them: tests/gpu_aot."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import schedule
from tessera.core.devices import platform
from tessera.core.errors import BackendError
from tessera.core.layout import parse_type
from tessera.core.mesh import Mesh
from tessera.ir.schedule.schedule import Schedule
from tessera.lang.jit.trace import trace
from tessera.passes.plan import plan
from tessera.runtime import ahead_of_time, devices
from tessera.runtime.compile_options import LIBRARIES, SEPARATE_COLLECTIVES, compiler_options
from tessera.runtime.compiled_text import read

TEXT = """\
HloModule step, is_scheduled=true, input_output_alias={ {1}: (0, {}, may-alias), {0}: (2, {}) }

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum.1 = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x.1 = f32[8]{0} get-tuple-element(%p), index=1
  %sum = f32[8]{0} all-reduce(%x.1), to_apply=%add
  ROOT %t.1 = (s32[], f32[8]) tuple(%i, %sum)
}

ENTRY %main (x: bf16[8,8], y: f32[8]) -> (f32[8], bf16[8,8]) {
  %x = bf16[8,8]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %g = (bf16[1,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%x), backend_config={"is_sync":true}
  %gathered = bf16[8,8]{1,0} all-gather-done(%g)
  %two = (bf16[8,4]{1,0}, f32[4]{0}) reduce-scatter-start(%x, %y), to_apply=%add
  %named = bf16[64]{0} bitcast(%gathered)
  %dot.1 = bf16[8,8]{1,0} custom-call(%named, %x), custom_call_target="__cublas$lt$matmul"
  %wide = f32[8,8]{1,0} dot(%y, %y), metadata={op_name="jit(step)/loss"}
  %scattered = (bf16[8,4]{1,0}, f32[4]{0}) reduce-scatter-done(%two)
  %loop = (s32[], f32[8]) while(%t), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %print = () custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"
  %far = f32[8]{0:S(5)} copy(%y)
  ROOT %out = (f32[8], bf16[8,8]) tuple(%y, %dot.1)
}
"""


def test_the_text_of_a_program_is_read() -> None:
    found = read(TEXT)
    gather, scatter, add = found.collectives
    assert (gather.kind, gather.bytes, gather.blocking, gather.overlaps) == (
        "all_gather", 128, True, False,
    )  # fmt: skip
    assert (gather.start, gather.used) == (2, 6)  # under another name, by the product
    assert (scatter.bytes, scatter.arrays, scatter.products) == (80, ("bf16", "f32"), 2)
    assert scatter.overlaps and [x.name for x in scatter.between] == ["dot.1", "wide"]
    assert (add.kind, add.times, add.bytes, add.overlaps) == ("all_reduce", 5, 32, False)
    assert [(p.given, p.made) for p in found.products] == [
        (("bf16", "bf16"), "bf16"), (("f32", "f32"), "f32"),
    ]  # fmt: skip
    assert found.products[1].op_name == "jit(step)/loss"
    assert found.host == ("print", "far")
    assert found.reused == {1: 0, 0: 2}


def test_a_callback_of_a_compiled_program_is_seen() -> None:
    def f(x: Any) -> Any:
        jax.debug.callback(print, x)
        return x

    compiled = jax.jit(f).lower(np.ones(4, np.float32)).compile()
    assert len(read(compiled.as_text()).host) == 1
    assert not read(jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()).host


@pytest.fixture
def gpus() -> Iterator[None]:
    """Two devices that are described as GPUs."""
    devices.DESCRIBED.append([SimpleNamespace(platform="gpu", device_kind="H100")] * 2)  # type: ignore[list-item]
    yield
    devices.DESCRIBED.pop()


def test_programs_are_recorded_for_the_described_devices(gpus: None) -> None:
    assert platform() == "gpu" and devices.device_count() == 2
    with pytest.raises(BackendError) as caught:
        devices.start_for(Mesh.parse("dp=4"))
    first, backend, *_, fix = str(caught.value).splitlines()
    assert first == "mesh: needs 4 devices, the described machine has 2"
    assert backend == "  backend : 2 x H100"
    assert fix.endswith("mesh.fold(onto=2), a smaller mesh, or a description of more devices")
    q = ts.ones((1, 4, 128, 64), ts.bf16)
    with pytest.raises(BackendError, match="compiled on a GPU only, not ahead of time"):
        ts.nn.flash_attention(q, q, q, implementation="cudnn")


def test_collectives_stay_as_they_are_where_their_order_is_chosen(gpus: None) -> None:
    def scheduled(how: dict[str, Any]) -> Schedule:
        step: Any = ts.jit(lambda w, x: ts.grad(((x @ w) ** 2).sum(), w))
        w, x = (parse_type(t, Mesh.parse("dp=2")) for t in ("f32[8, 8]", "f32[8@dp, 8]"))
        graph = trace(schedule(**how)(step) if how else step, w, x)
        return plan(graph)

    vendor = LIBRARIES["vendor"]
    assert compiler_options(scheduled({}), True) == vendor
    for how in ({"overlap": True}, {"overlap": False}, {"prefetch": 1}, {"bucket_bytes": 1}):
        assert compiler_options(scheduled(how), True) == {**vendor, **SEPARATE_COLLECTIVES}


@pytest.mark.skipif(not ahead_of_time.why_not(), reason="the compiler for GPUs is here")
def test_without_the_wheels_an_error_says_how_to_get_them() -> None:
    with pytest.raises(BackendError) as caught, ahead_of_time.described("h200", 8):
        pass
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith("ahead of time: the engine has no compiler for GPUs: ")
    assert "make check-gpu-aot installs the wheels" in last
