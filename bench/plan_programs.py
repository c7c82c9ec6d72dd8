"""The training steps that bench/plan.py predicts and measures, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, optim, pipeline

STRATEGIES = {"dp": "data_parallel", "tp": "tensor_parallel", "ep": "expert_parallel"}
VOCAB = 2048


def strategy(text: str) -> Any:
    """The strategies of "zero3+tp", each over its axis."""
    parts = []
    for word in text.split("+"):
        if word.startswith("zero"):
            parts.append(dist.strategy("zero_redundancy_optimizer", stage=int(word[4:])))
        else:
            parts.append(dist.strategy(STRATEGIES[word]))
    return sum(parts[1:], start=parts[0])


class MLP(nn.Module):
    """Residual blocks of two products."""

    def __init__(self, d: int, layers: int):
        self.blocks = [
            {"up": nn.Parameter(d, 4 * d), "down": nn.Parameter(4 * d, d)} for _ in range(layers)
        ]

    def loss(self, x: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
        for w in self.blocks:
            x = x + ts.tanh(x @ w["up"]) @ w["down"]
        return ((x - y) ** 2).mean()


@dataclass(frozen=True)
class Row:
    """A training step with AdamW and donated state on `mesh` by `plan`."""

    kind: str
    mesh: str
    model: Callable[[], Any]
    batch: tuple[np.ndarray[Any, Any], ...] = field(repr=False)
    plan: str = "dp"
    dtype: str = "f32"
    schedule: str = ""  # of a pipeline
    microbatches: int = 0

    def step(self) -> tuple[Any, tuple[Any, ...]]:
        """The compiled step and its arguments, not yet run; a pipeline has its weights placed."""
        mesh, plan = dist.Mesh.parse(self.mesh), strategy(self.plan)
        loss_fn: Any = lambda model, *batch: model.loss(*batch)  # noqa: E731  # or in stages
        if self.schedule:
            loss_fn = pipeline.run(("pp",), self.schedule, self.microbatches, mesh=mesh)(loss_fn)
        optimizer = optim.AdamW(1e-3)

        @ts.jit(donate=("model", "state"))
        def step(model: Any, state: Any, *batch: ts.Tensor) -> Any:
            loss = loss_fn(model, *batch)
            weights = model.parameters()
            grads = ts.grad(loss, weights, layout=plan)
            weights, new = optimizer.update(weights, grads, state)
            model.load_parameters(weights)
            state.update(new)
            return loss

        with ts.autocast(self.dtype):
            model = dist.place(self.model(), plan, mesh)
            batch = dist.place(self.batch, plan, mesh, kind="batch")
            state = optimizer.init(model.parameters(), plan)
            if self.schedule:
                step.plan(model, state, *batch)
                model = loss_fn.place(model)
                state = optimizer.init(model.parameters(), plan)
        return step, (model, state, *batch)


def gpt(
    kind: str, mesh: str, plan: str = "dp", batch: int = 16, how: dict[str, Any] | None = None,
    **sizes: Any,
) -> Row:  # fmt: skip
    """A row of a GPT; `sizes` are those of its config, `how` fields of the row."""
    given: dict[str, Any] = {"seq": 256, "d": 256, "layers": 4, "heads": 8, "norm": "rms"}
    config = nn.GPTConfig(vocab=VOCAB, positions="rotary", **(given | sizes))
    ids = np.random.default_rng(0).integers(0, VOCAB, (batch, config.seq)).astype(np.int32)
    return Row(kind, mesh, partial(nn.GPT, config), (ids, ids), plan, **(how or {}))


def mlp(
    mesh: str, plan: str = "dp", d: int = 512, layers: int = 4, rows: int = 2048, **how: Any
) -> Row:
    """A row of an MLP."""
    x = np.random.default_rng(0).normal(size=(rows, d)).astype(np.float32)
    kind = "pipeline" if "schedule" in how else "ZeRO" if "zero" in plan else "dense"
    return Row(kind, mesh, partial(MLP, d, layers), (x, x), plan, **how)


def staged(schedule: str, microbatches: int) -> dict[str, Any]:
    return {"schedule": schedule, "microbatches": microbatches}


def virtual() -> dict[str, Row]:
    """The rows on at most eight virtual devices of one process."""
    dense, zero, experts, long = partial(gpt, "dense"), partial(gpt, "ZeRO"), "experts", "long"
    pipe = partial(gpt, "pipeline", stacked=False)
    return {
        "mlp, dp=1": mlp("dp=1"),
        "mlp, dp=2": mlp("dp=2"),
        "mlp, dp=8": mlp("dp=8"),
        "mlp 256": mlp("dp=4", d=256, rows=4096),
        "mlp 1024": mlp("dp=2", d=1024, layers=2, rows=1024),
        "mlp zero 1": mlp("dp=4", "zero1"),
        "mlp zero 3": mlp("dp=4", "zero3"),
        "gpt, dp=1": dense("dp=1"),
        "gpt, dp=2": dense("dp=2"),
        "gpt, dp=4": dense("dp=4"),
        "gpt, dp=8": dense("dp=8"),
        "gpt, tp=2": dense("tp=2", "tp"),
        "gpt, tp=4": dense("tp=4", "tp"),
        "gpt, tp=4, sequence": dense("tp=4", "tp", sequence_parallel="tp"),
        "gpt, dp=2 tp=2": dense("dp=2,tp=2", "dp+tp"),
        "gpt, dp=2 tp=4": dense("dp=2,tp=4", "dp+tp"),
        "gpt, dp=4 tp=2": dense("dp=4,tp=2", "dp+tp"),
        "gpt 512": dense("dp=2", d=512, layers=2, seq=128),
        "gpt 128, many layers": dense("dp=4", d=128, layers=10, heads=4),
        "gpt, recompute": dense("dp=2", remat=True),
        "gpt, recompute products": dense("dp=2", remat="products"),
        "gpt, grouped heads": dense("dp=2", kv_heads=2),
        "gpt, swiglu": dense("dp=4", activation="swiglu", hidden=768),
        "gpt, bf16": dense("dp=2", how={"dtype": "bf16"}, layers=2),
        "gpt, zero 1": zero("dp=4", "zero1"),
        "gpt, zero 2": zero("dp=4", "zero2"),
        "gpt, zero 3": zero("dp=4", "zero3"),
        "gpt, zero 3, dp=8": zero("dp=8", "zero3"),
        "gpt, zero 3, tp": zero("dp=2,tp=2", "zero3+tp"),
        "gpt, zero 3, recompute": zero("dp=4", "zero3", remat=True),
        "experts 4": gpt(experts, "dp=1", experts=4, layers=2),
        "experts 4, ep=4": gpt(experts, "ep=4", "ep", experts=4, layers=2),
        "experts 8, dp=2 ep=4": gpt(experts, "dp=2,ep=4", "dp+ep", experts=8, layers=2),
        "experts 8, ep=2": gpt(experts, "ep=2", "ep", experts=8, layers=2),
        "experts 8, top 1": gpt(
            experts, "dp=2,ep=2", "dp+ep", experts=8, experts_per_token=1, layers=2
        ),
        "2048 tokens": gpt(long, "dp=1", batch=2, seq=2048, layers=2),
        "2048 tokens, dp=2": gpt(long, "dp=2", batch=2, seq=2048, layers=2),
        "2048 tokens, tp=4": gpt(long, "tp=4", "tp", batch=2, seq=2048, layers=2),
        "4096 tokens, ring 4": gpt(long, "dp=1,cp=4", batch=1, seq=4096, layers=1, context="ring"),
        "2048 tokens, ring 2": gpt(long, "dp=2,cp=2", batch=2, seq=2048, layers=2, context="ring"),
        "2048 tokens, all to all": gpt(
            long, "dp=1,cp=4", batch=2, seq=2048, layers=2, context="all_to_all"
        ),
        "mlp, 1F1B": mlp("pp=2,dp=1", layers=8, **staged("1F1B", 8)),
        "mlp, 1F1B, 4 stages": mlp("pp=4,dp=1", layers=8, **staged("1F1B", 8)),
        "mlp, GPipe": mlp("pp=2,dp=1", layers=8, **staged("GPipe", 4)),
        "mlp, 1F1B, dp=2": mlp("pp=2,dp=2", layers=8, **staged("1F1B", 4)),
        "gpt, 1F1B": pipe("pp=2,dp=1", how=staged("1F1B", 4)),
        "gpt, 1F1B, dp=2": pipe("pp=2,dp=2", how=staged("1F1B", 4)),
        "gpt, ZB-H1": pipe("pp=2,dp=1", how=staged("ZB-H1", 4)),
    }


def processes() -> dict[str, Row]:
    """The rows on four devices of two processes."""
    return {
        "two processes: mlp, dp=4": mlp("dp=4"),
        "two processes: mlp, zero 3": mlp("dp=4", "zero3"),
        "two processes: gpt, dp=4": gpt("dense", "dp=4"),
        "two processes: gpt, dp=2 tp=2": gpt("dense", "dp=2,tp=2", "dp+tp"),
        "two processes: gpt, zero 3": gpt("ZeRO", "dp=4", "zero3"),
        "two processes: experts 4": gpt("experts", "ep=4", "ep", experts=4, layers=2),
    }
