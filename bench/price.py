"""The cost of bits that do not depend on the mesh: `mesh_invariant` against `fast`.

A GPT's training step on the same mesh at both levels of determinism, and at "fast" with all
instructions of the processor. No level uses those that `mesh_invariant` forbids, so that a program
can set the level at any time; every program pays for it. Or, with `collectives`, the sum of 16 MiB
per device over 8 devices: Tessera in a fixed order, `psum`, and an all_gather with a local sum. The
engine reads its flags when it is imported, so each side is its own process; steps are taken in
turn. With the name of a function, such as `gelu`: that function of 16 MiB without and with the
instructions. Run it: `python bench/price.py dp=2,tp=2,pp=2`, `python bench/price.py collectives` or
`python bench/price.py gelu` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from turns import Steps, Workers, apart, in_turn, ratio, serve

DEVICES, ELEMENTS = 8, 4 << 20  # 16 MiB of f32 a device
SAME = 1e-4  # the largest difference of losses
KEPT = {"TESSERA_DETERMINISTIC": "1"}
FREE = {"XLA_FLAGS": "--xla_cpu_max_isa=AMX_FP16"}  # all instructions: core/flags.py lets it stand
STEPS = {"fast": {}, "mesh_invariant": KEPT, "free": FREE}
FUNCTIONS = ("exp", "gelu", "gelu_grad", "softmax", "layer_norm", "matmul")
SUMS = {"fast": {}, "mesh_invariant": KEPT, "gather_tree": {}, "gather_sum": {}}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("what", help=f"dp=8, tp=4, dp=2,tp=2,pp=2, one, collectives, {FUNCTIONS}")
    ap.add_argument("--rounds", type=int, default=6)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--limit", type=float, default=300.0, help="seconds until it is given up")
    ap.add_argument("--serve", default="", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.serve:
        known = {"collectives": lambda: sums(a.serve)}
        known |= {name: lambda: function(a.what) for name in FUNCTIONS}
        serve(known[a.what]() if a.what in known else step(a.what, a.layers))
        return
    sides = SUMS if a.what == "collectives" else STEPS
    if a.what in FUNCTIONS:
        sides = {name: sides[name] for name in ("fast", "free")}
    with ExitStack() as stack:
        command = [str(Path(__file__).resolve()), a.what, "--layers", str(a.layers), "--serve"]
        running = {
            name: stack.enter_context(Workers([[*command, name]], a.limit, env))
            for name, env in sides.items()
        }
        found = in_turn({name: w.step for name, w in running.items()}, a.rounds, warm=2)
    print(json.dumps({"what": a.what, **summary(found)}))


def summary(found: dict[str, Steps]) -> dict[str, Any]:
    """The times and their ratios; also of processor time, which a busy machine disturbs less."""
    fast, ours = found["fast"], found.get("mesh_invariant", found["fast"])
    gathered = {k: s for k, s in found.items() if k.startswith("gather")}
    return {
        "median_s": {k: s.median_s for k, s in found.items()},
        "min_s": {k: min(s.wall_s) for k, s in found.items()},
        "price": ratio(ours.wall_s, fast.wall_s),
        "cpu_price": ratio(ours.cpu_s, fast.cpu_s),
        "held": {k: ratio(fast.cpu_s, s.cpu_s) for k, s in found.items() if k == "free"},
        "faster_than": {k: ratio(s.wall_s, ours.wall_s) for k, s in gathered.items()},
        "cpu_faster_than": {k: ratio(s.cpu_s, ours.cpu_s) for k, s in gathered.items()},
        "largest_difference": apart(*found.values(), at_most=SAME),
    }


def step(mesh: str, layers: int) -> Callable[[], float]:
    """Returns a function that runs a training step on `mesh` and returns its loss."""
    from gpt_step import axes_of, ours
    from peers import jax_gpt

    from tessera.runtime.devices import start

    start(DEVICES)
    return ours(jax_gpt.GPTConfig(layers=layers), axes_of(mesh))[0]


def function(name: str) -> Callable[[], float]:
    """Returns a function that computes `name` of 16 MiB and returns one element."""
    import numpy as np

    import tessera as ts

    x = ts.tensor(np.random.default_rng(0).normal(size=(ELEMENTS // 2048, 2048)).astype("f4"))
    made = {
        "exp": ts.exp,
        "gelu": ts.nn.gelu,
        "gelu_grad": lambda x: ts.grad(ts.nn.gelu(x).sum(), x),
        "softmax": ts.nn.softmax,
        "layer_norm": ts.nn.layer_norm,
        "matmul": lambda x: x @ x,
    }
    run = ts.jit(made[name])
    return lambda: float(run(x).stored.block_until_ready()[0, 7])


def sums(kind: str) -> Callable[[], float]:
    """Returns a function that sums over all devices and returns one element."""
    import jax
    import numpy as np
    from jax import lax

    import tessera as ts
    from tessera import dist, op

    mesh = dist.Mesh(("d",), shape={"d": DEVICES})
    made = np.random.default_rng(0).normal(size=DEVICES * ELEMENTS).astype(np.float32)
    x = ts.tensor(made, mesh=mesh, layout=f"[{DEVICES * ELEMENTS}@d]")

    def gathered(v: Any) -> Any:
        terms = lax.all_gather(v, "d")
        if kind == "gather_sum":
            return terms.sum(0)
        level = list(terms)
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]

    if kind.startswith("gather"):
        over, none = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
        run: Callable[..., Any] = jax.jit(
            jax.shard_map(
                gathered,
                mesh=x.stored.sharding.mesh,
                in_specs=over,
                out_specs=none,
                check_vma=False,
            )
        )
    else:
        ours = ts.jit(op.kernel(lambda v: dist.all_reduce(v)))
        run = lambda _: ours(x).stored  # noqa: E731  # or the other
    return lambda: float(run(x.stored).block_until_ready().addressable_data(0)[7])


if __name__ == "__main__":
    main()
