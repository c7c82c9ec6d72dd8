"""The sections of bench/RESULTS.md, by the question that each answers, in the order of the page."""

from __future__ import annotations

import sections_around as around
import sections_steps as whole
from processor import gpu
from scripts import Section

SECTIONS = {
    "steps": Section("How fast is a step against hand-written JAX?", whole.steps),
    "ddp": Section("How fast is data parallelism against PyTorch DDP?", whole.ddp),
    "processes": Section("How fast is it if both have two processes?", whole.processes),
    "fsdp": Section("How fast is ZeRO-3 against FSDP2?", whole.fsdp),
    "pipeline": Section("How fast is a pipeline against PyTorch's?", whole.pipeline),
    "gpu": Section("How fast is a step on a GPU?", whole.on_a_gpu, gpu),
    "nets": Section("How fast are a convnet and mixed experts against PyTorch?", whole.nets),
    "tune": Section("How much does tuning gain?", whole.tuned),
    "moe": Section("How long do dispatch and combine of experts take?", around.moe),
    "sums": Section("How fast is a sum over devices?", whole.sums),
    "kernels": Section("How fast are kernels on tiles?", around.kernels),
    "step": Section("Where does the time of a step go?", whole.taken_apart),
    "stepped": Section("How much slower is a program that runs step by step?", whole.stepped),
    "remat": Section("How much memory does recomputation save?", around.remat),
    "price": Section("What do the same bits on every mesh cost?", whole.price),
    "guard": Section("What do right reductions cost?", whole.guard),
    "dispatch": Section("What does a call cost?", around.dispatch),
    "ttnn": Section("What do TT-NN's calls cost?", around.ttnn_calls),
    "order": Section("What does the comparison of the processes' calls cost?", around.order),
    "startup": Section("How long does it take until a program runs?", around.startup),
    "growth": Section("How does planning grow with the model?", around.growth),
    "loader": Section("How fast is a loader?", around.loader),
    "checkpoints": Section("What does a checkpoint cost?", around.checkpoints),
    "plan": Section("How close is a predicted step to a measured one?", around.plan),
}
