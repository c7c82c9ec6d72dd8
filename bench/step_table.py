"""The profile of Tessera's training step, with each part's distance from its floor.

A step of the demo's GPT on one core: the profiler's time of each instruction of the compiled
program, by part of the model, beside the least time of its products and bytes here. A product's
floor is a plain product of its sizes, measured alone; that of any other instruction is a copy of as
many bytes as it reads and writes. Run it: `python bench/step_table.py f32` (or bf16) prints one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import numpy as np
from few_devices import start_few
from gpt_step import ours
from hlo_text import Instruction, Product, read
from jax import lax
from peers import jax_gpt

from tessera import compile as engine
from tessera.ir.graph.node import Graph, reachable
from tessera.ir.schedule.schedule import Loop, Schedule
from tessera.runtime.arrays import array_shape, sharding
from tessera.runtime.interpreter import Interpreter
from tessera.runtime.lower import lower

FORWARD, BACKWARD, UPDATE = "forward", "backward", "optimizer"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MARK = re.compile(r"Of-(\w+)-([\w.]*)-Of")  # the engine cuts names at other characters
MOST_PRODUCTS = 8  # the products listed one by one


# -- what each instruction is part of -------------------------------------------------------------
def passes(schedule: Schedule) -> dict[int, str]:
    """The pass of each node of `schedule`, by id. The forward pass is all that the first result,
    the loss, needs."""
    found: dict[int, str] = {}

    def put(graph: Graph, ahead: set[Any]) -> None:
        for n in graph.nodes:
            own = FORWARD if n in ahead else UPDATE if UPDATE in n.scope else BACKWARD
            found[id(n)] = own
            for body in (v for v in n.attrs.values() if isinstance(v, Graph)):
                put(body, set(body.nodes) if n in ahead else set())

    needed = set(schedule.outputs[:1])
    for step in reversed(schedule.steps):
        outs = dict(zip(step.writes, step.graph.outputs, strict=True))
        ahead = reachable([o for b, o in outs.items() if b in needed])
        needed |= {b for b, x in zip(step.reads, step.graph.inputs, strict=True) if x in ahead}
        put(step.graph, ahead)
        if isinstance(step, Loop):
            for inner in step.body.steps:
                put(inner.graph, set(inner.graph.nodes) if ahead else set())
    return found


@contextmanager
def marked() -> Iterator[None]:
    """Marks each instruction that is lowered inside with its pass and scope."""
    of: dict[int, str] = {}
    plain = Interpreter._node

    def node(self: Interpreter, n: Any, *rest: Any) -> Any:
        with jax.named_scope(f"Of-{of.get(id(n), BACKWARD)}-{n.scope.replace('/', '.')}-Of"):
            return plain(self, n, *rest)

    def lowered(schedule: Schedule, *rest: Any) -> Any:
        of.update(passes(schedule))
        return lower(schedule, *rest)

    with patch.object(Interpreter, "_node", node), patch.object(engine, "lower", lowered):
        yield


def mark(i: Instruction, depth: int = 3) -> tuple[str, str]:
    """Returns (the pass, the scope) of an instruction; without a mark, those of its operands."""
    for name in i.op_names:
        if found := MARK.findall(name):
            return found[-1]
    around = (mark(o, depth - 1) for o in i.operands) if depth else ()
    return next((m for m in around if m[0] != "rest"), ("rest", ""))


def part(i: Instruction) -> tuple[str, str]:
    """Returns (the pass, the part of the model) of an instruction."""
    where, scope = mark(i)
    scopes = scope.split(".")
    if i.opcode.startswith(COLLECTIVES):
        return where, "collectives"
    if where == UPDATE or UPDATE in scopes:
        return UPDATE, "optimizer"
    if "head" in scopes:
        return where, "head and loss"
    if i.is_move:
        return where, "copies and transposes"
    if any("norm" in s for s in scopes):
        return where, "norms"
    if "attention" in scopes:
        if not i.products:
            return where, "softmax"
        batched = all(p.batch > 1 for p in i.products)
        return where, "attention products" if batched else "qkv and out products"
    if "mlp" in scopes:
        return where, "MLP products" if i.products else "activation"
    if "embedding" in scopes:
        return where, "embedding"
    return where, "rest"


# -- floors ---------------------------------------------------------------------------------------
def least_s(run: Callable[[], Any], within_s: float = 0.1) -> float:
    """Returns the least seconds of a call, over as many calls as fit into `within_s`."""
    run()
    found: list[float] = []
    end = time.perf_counter() + within_s
    while not found or (time.perf_counter() < end and len(found) < 200):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def product_s(p: Product) -> float:
    """Returns the seconds of the product alone, in the engine's fastest layout: the contracted dim
    is innermost on the left."""
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    given, made = names[p.given], names[p.made]
    rng = np.random.default_rng(0)
    shapes = (p.batch, p.m, p.k), (p.batch, p.k, p.n)
    x, y = (jnp.asarray(rng.normal(size=s).astype(np.float32), given) for s in shapes)
    dims: Any = (((2,), (1,)), ((0,), (0,)))
    if p.batch == 1:
        x, y, dims = x[0], y[0], (((1,), (0,)), ((), ()))
    run = jax.jit(lambda x, y: lax.dot_general(x, y, dims, preferred_element_type=made))
    return least_s(lambda: run(x, y).block_until_ready())


class Copies:
    """The seconds of a copy that reads and writes a given number of bytes."""

    def __init__(self) -> None:
        self.bytes_per_s: dict[int, float] = {}
        for power in range(14, 29, 2):
            source = np.ones(2**power // 8)
            to = np.empty_like(source)
            took_s = least_s(partial(np.copyto, to, source), 0.05)
            self.bytes_per_s[power + 1] = 2 ** (power + 1) / took_s

    def seconds(self, moved: int) -> float:
        if not moved:
            return 0.0
        nearest = min(self.bytes_per_s, key=lambda p: abs(p - math.log2(moved)))
        return moved / self.bytes_per_s[nearest]


# -- the step -------------------------------------------------------------------------------------
def profiled(
    run: Callable[[], float], steps: int, waits: Callable[[str], bool]
) -> tuple[dict[str, float], dict[str, int]]:
    """Returns (seconds, calls) of each instruction by name in one step, without its callees. The
    engine's threads share the core: the time in which several run is divided between them, without
    those that only wait for others by `waits`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    moments: list[tuple[float, bool, float, int, str]] = []  # ends before beginnings
    calls: dict[str, int] = defaultdict(int)
    lines = [line for plane in data.planes for line in plane.lines]
    for thread, line in enumerate(lines):
        for event in line.events:
            name = str(dict(event.stats).get("hlo_op", ""))
            took = event.duration_ns
            if name:
                calls[name] += 1
            if name and took:
                moments.append((event.start_ns, True, -took, thread, name))
                moments.append((event.start_ns + took, False, took, thread, name))
    seconds: dict[str, float] = defaultdict(float)
    open_: dict[int, list[str]] = defaultdict(list)
    before = 0.0
    for now, begins, _, thread, name in sorted(moments):
        inner = [names[-1] for names in open_.values() if names]
        busy = [n for n in inner if not waits(n)] or inner
        for n in busy:
            seconds[n] += (now - before) / 1e9 / steps / len(busy)
        before = now
        if begins:
            open_[thread].append(name)
        else:
            open_[thread].remove(name)
    return seconds, calls


def text_of(step: Any) -> str:
    """The text of the compiled program of a step that has run."""
    program = step.programs[0]
    given = [
        jax.ShapeDtypeStruct(array_shape(t), t.dtype.numpy, sharding=sharding(t))
        for t in program.wants
    ]
    found: str = program.run.lower(*given).compile().as_text()
    return found


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("dtype", choices=("f32", "bf16"))
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--layers", type=int, default=4)
    a = ap.parse_args()
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # before the engine counts the cores
    os.environ["TESSERA_PROGRAM_CACHE"] = "off"  # a cached program lacks the marks
    start_few(1)
    config = jax_gpt.GPTConfig(layers=a.layers)
    with marked():
        run, step = ours(config, {}, autocast=None if a.dtype == "f32" else a.dtype)
        losses = [run(), run()]
        instructions = read(text_of(step))
    losses.append(run())  # recorded again, outside of the context that marks
    took = []
    for _ in range(2 * a.rounds):
        begin = time.perf_counter()
        losses.append(run())
        took.append(time.perf_counter() - begin)
    outer = {n for n, i in instructions.items() if i.opcode in ("while", "conditional", "call")}
    seconds, calls = profiled(run, a.rounds, outer.__contains__)
    copies = Copies()
    alone = {p: product_s(p) for p in {p for n in seconds for p in of(instructions, n)}}

    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    products: dict[tuple[str, str, Product], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, took_s in seconds.items():
        i = instructions.get(name)
        times = calls[name] / a.rounds
        here = part(i) if i is not None else ("rest", "rest")
        floor_s = 0.0
        if i is not None:
            floor_s = sum(alone[p] for p in i.products) or copies.seconds(i.moved_bytes)
            for p in i.products:
                products[*here, p][0] += took_s / len(i.products)
                products[*here, p][1] += times
        rows[here][0] += took_s
        rows[here][1] += floor_s * times
    largest = sorted(products.items(), key=lambda row: -row[1][0])[:MOST_PRODUCTS]
    print(json.dumps({
        "dtype": a.dtype, "core": core, "losses": losses[:3],
        "step_s": statistics.median(took), "step_min_s": min(took),
        "unknown_s": sum(s for n, s in seconds.items() if n not in instructions),
        "rows": [[*key, took_s, floor_s] for key, (took_s, floor_s) in rows.items()],
        "products": [
            [*where, f"{p.batch} x " * (p.batch > 1) + f"{p.m} x {p.k} x {p.n}",
             f"{p.given} to {p.made}", times, took_s, alone[p] * times,
             p.flops * times / took_s / 1e9, p.flops / alone[p] / 1e9]
            for (*where, p), (took_s, times) in largest
        ],
        "copy_gb_per_s": [
            copies.bytes_per_s[min(copies.bytes_per_s)] / 1e9,
            copies.bytes_per_s[max(copies.bytes_per_s)] / 1e9,
        ],
    }))  # fmt: skip


def of(instructions: dict[str, Instruction], name: str) -> list[Product]:
    return instructions[name].products if name in instructions else []


if __name__ == "__main__":
    main()
