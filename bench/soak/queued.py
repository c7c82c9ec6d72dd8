"""Queued steps whose results are not read, on 2, 4 and 8 devices, for every kind of program.

Each kind of program runs many times and only its last result is read. If a device waits for ever
for another one, the engine ends the process, so each mesh has its own: `python bench/soak/queued.py
8 2000` runs 8 devices and 2,000 steps of each kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

STEPS = 20_000
Step = Callable[[], Any]


def training(n: int) -> Step:
    """A data-parallel training step as one program."""
    import numpy as np

    import tessera as ts
    from tessera import dist

    mesh = dist.Mesh(("dp",), shape={"dp": n})
    draw = np.random.default_rng(0)
    x = ts.tensor(draw.normal(size=(8 * n, 32)).astype("f"), mesh=mesh, layout=f"[{8 * n}@dp, 32]")
    state = [ts.tensor(draw.normal(size=(32, 32)).astype("f"), mesh=mesh, layout="[32, 32]")]

    @ts.jit
    def step(w: Any, x: Any) -> Any:
        loss = (ts.tanh(x @ w) ** 2).mean()
        return w - 0.01 * ts.grad(loss, w), loss

    def run() -> Any:
        state[0], loss = step(state[0], x)
        return loss

    return run


def donated(n: int) -> Step:
    """The same step with donated weights."""
    import numpy as np

    import tessera as ts
    from tessera import dist

    mesh = dist.Mesh(("dp",), shape={"dp": n})
    x = ts.tensor(np.ones((n, 32), "f"), mesh=mesh, layout=f"[{n}@dp, 32]")
    state = [ts.tensor(np.ones((32, 32), "f"), mesh=mesh, layout="[32, 32]")]

    @ts.jit(donate="w")
    def step(w: Any, x: Any) -> Any:
        return w - 0.01 * ts.grad((ts.tanh(x @ w) ** 2).mean(), w)

    def run() -> Any:
        state[0] = step(state[0], x)
        return state[0]

    return run


def collectives(n: int) -> Step:
    """Each kind of collective in turn, eagerly."""
    import numpy as np

    import tessera as ts
    from tessera import dist

    mesh = dist.Mesh(("dp",), shape={"dp": n})
    x = ts.tensor(np.ones((8 * n, 8 * n), "f"), mesh=mesh, layout=f"[{8 * n}@dp, {8 * n}]")
    to = [f"[{8 * n}, {8 * n}]", f"[{8 * n}, {8 * n}@dp]"]
    turn = [0]

    def run() -> Any:
        turn[0] += 1
        match turn[0] % 4:
            case 0:
                return dist.redistribute(x, to[0])  # all_gather
            case 1:
                return dist.redistribute(x, to[1])  # all_to_all
            case 2:
                return dist.all_reduce(x.T @ x)
            case _:
                return dist.redistribute(x.T @ x, f"[{8 * n}@dp, {8 * n}]")  # reduce_scatter

    return run


def pipelined(n: int) -> Step:
    """A pipeline with each stage on one or two devices: sends, and sums if there are two."""
    import numpy as np

    import tessera as ts
    from tessera import dist, pipeline

    mesh = dist.Mesh.parse({2: "pp=2", 4: "dp=2 pp=2", 8: "dp=2 pp=4"}[n])
    state = [{f"w{i}": np.eye(8, dtype="f") for i in range(4)}]
    x = np.ones((16, 8), "f")

    @pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=4, mesh=mesh)
    def model(weights: Any, x: Any) -> Any:
        for i in range(4):
            x = ts.tanh(x @ weights[f"w{i}"])
        return x

    @ts.jit
    def step(weights: Any, x: Any) -> Any:
        loss = (model(weights, x) ** 2).mean()
        grads = ts.grad(loss, weights)
        return loss, {k: w - 0.01 * grads[k] for k, w in weights.items()}

    def run() -> Any:
        loss, state[0] = step(state[0], x)
        return loss

    return run


def stepped(n: int) -> Step:
    """The training step by the stepped executor, with a program per collective."""
    from tessera.core.context import replaced

    whole = training(n)

    def run() -> Any:
        with replaced(executor="stepped"):
            return whole()

    return run


def mixed(n: int) -> Step:
    """A training step, a pipeline's step and collectives in turn, on the same devices."""
    each = [training(n), pipelined(n), collectives(n)]
    turn = [0]

    def run() -> Any:
        turn[0] += 1
        return each[turn[0] % 3]()

    return run


# Each kind's step, and the divisor of its number of steps.
KINDS: dict[str, tuple[Callable[[int], Step], int]] = {
    "training": (training, 1),
    "donated": (donated, 1),
    "collectives at once": (collectives, 1),
    "step by step": (stepped, 4),
    "pipeline": (pipelined, 20),
    "mixed": (mixed, 10),
}


def last(step: Step, steps: int) -> float:
    """Runs `steps` steps, and returns one number of the last result."""
    for _ in range(steps):
        out = step()
    return float(out.numpy().ravel()[0])


def queued(n: int, steps: int) -> None:
    """Prints a line for each kind of program on `n` devices. Never returns if one hangs."""
    for kind, (make, share) in KINDS.items():
        step, count = make(n), max(steps // share, 1)
        first = last(step, 1)
        begin = time.perf_counter()
        end = last(step, count)
        assert first == first and end == end, (kind, first, end)
        took_s = time.perf_counter() - begin
        print(
            f"  {n} devices, {kind}: {count} unread, {1e6 * took_s / count:.0f} us each", flush=True
        )
    models = [training(n), training(n)]
    with_threads = [Thread(target=last, args=(m, steps // 4)) for m in models]
    begin = time.perf_counter()
    for t in with_threads:
        t.start()
    for t in with_threads:
        t.join()
    took_s = time.perf_counter() - begin
    print(f"  {n} devices, two threads: {steps // 4} unread each, {took_s:.0f} s", flush=True)


def main() -> int:
    wrong = 0
    for n in (2, 4, 8):
        here = {**os.environ, "TESSERA_DEVICES": str(n)}
        command = [sys.executable, __file__, str(n), str(STEPS)]
        wrong += subprocess.run(command, env=here).returncode != 0
    return wrong


if __name__ == "__main__":
    if len(sys.argv) > 1:
        queued(int(sys.argv[1]), int(sys.argv[2]))
    else:
        sys.exit(main())
