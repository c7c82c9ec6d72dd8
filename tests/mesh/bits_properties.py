"""Random programs on random meshes and folds: equal bits, and exact integers.

test_bits.py runs this file in its own process, since `TESSERA_DETERMINISTIC` is read before the
engine starts.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import dist, graph
from tessera.core import context, reshard
from tessera.core.context import replaced
from tessera.core.dtypes import bf16, f32
from tessera.core.layout import Factor, TensorType, plain
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.schedule.algorithms.build import FLAT
from tessera.ir.schedule.pipelines.stages import on_mesh
from tessera.lang.program.schedule import options
from tessera.lang.value.engine import engine

SIZES = (2, 3, 4, 6)
DIMS = (1, 3, 4, 6, 8, 12)
MOVES = ("all_gather", "all_to_all", "broadcast")
Draw = Any


@st.composite
def meshes(draw: Draw) -> dist.Mesh:
    """Draws one to three axes of size 2, 3, 4 or 6, with at most 24 devices."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    while np.prod(sizes) > 24:
        sizes.pop()
    return dist.Mesh.parse(" ".join(f"{a}={n}" for a, n in zip("abc", sizes)))


@st.composite
def folds(draw: Draw, mesh: dist.Mesh) -> list[dist.Mesh]:
    """Draws three different folds onto at most 12 devices, one of them onto one device."""
    divisors = {a: [d for d in range(1, n + 1) if n % d == 0] for a, n in mesh.sizes.items()}
    kept = {a: draw(st.sampled_from(ds)) for a, ds in divisors.items()}
    wide = dict(mesh.sizes)
    for sizes in (kept, wide):  # fold the first axes until it fits
        for a in mesh.axes:
            while np.prod(list(sizes.values())) > 12 and sizes[a] > 1:
                sizes[a] = max(d for d in divisors[a] if d < sizes[a])
    found = [mesh.fold(s) for s in (dict.fromkeys(mesh.axes, 1), kept, wide)]
    return list(dict.fromkeys(found))


def layout(draw: Draw, shape: tuple[int, ...], mesh: dist.Mesh) -> TensorType:
    """Draws a layout with any axes on any dims; blocks may be uneven."""
    free = list(draw(st.permutations(mesh.axes)))
    dims = []
    for n in shape:
        k = draw(st.integers(0, min(2, len(free)))) if n > 1 else 0
        dims.append((Factor(n, tuple(free[:k])),))
        del free[:k]
    return TensorType(f32, dims, (), mesh)


class Grown:
    """A random program of up to four ops, each on earlier values."""

    def __init__(self, draw: Draw, mesh: dist.Mesh, whole: bool) -> None:
        self.draw, self.mesh, self.whole = draw, mesh, whole
        self.b = Builder("random", context.settings().program)
        assert self.b.options.mesh_invariant
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.values: list[np.ndarray[Any, Any]] = []
        shape = draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=3))
        self.made = [self.input(tuple(shape))]
        for _ in range(draw(st.integers(1, 4))):
            self.step()

    def input(self, shape: tuple[int, ...]) -> Node:
        x = self.rng.integers(-4, 5, shape) if self.whole else self.rng.normal(size=shape)
        self.values.append(x.astype(np.float32))
        return self.b.input(layout(self.draw, shape, self.mesh), f"x{len(self.values)}")

    def step(self) -> None:
        b, draw = self.b, self.draw
        x = draw(st.sampled_from(self.made))
        shape, dims = x.type.shape, range(x.type.rank)
        d = draw(st.sampled_from(dims)) if shape else 0
        choices = ["add", "mul", "relayout"]
        choices += ["sum", "cumsum", "max", "product", "letters", "take", "put"] if shape else []
        choices += [] if self.whole else ["tanh", "narrow", "prod", "norm"][: 4 if shape else 2]
        what = draw(st.sampled_from(choices))
        if what in ("add", "mul"):
            y = b(what, x, self.input(shape))
        elif what == "relayout":
            y = b.redistribute(x, layout(draw, shape, self.mesh).with_dtype(x.type.dtype), "")
        elif what in ("sum", "max", "prod"):
            y = b(what, x, dims=(d,))
        elif what == "cumsum":
            y = b("cumsum", x, dim=d)
        elif what == "product":  # over dim d, with a matrix
            rest = "".join("ijk"[i] for i in dims if i != d)
            w = self.input((shape[d], draw(st.sampled_from(DIMS))))
            names = "".join("n" if i == d else "ijk"[i] for i in dims)
            y = b("contract", x, w, index=f"{' '.join(names)}, n m -> {' '.join(rest)} m")
        elif what == "letters":  # any of the letters in the other argument, any in the result
            names = ["ijk"[i] for i in dims]
            other = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            out = draw(st.lists(st.sampled_from(names), unique=True))
            w = self.input(tuple(shape[names.index(k)] for k in other))
            index = f"{' '.join(names)}, {' '.join(other)} -> {' '.join(out)}"
            y = b("contract", x, w, index=index)
        elif what in ("take", "put"):
            count = draw(st.sampled_from(DIMS)) if what == "take" else shape[0]
            ids = self.rng.integers(0, shape[0], count).astype(np.int32)
            self.values.append(ids)
            at = b.input(plain(ts.int32, ids.shape, self.mesh), f"x{len(self.values)}")
            y = b("take", x, at, dim=0) if what == "take" else (
                b("put", at, x, dim=0, into=str(draw(st.sampled_from(DIMS))))
            )  # fmt: skip
        elif what == "norm":
            square = b("sum", b("mul", x, x), dims=(d,))
            one = b("full", dtype=x.type.dtype, shape=(), value=1.0)
            root = b("rsqrt", b("add", square, one))
            wide = tuple(1 if i == d else n for i, n in enumerate(shape))
            y = b("mul", x, b("reshape", root, shape=wide))
        elif what == "tanh":
            y = b("tanh", x)
        else:
            y = b("cast", b("cast", x, dtype=bf16), dtype=f32)
        self.made.append(y)

    def graph(self) -> Graph:
        return self.b.graph([self.b.redistribute(n, whole(n.type), "") for n in self.made[1:]])


def whole(t: TensorType) -> TensorType:
    return reshard.completed(t, t.partial_axes).replicated()


def run(g: Graph, values: list[Any], mesh: dist.Mesh) -> list[Any]:
    g = on_mesh(g, mesh)
    data = [engine().place(x, n.type) for x, n in zip(values, g.inputs, strict=True)]
    program = engine().compile(g)
    outs = program(data, tuple(n.type for n in g.inputs))
    return [engine().fetch(o, t) for o, t in zip(outs, program.types, strict=True)]


BOUND = settings(
    max_examples=int(os.environ.get("TESSERA_TEST_BITS_EXAMPLES", "12")), deadline=None,
    derandomize=True, database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip


@BOUND
@given(st.data())
def bits_stay(data: Any) -> None:
    """Asserts that float data has the same bits on all folds, with any collective algorithm."""
    mesh = data.draw(meshes())
    moves = options(algorithm=dict.fromkeys(MOVES, data.draw(st.sampled_from(("engine", *FLAT)))))
    order = data.draw(st.sampled_from(("binary", "ring")))
    with dist.deterministic(order), replaced(schedule=moves):
        grown = Grown(
            data.draw, mesh, whole=False
        )  # a program's options are those of its recording
        g = grown.graph()
        found = {m.physical.text(): run(g, grown.values, m) for m in data.draw(folds(mesh))}
    first = next(iter(found.values()))
    for where, outs in found.items():
        for n, x, y in zip(g.outputs, first, outs, strict=True):
            assert x.tobytes() == y.tobytes(), f"{mesh.text()} onto {where}: {n}\n{g}"


@BOUND
@given(st.data())
def whole_numbers_are_exact(data: Any) -> None:
    """Asserts that integers equal the oracle's on every fold."""
    mesh = data.draw(meshes())
    grown = Grown(data.draw, mesh, whole=True)
    g = grown.graph()
    want = graph.evaluate(g, grown.values)
    assume(all(np.abs(x).max(initial=0) < 2**20 for x in want))  # exact integers of f32
    for m in data.draw(folds(mesh)):
        for n, x, y in zip(g.outputs, want, run(g, grown.values, m), strict=True):
            np.testing.assert_array_equal(y, np.asarray(x), err_msg=f"{m!r}: {n}\n{g}")


if __name__ == "__main__":
    bits_stay()
    whole_numbers_are_exact()
    print("the same bits")
