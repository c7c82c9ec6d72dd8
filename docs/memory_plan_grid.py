"""How far is a planned peak from what XLA says of the compiled program? Writes the table of
docs/memory-plan.md: `python docs/memory_plan_grid.py`.

Every case is a whole training step with AdamW, recorded on a mesh and compiled, never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, optim
from tessera.compile import Engine
from tessera.cost.memory import MemoryPlan
from tessera.lang.jit.trace import trace
from tessera.passes.simplify import simplify
from tessera.show.plan_view import planned_memory
from tessera.train.memory import ProgramBytes

PAGE = Path(__file__).with_name("memory-plan.md")
BEGIN, END = "<!-- table: docs/memory_plan_grid.py -->\n", "<!-- end of table -->\n"


def plan_of(text: str) -> Any:
    """`dp+tp`, `zero3`, `zero2@in+dp@out`: strategies, each over its axis."""
    parts = []
    for word in text.split("+"):
        kind, _, axis = word.partition("@")
        if kind.startswith("zero"):
            stage = int(kind[4])
            parts.append(dist.strategy("zero_redundancy_optimizer", axis or None, stage=stage))
        else:
            name = {"dp": "data_parallel", "tp": "tensor_parallel"}[kind]
            parts.append(dist.strategy(name, axis or None))
    return sum(parts[1:], start=parts[0])


class MLP(nn.Module):
    """`layers` residual blocks of two products."""

    def __init__(self, d: int, layers: int):
        self.blocks = [
            {"up": nn.Parameter(d, 4 * d), "down": nn.Parameter(4 * d, d)} for _ in range(layers)
        ]

    def loss(self, x: ts.Tensor) -> ts.Tensor:
        for w in self.blocks:
            x = x + ts.tanh(x @ w["up"]) @ w["down"]
        return (x * x).mean()


class ConvNet(nn.Module):
    """Three convolutions with batch norm, ReLU and pooling."""

    def __init__(self, width: int):
        sizes = [(1, width, 7), (width, 2 * width, 3), (2 * width, 4 * width, 3)]
        self.convs = [nn.Conv2d(i, o, k, padding="same", bias=False) for i, o, k in sizes]
        self.norms = [nn.BatchNorm(o) for _, o, _ in sizes]
        self.head = nn.Linear(4 * width, 6)

    def loss(self, x: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.max_pool2d(nn.relu(norm(conv(x))), 2)
        return nn.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class Case:
    """A model and its batch on `mesh` by `plan`; `fitted`: the rules were made by looking at it."""

    model: Callable[[], Any]
    batch: Callable[[], tuple[np.ndarray, ...]]
    mesh: str = "dp=1"
    plan: str = "dp"
    dtype: str = "f32"
    fitted: bool = True

    def record(self) -> tuple[Any, dict[str, Any], int]:
        """(the step's graph, what it holds, how many of its arguments it takes over)."""
        mesh, plan = dist.Mesh.parse(self.mesh), plan_of(self.plan)
        with ts.autocast(self.dtype):
            model = dist.place(self.model(), plan, mesh)
            weights = model.parameters()
            optimizer = optim.AdamW(1e-3, weight_decay=0.1)
            state = optimizer.init(weights, plan)
            batch = dist.place(self.batch(), plan, mesh, kind="batch")

            def train_step(model: Any, state: Any, *batch: ts.Tensor) -> Any:
                loss = model.loss(*batch)
                weights = model.parameters()
                grads = ts.grad(loss, weights, layout=plan)
                grads, norm = optim.clip_by_global_norm(grads, 1.0)
                weights, new = optimizer.update(weights, grads, state)
                model.load_parameters(weights)
                return loss, norm, model, new

            graph = simplify(trace(train_step, model, state, *batch))
        gradients = {name: plan.gradient(name, t.type) for name, t in weights.items()}
        held = {"weights": weights, "gradients": gradients, "optimizer": state}
        return graph, held, len(graph.inputs) - len(batch)

    def measure(self) -> tuple[MemoryPlan, ProgramBytes]:
        """(the plan, XLA's account of the compiled program)."""
        graph, held, mine = self.record()
        engine = Engine()
        program = engine.compile(graph, range(mine))
        return planned_memory(graph, held), ProgramBytes(**engine.program_bytes(program))


def gpt(batch: int = 16, **keys: Any) -> tuple[Callable[[], Any], Any]:
    sizes = {"vocab": 512, "seq": 128, "d": 128, "layers": 2, "heads": 4,
             "positions": "rotary", "norm": "rms"} | keys  # fmt: skip
    config = nn.GPTConfig(**sizes)
    ids = np.zeros((batch, config.seq), np.int32)
    return lambda: nn.GPT(config), lambda: (ids, ids)


def mlp(d: int, layers: int, rows: int) -> tuple[Callable[[], Any], Any]:
    return lambda: MLP(d, layers), lambda: (np.zeros((rows, d), np.float32),)


def conv(width: int, batch: int) -> tuple[Callable[[], Any], Any]:
    images = np.zeros((batch, 1, 24, 24), np.float32), np.zeros(batch, np.int32)
    return lambda: ConvNet(width), lambda: images


CASES = {
    "GPT": Case(*gpt()),
    "GPT, bf16 products": Case(*gpt(), dtype="bf16"),
    "GPT, layers looped": Case(*gpt(layers=4, loop=True)),
    "GPT, recompute products": Case(*gpt(layers=4, remat="products")),
    "GPT, recompute": Case(*gpt(layers=4, remat=True)),
    "GPT, dp": Case(*gpt(64), "dp=8"),
    "GPT, tp": Case(*gpt(), "tp=4", "tp"),
    "GPT, dp tp": Case(*gpt(), "dp=2,tp=4", "dp+tp"),
    "GPT, dp tp, bf16": Case(*gpt(), "dp=2,tp=4", "dp+tp", "bf16"),
    "GPT, dp tp, recompute": Case(*gpt(layers=4, remat=True), "dp=2,tp=4", "dp+tp"),
    "GPT, ZeRO-1": Case(*gpt(64), "dp=8", "zero1"),
    "GPT, ZeRO-2": Case(*gpt(64), "dp=8", "zero2"),
    "GPT, ZeRO-3": Case(*gpt(64), "dp=8", "zero3"),
    "GPT, ZeRO-3, recompute": Case(*gpt(64, layers=4, remat=True), "dp=8", "zero3"),
    "GPT, ZeRO-3, tp": Case(*gpt(), "dp=2,tp=4", "zero3+tp"),
    "MLP": Case(*mlp(256, 4, 2048)),
    "MLP, dp": Case(*mlp(256, 4, 2048), "dp=8"),
    "MLP, dp tp": Case(*mlp(256, 4, 2048), "dp=2,tp=4", "dp+tp"),
    "MLP, ZeRO-3": Case(*mlp(256, 4, 2048), "dp=8", "zero3"),
    "ConvNet": Case(*conv(8, 64)),
    "ConvNet, dp": Case(*conv(8, 64), "dp=8"),
    # Not looked at while the rules were made.
    "GPT of layer norms, tied, dp tp": Case(
        *gpt(norm="layer", positions="learned", tied=True), "dp=2,tp=2", "dp+tp", fitted=False
    ),
    "GPT of SwiGLU, dp": Case(*gpt(activation="swiglu", hidden=256), "dp=4", fitted=False),
    "GPT, uneven vocabulary and heads, dp tp": Case(
        *gpt(vocab=500, d=120), "dp=2,tp=3", "dp+tp", fitted=False
    ),
    "GPT, uneven ZeRO-3": Case(*gpt(12, vocab=500, d=104), "dp=3", "zero3", fitted=False),
    "GPT, ZeRO-3 in, dp out": Case(*gpt(32), "in=4,out=2", "zero3@in+dp@out", fitted=False),
    "GPT, ZeRO-2 in, dp out": Case(*gpt(32), "in=4,out=2", "zero2@in+dp@out", fitted=False),
    "GPT, 512 tokens, dp": Case(*gpt(4, seq=512), "dp=2", fitted=False),
    "GPT, wide, tp": Case(*gpt(4, d=384, heads=8, layers=3), "tp=4", "tp", fitted=False),
    "GPT, vocabulary of 4096": Case(*gpt(vocab=4096, layers=1), fitted=False),
    "GPT, grouped heads": Case(*gpt(8, kv_heads=2, seq=256), fitted=False),
    "GPT, parallel blocks": Case(*gpt(block="parallel", activation="relu"), fitted=False),
    "GPT, sequence parallel": Case(
        *gpt(sequence_parallel="tp"), "dp=2,tp=4", "dp+tp", fitted=False
    ),
    "GPT, recompute products, dp tp": Case(
        *gpt(layers=6, remat="products"), "dp=2,tp=2", "dp+tp", fitted=False
    ),
    "GPT, bf16, ZeRO-3": Case(*gpt(64, layers=3), "dp=8", "zero3", "bf16", fitted=False),
    "GPT, bf16, recompute, dp": Case(
        *gpt(layers=4, remat=True), "dp=2", "dp", "bf16", fitted=False
    ),
    "GPT, ring attention": Case(*gpt(seq=256, context="ring"), "dp=2,cp=4", fitted=False),
    "MLP, deep, dp tp": Case(*mlp(192, 6, 1024), "dp=4,tp=2", "dp+tp", fitted=False),
    "MLP, deep, ZeRO-1": Case(*mlp(128, 8, 4096), "dp=4", "zero1", fitted=False),
    "ConvNet, wide, dp": Case(*conv(16, 128), "dp=4", fitted=False),
}


def lines() -> Iterator[str]:
    """The rows of the table, every case compiled."""
    for name, case in CASES.items():
        plan, xla = case.measure()
        error = plan.temporary / xla.temporary - 1
        peak = plan.peak / xla.peak - 1
        mark = "" if case.fitted else "†"
        shown = [f"{x:+.0%}".replace("-0%", "0%").replace("+0%", "0%") for x in (error, peak)]
        sizes = [x / 2**20 for x in (plan.temporary, xla.temporary)]
        told = [f"{x:.1f}" if x >= 1 else f"{x:.2f}" for x in sizes]
        yield f"| {name}{mark} | `{case.mesh}` | {' | '.join((*told, *shown))} |\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    head = "\n| step | mesh | planned, MiB | XLA, MiB | error | error of the peak |\n"
    table = head + "|---|---|---:|---:|---:|---:|\n" + "".join(lines()) + "\n"
    PAGE.write_text(before + BEGIN + table + END + after)


if __name__ == "__main__":
    main()
