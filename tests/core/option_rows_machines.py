"""Rows of the option table: the meshes of described machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tessera as ts
from tessera.core import devices
from tessera.core.layout import parse_type
from tessera.core.machine.share import mesh_ranks
from tessera.core.machine.visible import visible_count
from tests.core.option_rows import row

TWO_MESHES = Path(__file__).parents[1] / "golden" / "machines" / "two_meshes.textproto"

row("tessera.mesh.from_descriptor", ts.mesh.from_descriptor, {"source": TWO_MESHES},
    source="t3000", axes=("pp", "dp", "tp"), shape=(4, 2, 2), mesh_id=1)  # fmt: skip
row("tessera.mesh.preset", lambda **k: ts.mesh.preset("dgx_h100", **k), {},
    axes=("dp", "tp"), shape=(2, 4), nodes=2)  # fmt: skip


def ranks_of_mesh(**variables: str) -> object:
    """The ranks of the mesh in the second of two processes."""
    before = [*devices._providers]
    devices._providers[:] = [(lambda: 2, lambda: (1, 2), lambda: "cpu")]
    try:
        return mesh_ranks(variables)
    finally:
        devices._providers[:] = before


row("environment of ranks", ranks_of_mesh, {}, TESSERA_MESHES="0.0,1.0")
row("environment of visible devices", lambda **k: visible_count(8, k), {},
    TESSERA_VISIBLE_DEVICES="0,1")  # fmt: skip


def plan_report(**how: object) -> object:
    """The numbers of a report of a sum over eight devices."""
    mesh = ts.dist.Mesh(("dp",), devices=8)
    x = parse_type("f32[8@dp, 64]", mesh)
    return ts.plan.report(lambda x: ts.sum(x), x, cluster="h100x8", **how).data()


row("tessera.plan.report", plan_report,
    {"tokens": 8, "budget_tokens": 1e9, "price_per_device_hour": 2.0},
    tokens=16, budget_tokens=1e6, price_per_device_hour=1.0)  # fmt: skip


def plan_best(**how: object) -> object:
    """The candidates and choices of a search for a product over eight devices."""

    def build(mesh: Any, strategy: Any, *, width: int) -> Any:
        w = ts.dist.place({"w": ts.nn.Parameter(width, 64)}, strategy, mesh)
        x = ts.dist.tensor((64, width), mesh=mesh, layout=f"[64@dp, {width}]")
        return ts.jit(lambda w, x: ts.sum(x @ w["w"])), (w, x)

    found = ts.plan.best(build, cluster="h100x8", **{"choices": {"width": (64,)}, **how})
    return found.choices, sorted(found.dropped)


row("tessera.plan.best", plan_best, choices={"width": (128,)}, limit_s=1e-9)
