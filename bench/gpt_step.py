"""One training step of the demo's GPT: Tessera against hand-written `shard_map`, turn by turn.

Both run in this process, on the same weights and tokens, one step each in turn, so that a noisy
machine disturbs both. Run it: `python bench/gpt_step.py dp=2 --rounds 8` prints one line of JSON:
median and minimum step seconds, their ratio, losses, and the compiled programs' memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import numpy as np
from peers import jax_gpt

import tessera as ts
from tessera import dist, pipeline
from tessera.core.context import replaced
from tessera.runtime.arrays import array_shape, sharding
from tessera.runtime.devices import start

RATE, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
MICROBATCHES = 4


def axes_of(text: str) -> dict[str, int]:
    """The axes of "dp=2,tp=2"; none of "one"."""
    return {} if text == "one" else {k: int(v) for k, v in (x.split("=") for x in text.split(","))}


def weights_of(config: jax_gpt.GPTConfig, stacked: bool) -> dict[str, np.ndarray]:
    """The peer's initial weights under Tessera's names, with a dim for heads, and one for layers if
    `stacked`."""
    w = jax_gpt.init(config)
    d, heads = config.width, config.heads

    layers = {
        "norm_1.weight": ("ln1.g", (d,)),
        "norm_1.bias": ("ln1.b", (d,)),
        "attention.qkv": ("qkv.w", (d, 3, heads, d // heads)),
        "attention.out": ("out.w", (heads, d // heads, d)),
        "norm_2.weight": ("ln2.g", (d,)),
        "norm_2.bias": ("ln2.b", (d,)),
        "mlp.up": ("up.w", (d, 4 * d)),
        "mlp.down": ("down.w", (4 * d, d)),
    }
    found = {
        "embed.weight": w["wte"],
        "position": w["wpe"],
        "norm.weight": w["lnf.g"],
        "norm.bias": w["lnf.b"],
        "head": w["head.w"],
    }
    for name, (theirs, shape) in layers.items():
        each = [w[f"h{i}.{theirs}"].reshape(shape) for i in range(config.layers)]
        if stacked:
            found[f"blocks.block.{name}"] = np.stack(each)
        else:
            found |= {f"blocks.layers.{i}.{name}": x for i, x in enumerate(each)}
    return found


def ours(
    config: jax_gpt.GPTConfig,
    axes: dict[str, int],
    loop: bool | None = None,
    zero: int = 0,
    executor: str = "fused",
    autocast: str | None = None,
    wait: bool = True,
) -> tuple[Callable[[], Any], Any]:
    """Returns (a function that runs one step and returns its loss, the compiled step).

    `loop` is GPTConfig's, `zero` the ZeRO stage over dp, `autocast` the dtype of products. An axis
    pp holds the stages of a pipeline, 1F1B over MICROBATCHES. Without `wait` the loss is not read,
    and nothing waits for the step.
    """
    mesh = dist.Mesh(tuple(axes), shape=axes) if axes else None
    model = ts.nn.GPT(
        ts.nn.GPTConfig(
            vocab=config.vocab,
            seq=config.seq,
            d=config.width,
            layers=config.layers,
            heads=config.heads,
            loop=loop,
            stacked="pp" not in axes,
        )
    )
    given = weights_of(config, "pp" not in axes)
    layouts: dict[str, Any] = dict.fromkeys(given)
    batch_layout = plan = None
    if mesh is not None:
        kinds = {"dp": "data_parallel", "tp": "tensor_parallel"}
        parts = {a: dist.strategy(kinds[a]) for a in axes if a in kinds}
        if zero:
            parts["dp"] = dist.strategy("zero_redundancy_optimizer", stage=zero)
        first, *rest = parts.values()
        plan = sum(rest, start=first)
        placed = dist.place(model, plan, mesh).parameters()
        layouts = {k: t.type for k, t in placed.items()}
        if "dp" in axes:
            batch_layout = f"[{config.batch}@dp, {config.seq}]"
    model.load_parameters({k: ts.tensor(v, mesh=mesh, layout=layouts[k]) for k, v in given.items()})
    opt = ts.optim.AdamW(
        lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, mask=lambda name: "norm" not in name
    )
    state = opt.init(model.parameters(), plan)
    features: Callable[..., Any] = lambda m, ids: m.features(ids)  # noqa: E731  # or in stages
    if "pp" in axes:
        features = pipeline.run(("pp",), "1F1B", MICROBATCHES, mesh=mesh)(features)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, ids: ts.Tensor, labels: ts.Tensor) -> Any:
        with ts.autocast(autocast) if autocast else nullcontext():
            h = features(model, ids)
            with ts.named_scope("head"):
                loss = model.loss_of(h, labels)
        weights = model.parameters()
        grads = ts.grad(loss, weights, layout=plan)
        new, state = opt.update(weights, grads, state)
        model.load_parameters(new)
        return loss, state

    ids, labels = (ts.tensor(x, mesh=mesh, layout=batch_layout) for x in jax_gpt.batch(config))
    box = {"state": state}

    def run() -> Any:
        with replaced(executor=executor):
            loss, box["state"] = step(model, box["state"], ids, labels)
        if not wait:
            return loss
        jax.block_until_ready([w.stored for w in model.parameters().values()])
        return float(loss)

    return run, step


def peer(
    config: jax_gpt.GPTConfig, axes: dict[str, int], wait: bool = True
) -> tuple[Callable[[], Any], Any]:
    step, params, opt, place = jax_gpt.make_step(config, axes)
    tokens, labels = place(*jax_gpt.batch(config))
    box = [params, opt]

    def run() -> Any:
        loss, box[0], box[1] = step(box[0], box[1], tokens, labels)
        return float(loss) if wait else loss

    return run, lambda: step.lower(box[0], box[1], tokens, labels).compile()


def memory_mb(stats: Any) -> dict[str, float]:
    """The memory of one device's arguments and temporaries, in MB."""
    return {
        "arguments_mb": stats.argument_size_in_bytes / 1e6,
        "temporaries_mb": stats.temp_size_in_bytes / 1e6,
    }


def our_memory(step: Any) -> dict[str, float]:
    program = step.programs[0]
    given = [
        jax.ShapeDtypeStruct(array_shape(t), t.dtype.numpy, sharding=sharding(t))
        for t in program.wants
    ]
    return memory_mb(program.run.lower(*given).compile().memory_analysis())


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("mesh", help="dp=2, tp=2 or one")
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--vocab", type=int, default=4096)
    a = ap.parse_args()
    axes = axes_of(a.mesh)
    start(8)
    config = jax_gpt.GPTConfig(layers=a.layers, vocab=a.vocab)
    run_ours, step = ours(config, axes)
    run_peer, compile_peer = peer(config, axes)
    t0 = time.perf_counter()
    first_ours = run_ours()
    t1 = time.perf_counter()
    first_peer = run_peer()
    t2 = time.perf_counter()
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    losses: dict[str, list[float]] = {"ours": [first_ours], "peer": [first_peer]}
    for k in range(a.rounds):
        for name, run in (("ours", run_ours), ("peer", run_peer))[:: 1 if k % 2 else -1]:
            begin = time.perf_counter()
            losses[name].append(run())
            times[name].append(time.perf_counter() - begin)
    result = {
        "mesh": a.mesh,
        "heap": os.environ.get("TESSERA_HEAP", "1"),
        "ours_s": statistics.median(times["ours"]),
        "peer_s": statistics.median(times["peer"]),
        "ours_min_s": min(times["ours"]),
        "peer_min_s": min(times["peer"]),
        "speed_ratio": statistics.median(
            p / o for o, p in zip(times["ours"], times["peer"], strict=True)
        ),
        "first_call_s": [t1 - t0, t2 - t1],
        "ours_memory": our_memory(step),
        "peer_memory": memory_mb(compile_peer().memory_analysis()),
        "largest_loss_difference": max(
            abs(x - y) for x, y in zip(losses["ours"], losses["peer"], strict=True)
        ),
        "losses": losses["ours"][:3],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
