"""The sections of bench/RESULTS.md, in the order of the page."""

from __future__ import annotations

import sections_around as around
import sections_steps as whole
from processor import gpu
from scripts import Section

SECTIONS = {
    "steps": Section("A training step against hand-written JAX", whole.steps),
    "step": Section("A training step taken apart", whole.taken_apart),
    "ddp": Section("Against PyTorch DDP", whole.ddp),
    "processes": Section("Against PyTorch DDP, two processes each", whole.processes),
    "sums": Section("A sum over devices, in one process and between processes", whole.sums),
    "fsdp": Section("ZeRO-3 against FSDP2", whole.fsdp),
    "gpu": Section("A training step on a GPU", whole.on_a_gpu, gpu),
    "nets": Section("A convnet and mixed experts against PyTorch", whole.nets),
    "tune": Section("After tuning, against the defaults", whole.tuned),
    "kernels": Section("Kernels on tiles", around.kernels),
    "dispatch": Section("What a call costs", around.dispatch),
    "order": Section("The order of calls, compared", around.order),
    "ttnn": Section("TT-NN's calls", around.ttnn_calls),
    "startup": Section("How long until a program runs", around.startup),
    "plan": Section("Predicted and measured steps", around.plan),
    "growth": Section("How planning grows with the model", around.growth),
    "loader": Section("What a loader gives out", around.loader),
    "moe": Section("Experts: dispatch and combine", around.moe),
    "checkpoints": Section("What a checkpoint costs", around.checkpoints),
    "pipeline": Section("A pipelined step", whole.pipeline),
    "stepped": Section("Step by step against fused", whole.stepped),
    "price": Section("The price of the same bits", whole.price),
    "guard": Section("The price of right reductions", whole.guard),
}
