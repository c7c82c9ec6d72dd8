"""`dist.inspect`: the transports of tokens, sums and pipeline stages, whatever was requested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tests.core.numpy_engine import Oracle

pytestmark = pytest.mark.usefixtures("oracle")
RNG = np.random.default_rng(6)
MESH = dist.Mesh(("ep",), devices=4)
NAMES = ("nccl", "nvshmem", "deepep", "auto")
PUTS = "kernels with puts (GPUs with NVSHMEM), or permutes"


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


EXPERTS = {"router": normal(8, 4), "up": normal(4, 8, 6), "down": normal(4, 6, 8)}
SERVED = "XLA's all_to_all (NCCL between GPUs, shared memory or gloo between CPUs)"


def tokens() -> ts.Tensor:
    return ts.tensor(normal(8, 8), mesh=MESH, layout="[8@ep, 8]")


def moe(x: ts.Tensor, **options: Any) -> Any:
    return op.moe(x, EXPERTS, capacity=2.0, groups=1, **options)


def test_a_result_says_what_made_it() -> None:
    y = moe(tokens(), k=1, transport={"type": "deepep", "pack_dtype": "fp8_e4m3"})
    (did,) = dist.inspect(y).experts
    assert (did.transport.type, did.served_by, did.k, did.axes) == ("deepep", SERVED, 1, ("ep",))
    assert did.dispatch[0].devices == 4 and did.dispatch[0].wire_bytes
    assert str(dist.inspect(y)).endswith(str(did))
    assert dist.inspect(y + 1.0).experts == () == dist.inspect(tokens()).experts


@pytest.mark.parametrize("backend", NAMES)
def test_a_call_takes_from_the_schedule_what_it_leaves_open(backend: str, oracle: Oracle) -> None:
    @ts.schedule(comm_backend=backend, epoch="hard")
    def f(x: ts.Tensor) -> Any:
        own = {"type": "nccl", "epoch": "soft"}
        return moe(x), moe(x, transport=own), moe(x, transport={"bucket_bytes": 64}), ts.sum(x)

    a, b, *_ = f(tokens())
    np.testing.assert_array_equal(a.numpy(), b.numpy())
    report = dist.inspect(f)
    said = [(m.transport.type, m.transport.epoch) for m in report.experts]
    assert said == [(backend, "hard"), ("nccl", "soft"), (backend, "hard")]
    assert report.experts[2].buckets > 1 == report.experts[0].buckets
    lines = str(report).splitlines()
    assert lines[1].startswith(f"  requested {backend}: ")
    by = "XLA's collectives" if backend != "nvshmem" else PUTS
    assert lines[2] == f"  served by {by} (NCCL between GPUs, shared memory or gloo between CPUs)"


def test_where_nothing_moves_nothing_serves() -> None:
    f = ts.schedule(comm_backend="gloo")(lambda x: x * 2.0)
    f(normal(2))
    assert str(dist.inspect(f)).splitlines()[1:] == [
        "  requested gloo: its own collectives",
        "  served by nothing: nothing moves",
        "  no collectives",
    ]


def test_training_steps_are_inspected_too() -> None:
    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        loss = ts.mean(moe(x) ** 2)
        return ts.grad(loss, x), loss

    step(tokens())
    assert [m.experts for m in dist.inspect(step).experts] == [4]
