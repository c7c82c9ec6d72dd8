"""Rates and results of `ts.plan.best` for Llama 2 7B and 70B on H100s.

Each row is a search: candidates per minute of the first level (those priced, and those that a bound
of memory or time drops, which is computed for each; then only those priced), seconds of the whole
search, the best, and the rank correlation of prices and full simulations over the best ten. Run
it: `python bench/plan_search.py --devices 64` prints a
line of JSON for each; `--stages` opens pipelines, which take minutes for a model of many layers.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from scipy.stats import spearmanr

import tessera as ts
from tessera import dist, nn, optim, pipeline

MODELS: dict[str, dict[str, Any]] = {
    "7B": {"d": 4096, "layers": 32, "heads": 32, "hidden": 11008},
    "70B": {"d": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672},
}
SEQ = 4096
cut = pipeline.run


def made(
    size: str, rows: int, mesh: Any, strategy: Any, pipeline: Any = None, microbatches: int = 1,
    **how: Any,
) -> Any:  # fmt: skip
    """A training step with AdamW, and its arguments."""
    config = nn.GPTConfig(
        vocab=32000, seq=SEQ, norm="rms", activation="swiglu", positions="rotary",
        stacked=pipeline is None, **MODELS[size], **how,
    )  # fmt: skip
    model = dist.place(nn.GPT(config).to(ts.bf16), strategy, mesh)
    optimizer = optim.AdamW(3e-4)
    state = optimizer.init(model.parameters(), strategy)
    loss_of: Any = nn.GPT.loss
    if pipeline:
        loss_of = cut(("pp",), pipeline, microbatches, mesh=mesh)(loss_of)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, ids: Any) -> Any:
        loss, weights = loss_of(model, ids, ids), model.parameters()
        grads = ts.grad(loss, weights, layout=strategy)
        weights, new = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    ids = dist.tensor((rows, SEQ), dtype=ts.int32)
    return step, (model, state, dist.place(ids, strategy, mesh, kind="batch"))


def searched(size: str, devices: int, rows: int, stages: bool, limit_s: float) -> dict[str, Any]:
    """The figures of one search."""

    def whole(mesh: Any, strategy: Any, *, remat: Any, sequence_parallel: Any) -> Any:
        return made(size, rows, mesh, strategy, remat=remat, sequence_parallel=sequence_parallel)

    def staged(
        mesh: Any, strategy: Any, *, remat: Any, sequence_parallel: Any, pipeline: Any,
        microbatches: int,
    ) -> Any:  # fmt: skip
        return made(
            size, rows, mesh, strategy, pipeline, microbatches, remat=remat,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip

    try:
        found = ts.plan.best(
            staged if stages else whole, cluster=f"h100x{devices}", limit_s=limit_s
        )
    except ts.UsageError as error:
        return {"model": size, "devices": devices, "error": str(error).splitlines()[0]}
    plain = [r for r in found.rows if not r.candidate.options]
    rank = spearmanr([r.fast_s for r in plain], [r.step_s for r in plain]).statistic
    best = found.best
    return {
        "model": size, "devices": devices, "candidates": found.considered, "priced": found.priced,
        "per_minute": round(found.considered / found.priced_s * 60),
        "priced_per_minute": round(found.priced / found.priced_s * 60),
        "search_s": round(found.seconds, 1), "best": best.candidate.text,
        "step_ms": round(best.step_s * 1e3, 1), "memory_gib": round(best.memory_bytes / 2**30, 1),
        "rank": round(float(rank), 3),
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--devices", type=int, nargs="*", default=[8, 64, 1024])
    p.add_argument("--models", nargs="*", default=[*MODELS])
    p.add_argument("--rows", type=int, default=0, help="0: one for each device, at least 256")
    p.add_argument("--stages", action="store_true")
    p.add_argument("--limit", type=float, default=60.0)
    o = p.parse_args()
    for size in o.models:
        for devices in o.devices:
            rows = o.rows or max(256, devices)
            print(json.dumps(searched(size, devices, rows, o.stages, o.limit)), flush=True)


if __name__ == "__main__":
    main()
