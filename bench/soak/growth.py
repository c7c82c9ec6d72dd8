"""The growth of recording and compilation with the size of a program, one line per part.

An exponent of 1 is linear; it compares the processor time of models with 48 and 384 layers, in
training steps without a loop over layers. Resharding is measured on 300 random pairs of layouts on
six axes.
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import tessera as ts
from tessera import nn, optim
from tessera.core.dtypes import f32
from tessera.core.layout import Factor, TensorType
from tessera.core.mesh import Mesh
from tessera.core.reshard import steps_between
from tessera.cost.memory import memory_plan
from tessera.ir.schedule.build import build_schedule
from tessera.lang.jit.trace import trace
from tessera.passes.simplify import simplify

FEW, MANY, WIDTH = 48, 384, 16
MOST = 1.3
"""The largest exponent that is taken for linear: caches of the processor and collections of memory
cost more for the larger one."""
LONGEST_S = 1.0


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `run`, and the least processor seconds of two runs."""
    best = math.inf
    for _ in range(2):
        gc.collect()
        begin = time.process_time()
        out = run()
        best = min(best, time.process_time() - begin)
    return out, best


def parts_of(layers: int) -> dict[str, float]:
    """The seconds of each part, for a model of `layers` layers."""
    weights: dict[str, ts.Tensor] = {}
    for i in range(layers):
        weights |= {f"norm{i}": ts.ones((WIDTH,)), f"up{i}": ts.ones((WIDTH, 4 * WIDTH))}
        weights |= {f"down{i}": ts.ones((4 * WIDTH, WIDTH))}
    optimizer = optim.AdamW(0.01)
    state = optimizer.init(weights)

    def step(w: Any, state: Any, x: Any) -> Any:
        h = x
        for i in range(layers):
            h = h + nn.gelu(h * w[f"norm{i}"] @ w[f"up{i}"]) @ w[f"down{i}"]
        loss = (h**2).mean()
        return loss, *optimizer.update(w, ts.grad(loss, w), state)

    out: dict[str, float] = {}
    graph, out["record"] = timed(lambda: trace(step, weights, state, ts.ones((8, WIDTH))))
    graph, out["simplify"] = timed(lambda: simplify(graph))
    _, out["schedule"] = timed(lambda: build_schedule(graph))
    _, out["memory, donated"] = timed(lambda: memory_plan(graph))
    _, out["memory, kept"] = timed(lambda: memory_plan(graph, donated=False))
    return out


def ways_s(count: int = 300) -> list[float]:
    """The seconds to plan each of `count` reshardings between random layouts, in order."""
    sizes = {"a": 2, "b": 4, "c": 8, "d": 3, "e": 2, "f": 16}
    mesh = Mesh(tuple(sizes), shape=sizes)
    draw = random.Random(0)
    found = []

    def layout() -> TensorType:
        dims: list[list[str]] = [[], [], []]
        open_ = []
        for axis in draw.sample([*sizes], len(sizes)):
            where = draw.randrange(5)
            if where < 3:
                dims[where].append(axis)
            elif where == 3:
                open_.append((axis, "sum"))
        size = math.prod(sizes.values())
        return TensorType(f32, tuple((Factor(size, tuple(d)),) for d in dims), tuple(open_), mesh)

    for _ in range(count):
        src, dst = layout(), layout()
        dst = dst.with_partial(())
        begin = time.process_time()
        steps_between(src, dst)
        found.append(time.process_time() - begin)
    return sorted(found)


def main() -> int:
    parts_of(4)  # imports and fills caches
    few, many = parts_of(FEW), parts_of(MANY)
    exponents = {n: math.log(many[n] / few[n]) / math.log(MANY / FEW) for n in many}
    ways = ways_s()
    if "--json" in sys.argv:
        each_s, most_s = ways[len(ways) // 2], ways[-1]
        print(json.dumps({"few": FEW, "many": MANY, "seconds": many, "exponents": exponents,
                          "way_s": each_s, "longest_way_s": most_s}))  # fmt: skip
        return 0
    for name, seconds in many.items():
        text = f"exponent {exponents[name]:.2f}, {seconds:.2f} s at {MANY} layers"
        print(f"growth, {name}: {text}", flush=True)
    each_ms, most_ms = ways[len(ways) // 2] * 1e3, ways[-1] * 1e3
    print(f"growth, a way between layouts of six axes: {each_ms:.0f} ms, {most_ms:.0f} at most")
    return sum(e > MOST for e in exponents.values()) + (ways[-1] > LONGEST_S)


if __name__ == "__main__":
    sys.exit(main())
