"""Messages: a method like its function, a pipeline that cannot run, a strategy without effect."""

from __future__ import annotations

import tessera as ts
from tessera import dist, graph

from .rows import row


@row(
    "asks for the largest along an empty dim with the method",
    error=ts.ShapeError,
    says="max: dim 0 has no elements",
)
def _() -> object:
    return ts.zeros((0, 3)).max(0)


@row(
    "asks for the least of no elements with the method",
    error=ts.ShapeError,
    says="min: dim 0 has no elements",
)
def _() -> object:
    return ts.zeros((0,)).min()


@row(
    "calls a pipeline in the body of ts.distribute",
    error=ts.UsageError,
    says="model: a pipeline is called in a loop or a local body",
)
def _() -> object:
    @graph.pipeline(stages=[lambda x: x * 2, lambda x: x.sum(-1)], axis="pp")
    def model(x: ts.Tensor) -> ts.Tensor: ...  # type: ignore[empty-body]

    @ts.distribute(mesh_axes="dp", mesh=dist.Mesh.parse("dp=2 pp=2"))
    def body(x: ts.Tensor) -> ts.Tensor:
        return model(x)

    return body(ts.ones((8, 4)))


@row(
    "writes a strategy that splits nothing",
    warns=ts.StrategyWarning,
    says="strategy 'Idle' over 'tp' leaves 128 of 128 bytes of weights whole",
)
def _() -> object:
    class Idle(dist.AxisStrategy):
        splits_batch = False

    return dist.place({"w": ts.ones((8, 4))}, Idle("tp"), dist.Mesh.parse("tp=4"))
