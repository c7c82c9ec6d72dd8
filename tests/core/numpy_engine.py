"""An engine of NumPy for tests that need no jax: the oracle runs every program."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tessera import graph
from tessera.core.devices import planned_kind
from tessera.core.dtypes import held_as
from tessera.core.layout import TensorType, plain
from tessera.ir.graph.oracle import evaluate
from tessera.ir.graph.verify import verify
from tessera.ir.schedule.schedule import Schedule
from tessera.passes.plan import scheduled
from tessera.passes.simplify import simplify


class Program:
    """A graph that the oracle runs; layouts have no effect beyond its types."""

    def __init__(self, g: graph.Graph) -> None:
        self.graph = g
        self.types = tuple(n.type.on(g.mesh) for n in g.outputs)
        self.wants = tuple(n.type.on(g.mesh) for n in g.inputs)

    def start(self) -> None:
        """A no-op, since there are no devices."""

    def __call__(self, args: Sequence[Any], have: Any, done: Any = None) -> list[Any]:
        done = [] if done is None else done
        done.append(evaluate(self.graph, args))
        return list(done[-1])


class Oracle:
    """NumPy's implementation of the engine interface in `lang/value/engine.py`."""

    compiled = 0

    def start(self, mesh: Any) -> None:
        """A no-op, since there are no devices."""

    def compile(self, g: graph.Graph, donate: Sequence[int] = ()) -> Program:
        self.compiled += 1
        g = simplify(g)
        verify(g, "simplify")
        return Program(g)

    def step_by_step(self, s: Schedule) -> Any:
        """A pipeline that can be inspected, but not run."""
        s = scheduled(s)
        types = [[s.buffers[b] for b in ids] for ids in (s.outputs, s.inputs)]
        return SimpleNamespace(schedule=s, types=types[0], wants=types[1])

    def place(self, value: Any, type: TensorType) -> Any:
        return np.asarray(value, type.dtype.numpy).reshape(type.shape)

    def fetch(self, data: Any, type: TensorType) -> Any:
        return np.asarray(data)

    def picked(self, data: Any, type: TensorType, at: Sequence[Any]) -> Any:
        return np.asarray(data)[np.ix_(*at)]

    def alive(self, data: Any, type: TensorType) -> Any:
        return data

    def adopt(self, data: Any, mesh: Any) -> TensorType:
        return plain(held_as(data.dtype), data.shape, mesh)

    def is_array(self, value: object) -> bool:
        return False

    def no_fused_attention(self, causal: bool, *types: TensorType) -> str:
        narrow = all(t.dtype.bytes == 2 for t in types)
        return "" if planned_kind() == "gpu" and narrow else "there is no GPU, or it takes no f32"

    def opened(self, value: object) -> None:
        return None
