"""Guide 3, the tutorial: the reader's values, and the checks of its blocks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, graph

Space = dict[str, Any]
RNG = np.random.default_rng(0)
BATCH = {"input": RNG.normal(size=(8, 4, 16)).astype(np.float32),
         "labels": RNG.integers(0, 16, (8, 4))}  # fmt: skip


def stages(space: Space) -> dist.Mesh:
    return dist.Mesh(axes=["dp", "pp"], shape={"dp": 2, "pp": 2})


GIVES = {"STAGES": stages}


def the_mesh(space: Space, shown: str) -> None:
    """tensor-parallel × data-parallel, by the nesting of the list"""
    mesh = space["mesh"]
    assert mesh.sizes == {"tp": 2, "dp": 4} and mesh.array().tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def the_table(space: Space, shown: str) -> None:
    """80 GB over tp cost nothing before they are used, and dist.inspect (4.6) tells the layout"""
    rows = str(dist.inspect(space["E"])).splitlines()
    assert "  dim 0     split over tp" in rows
    assert "  a device  (5000000, 4096), 40,960,000,000 bytes" in rows and space["E"]._data is None


def the_op(space: Space, shown: str) -> None:
    """op has the attributes used below"""
    assert space["op"].kernel and space["op"].matmul


def the_collective(space: Space, shown: str) -> None:
    """the sum over dp of each device's product with its columns; dist.profile() (4.6) of one call
    has the transfer and no compilation"""
    x = RNG.normal(size=(3, 8)).astype(np.float32)
    with space["mesh"]:
        y = space["dp_step"](ts.tensor(x, layout="[3, 8@dp]"))
        with dist.profile() as p:
            space["dp_step"](ts.tensor(x, layout="[3, 8@dp]"))
    np.testing.assert_allclose(y.numpy(), x @ x.T, rtol=1e-4, atol=1e-5)
    moved = [r for r in p.rows if r.what == "all_reduce dp"]
    assert moved and moved[0].transfer_s > 0 and not moved[0].compute_s and p.runs == 1
    assert str(p).splitlines()[0].split()[:2] == ["what", "where"]


def the_import(space: Space, shown: str) -> None:
    """graph has the attributes used below"""
    assert space["graph"].stage and space["graph"].pipeline


def a_stage(space: Space, shown: str) -> None:
    """a named part; its twelve blocks get weights when it is first called"""
    assert {space[n].name for n in ("encoder", "decoder") if n in space} <= {"encoder", "decoder"}


def the_pipeline(space: Space, shown: str) -> None:
    """graph.trace (4.6) shows its stages and sends before it has run"""
    s = graph.trace(space["model"], BATCH["input"]).schedule
    assert {x.kind for x in s.steps} >= {"compute", "send"} and {x.stage for x in s.steps} == {0, 1}
    assert s.mesh == space["STAGES"] and space["model"].table.name == "1F1B"


def the_loop(space: Space, shown: str) -> None:
    """a plain batch trains both stages; one warning names the axis that does not split it"""
    step, losses = space["step"], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            grads, metrics = step(BATCH)
            losses.append(metrics["loss"].item())
            step.update({k: w - 0.5 * grads[k] for k, w in step.parameters.items()})
    assert losses[2] < losses[1] < losses[0] and set(grads) == set(step.parameters)
    idle = [str(w.message) for w in said if w.category is ts.StrategyWarning]
    assert len(idle) == 1 and "all devices along 'dp' compute the same" in idle[0]
    assert any("encoder" in k for k in grads) and any("decoder" in k for k in grads)


CHECKS = {
    "3/4.1/code": the_mesh,
    "3/4.2/code": the_table,
    "3/4.3/code": the_op,
    "3/4.3/dp_step": the_collective,
    "3/4.4/code": the_import,
    "3/4.4/encoder": a_stage,
    "3/4.4/decoder": a_stage,
    "3/4.4/model": the_pipeline,
    "3/4.5/step": the_loop,
}
