"""The memory of `ts.remat` on GPUs, for 12 layers that are written out, by the compiler."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import tessera as ts
from tessera import dist, nn
from tessera.cost.memory import memory_plan
from tessera.runtime.ahead_of_time import compiled, described, why_not
from tessera.show.plan_view import Recomputation, recomputation

WHY = why_not()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"{WHY}; make check-gpu-aot brings it")
LAYERS, WIDTH, ROWS = 12, 1024, 8192
POLICIES = (None, "nothing", "dots", "offload")


class Block(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Parameter(WIDTH, 4 * WIDTH), nn.Parameter(4 * WIDTH, WIDTH)
        self.norm = nn.Parameter(WIDTH)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x + nn.gelu((nn.rms_norm(x) * self.norm) @ self.up) @ self.down


class Model(nn.Module):
    def __init__(self, policy: str | None) -> None:
        blocks = [Block() for _ in range(LAYERS)]
        self.blocks = [ts.remat(b, policy=policy) for b in blocks] if policy else blocks

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


@cache
def made(policy: str | None) -> tuple[int, int, Recomputation, str]:
    """Returns (temporary bytes by the compiler, those planned, what recomputation costs, the
    compiled text) of the gradient in bf16."""
    mesh = dist.Mesh(("dp",), devices=1)
    model = dist.place(Model(policy), dist.strategy("data_parallel"), mesh)

    @ts.jit
    def step(model: Model, x: ts.Tensor) -> Any:
        with ts.autocast("bf16"):
            return ts.grad(model(x), model)

    with described("h100", 1):
        step.plan(model, dist.tensor((ROWS, WIDTH), mesh=mesh))
        (part,) = compiled(step.programs[0])
    planned = memory_plan(step.graph, on="gpu").temporary
    return part.bytes["temporary"], planned, recomputation(step.graph, on="gpu"), part.text


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_the_plan_is_what_the_compiler_says(policy: str) -> None:
    theirs, mine, costs, _ = made(policy)
    assert abs(mine / theirs - 1) <= 0.1
    assert costs.temporary == mine
    assert costs.temporary_kept == pytest.approx(made(None)[1], rel=0.01)


def test_nothing_kept_needs_a_third_of_the_activations() -> None:
    # 384 MiB are the inputs of the layers, the rest is what the gradient of one layer needs.
    assert made("nothing")[0] < made(None)[0] / 2.9


def test_values_in_host_memory_are_copied_once_each_way() -> None:
    theirs, _, costs, text = made("offload")
    assert theirs < 1.01 * made("nothing")[0]
    assert costs.flops < 1.01 * made(None)[2].flops < 0.9 * made("nothing")[2].flops
    assert costs.on_host == LAYERS * ROWS * 4 * WIDTH * 2
    assert text.count(" copy-start(") == 2 * LAYERS
    assert made("dots")[0] - theirs > 0.85 * costs.on_host
