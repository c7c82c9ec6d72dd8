"""Guide 2, Collectives & Distributed Systems: sections 2 and 3, and their statements."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, op, pipeline
from tests.cases import LONG
from tests.guide.apart import inputs
from tests.guide.blocks import guide_2
from tests.guide.reading import in_order
from tests.guide.runner import guide_path

PUTS = "kernels with puts (GPUs with NVSHMEM), or permutes"
TRANSPORT_NAMES = ("nccl", "nvshmem", "deepep", "auto")  # 2.3
RNG = np.random.default_rng(8)


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def test_a_mesh_of_48() -> None:
    mesh = in_order(2, {}, ("2.1",))["mesh"]
    assert mesh.topology == "dp × tp × pp mesh, 4 × 4 × 3" and mesh.size == 48
    assert mesh.coords(47) == {"dp": 3, "tp": 3, "pp": 2}
    assert [len(mesh.groups(a)) for a in mesh.axes] == [12, 12, 16]


# -- 3.1, and 4: the same bits ---------------------------------------------------------------------
@LONG
def test_data_parallel_gradients_are_the_same_bits_on_any_devices() -> None:
    """In a fresh process without settings; also for guide 1, 7.8."""
    if guide_path(2) is None:
        pytest.skip("guide 2 is not beside the repository")
    env = {**os.environ, "TESSERA_COMM_TRACE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.guide.apart"], env=env, capture_output=True, text=True,
        timeout=400, cwd=Path(__file__).resolve().parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    runs: dict[str, list[str]] = {}
    for line in told:
        _, name, _devices, result = line.split(maxsplit=3)
        runs.setdefault(name, []).append(result)
    assert set(runs) == {"guide", "trained"}
    for name, results in runs.items():
        assert len(results) == 3 and len(set(results)) == 1, name

    x, w, labels = inputs()
    out = x @ w
    p = np.exp(out - out.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    loss = -np.log(p[np.arange(len(labels)), labels]).mean()
    assert float(runs["guide"][0].split()[0]) == pytest.approx(loss, rel=1e-6)
    # the trace: gradients are summed once, by the all_reduce that the text writes (bytes a device)
    sums = [row for row in done.stdout.splitlines() if row.startswith("redistribute: all_reduce")]
    assert [row.split("receives ")[1].split("  :")[0] for row in sums] == [
        "1.6 KiB",
        "924 B",
        "0 B",
    ]


# -- 3.2 -----------------------------------------------------------------------------------------
def test_tensor_parallel_matmul_and_gather() -> None:
    mesh = dist.Mesh(["tp", "dp"], devices=range(16)).fold(onto=8)
    x = normal(8, 16)
    space = in_order(
        2, {"H": 16, "X": ts.tensor(x, mesh=mesh, layout="[8@dp, 16]")}, ("3.2",)
    )  # fmt: skip
    assert str(space["W"].type) == "f32[16, 64@tp]" and space["mesh"] == mesh
    assert str(space["Y"].type) == "f32[8@dp, 64]"
    np.testing.assert_allclose(space["Y"].numpy(), x @ space["W"].numpy(), rtol=1e-5, atol=1e-5)


# -- 3.3 -----------------------------------------------------------------------------------------
def test_pipeline_of_four_stages() -> None:
    weights = [normal(16, 16) / 4 for _ in range(4)]
    stages = {f"b{i}": lambda x, w=w: ts.tanh(x @ w) for i, w in enumerate(weights)}
    space = in_order(2, stages, ("3.3",))
    x = want = normal(32, 16)
    for w in weights:
        want = np.tanh(want @ w)
    step, pipe = space["step"], space["pipe"]
    with dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 4}), warnings.catch_warnings():
        warnings.simplefilter("error")  # 16 microbatches are enough
        np.testing.assert_allclose(step(x).numpy(), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pipe(x).numpy(), want, rtol=1e-5, atol=1e-6)
    assert (step.table.name, step.table.stages, step.table.microbatches) == ("1F1B", 4, 16)
    assert pipe.table.stages == 4 and pipe.sizes == [1, 1, 1, 1]


def test_few_microbatches_are_warned_of() -> None:
    """The tip of 3.3: microbatches >= 2x stages."""

    @pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=2)
    def model(x: Any) -> Any:
        return ts.tanh(ts.tanh(x * 2.0) * 3.0)

    with (
        dist.Mesh(("pp",), devices=2),
        pytest.warns(pipeline.PipelineWarning, match="2 microbatches"),
    ):
        model(normal(4, 8))


# -- 3.4: experts on 64 places ---------------------------------------------------------------------
D, H, EXPERTS = 128, 16, 16


def experts() -> dict[str, Any]:
    return {"router": normal(D, EXPERTS), "up": normal(EXPERTS, D, H) / 10,
            "down": normal(EXPERTS, H, D) / 4}  # fmt: skip


@LONG
def test_experts_over_64_places() -> None:
    mesh = dist.Mesh(axes=["ep", "dp"], devices=range(64)).fold(onto=8)
    x, weights = normal(64, 4, D), experts()
    given = {"x": ts.tensor(x, mesh=mesh, layout=f"[64@(dp,ep), 4, {D}]"), "experts": weights}
    with pytest.warns(ts.OptionWarning, match="multi_qp=True has no effect"):
        space = in_order(2, given, ("3.4",))
    y, mesh = space["y"], space["mesh"]
    assert mesh.shape == (8, 8) and mesh.physical.size == 8 and str(y.type) == str(given["x"].type)
    want = op.moe(ts.tensor(x), weights, k=2, deterministic=True).numpy()
    # payloads of 8 bits: docs/experts.md allows 8 % of the largest value
    assert np.abs(y.numpy() - want).max() < 0.08 * np.abs(want).max()

    (did,) = dist.inspect(y).experts
    assert did.transport.type == "nvshmem" and did.transport.multi_qp
    assert (did.experts, did.k, did.axes) == (EXPERTS, 2, ("ep",))
    assert did.dispatch[0].devices == 8 and did.dispatch[0].wire_bytes
    text = str(dist.inspect(y))
    for line in (
        "  requested nvshmem: puts and gets that GPUs start themselves",
        f"  served by {PUTS} (NCCL between GPUs, shared memory or gloo between CPUs)",
        "  payload   fp8_e4m3, 1 buckets, soft epochs",
    ):
        assert line in text.splitlines()

    step = space["train_step"]
    with pytest.warns(ts.OptionWarning, match="pipeline=True has no effect: train_step calls no"):
        np.testing.assert_array_equal(step({}).numpy(), y.numpy())
    chosen = step.compiled.choices
    assert (chosen.pipeline, chosen.overlap, chosen.backend) == (True, True, "nvshmem")
    assert chosen.epoch == "soft" and chosen.text() in step.compiled.schedule.text


def test_a_transport_changes_no_result_and_inspect_says_what_serves() -> None:
    mesh, weights = dist.Mesh(("dp", "ep"), shape={"dp": 2, "ep": 4}), experts()
    x = ts.tensor(normal(16, 4, D), mesh=mesh, layout=f"[16@(dp,ep), 4, {D}]")

    @ts.jit
    def each(x: ts.Tensor) -> list[ts.Tensor]:
        return [op.moe(x, weights, k=2, transport=t, capacity=2.0) for t in TRANSPORT_NAMES]

    results = [y.numpy() for y in each(x)]
    assert all(np.array_equal(y, results[0]) for y in results)
    found = dist.inspect(each).experts
    assert [m.transport.type for m in found] == list(TRANSPORT_NAMES)
    served = [PUTS if m.transport.type == "nvshmem" else "XLA's all_to_all" for m in found]
    assert all(
        s in m.served_by and len(m.dispatch) == 1 for s, m in zip(served, found, strict=True)
    )


@pytest.mark.parametrize("backend", TRANSPORT_NAMES)
def test_a_scheduled_step_takes_each_transport(backend: str) -> None:
    mesh, weights = dist.Mesh(("ep",), devices=4), experts()
    x = ts.tensor(normal(8, 4, D), mesh=mesh, layout=f"[8@ep, 4, {D}]")

    @ts.schedule(comm_backend=backend, epoch="hard", overlap=True)
    def step(x: ts.Tensor) -> ts.Tensor:
        y = op.moe(x, weights, k=2, capacity=2.0, groups=4, transport={"bucket_bytes": 4096})
        return ts.mean(y * y)

    if backend in ("auto", "nvshmem"):
        step(x)
    else:
        with pytest.warns(ts.OptionWarning, match=f"comm_backend='{backend}' has no effect"):
            step(x)
    report = dist.inspect(step)
    (did,) = report.experts
    assert report.backend == backend == did.transport.type
    assert did.transport.epoch == "hard" and did.buckets > 1
    served = PUTS if backend == "nvshmem" else "XLA's collectives"
    assert f"requested {backend}: " in str(report) and f"served by {served}" in str(report)
    assert f"backend={backend} epoch=hard" in step.compiled.schedule.text


# -- 5.2 -------------------------------------------------------------------------------------------
def test_an_epoch_that_loses_a_device() -> None:
    space: dict[str, Any] = {}
    give = {"train_epoch": guide_2.GIVES["train_epoch"](space)}
    in_order(2, give, ("5.2",))
    guide_2.the_epoch(space, "")
