"""Time and memory of a step of a `Row`: its programs, simulated and put together as its pipeline.

A layer and the ends of the model come from the recorded programs of one microbatch
(row_programs.py). The pipeline's table of actions runs with these times; gradients are summed and
the optimizer runs by bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.machine.machine import Machine
from ..core.topology import Link, Topology
from ..cost.collective_time import collective_time
from ..cost.fused_time import fused_time
from ..cost.step_time import step_time
from ..ir.schedule.pipelines.orders import pipeline_table
from ..ir.schedule.pipelines.simulate import simulate as run_table
from ..ir.schedule.schedule import Schedule
from .machines import machine_of
from .row_programs import Sizes, planned
from .rows import Row
from .simulate import Simulator

# The part of a link's bandwidth that NCCL's collectives reach: 20 of 25 GB/s of a link of NVLink 3
# and 20.6 of 25 of NVLink 4 (the constants of its topology search), and 92 % of a network card.
REACHED = {"nvlink": 0.8, "infiniband": 0.92}
# The part of a single product's rate that products reach in a training step, where chips are hot
# and other kernels disturb: fitted, one number a chip (docs/accuracy.md says on what).
SUSTAINED = {"a100": 0.89, "h100": 0.69, "h200": 0.69, "b200": 0.69}  # the last two: estimates
# The rate of the first FlashAttention, in that of the second: forward 30 to 50 % of an A100's peak,
# backward 25 to 35 % (Dao 2023), so 32 % for both, of 56 %.
FIRST_FLASH = 0.57
STATE_BYTES = 12  # weights in f32 and both moments of Adam
OPTIMIZER_BYTES = 34  # read: state, gradient twice (its norm); written: state, weights in 16 bits
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted step. Of `step_s`, `pipeline_s` are the actions of the pipeline, `reduce_s` the
    exposed communication of gradients and weights, `optimizer_s` the update."""

    step_s: float
    tflops_per_chip: float
    mfu: float
    memory_gib: float
    pipeline_s: float
    reduce_s: float
    optimizer_s: float


def reached(t: Topology) -> Topology:
    """Returns the topology with the bandwidths that collectives reach."""

    def part(link: Link) -> float:
        return REACHED.get(link.name.partition(" ")[0], 1.0)

    links = [replace(x.link, bytes_per_s=x.link.bytes_per_s * part(x.link)) for x in t.levels]
    levels = (replace(x, link=link) for x, link in zip(t.levels, links, strict=True))
    return replace(t, levels=tuple(levels))


def machine_for(r: Row) -> Machine:
    """Returns the machine of a row, with the rates that training steps reach."""
    machine = machine_of(r.cluster, r.chips)
    chip = machine.chip
    assert chip is not None
    part = SUSTAINED.get(chip.name, 1.0)
    chip = replace(
        chip,
        products=tuple(replace(p, most=p.most * part) for p in chip.products),
        attention=chip.attention * (FIRST_FLASH if r.attention == "flash1" else 1.0),
    )
    return replace(machine, topology=reached(machine.topology), chip=chip)


def predict(r: Row, machine: Machine | None = None) -> Prediction:
    """Returns the predicted step of a row, on its machine or on `machine`."""
    machine = machine or machine_for(r)
    chip, topology = machine.chip, machine.topology
    assert chip is not None
    sizes = Sizes(
        r.hidden, r.ffn, r.heads, r.kv_heads, r.head_dim, r.vocab, r.seq, r.micro_batch, r.experts,
        r.top_k, r.mlp, r.attention, r.recompute, r.dropout, bool(r.sp), r.dtype, r.ep, r.cp, r.tp,
    )  # fmt: skip
    one, two = planned(sizes, 1), planned(sizes, 2)

    def step_s(plan: Schedule) -> float:
        time_of = fused_time if r.fused else step_time
        return Simulator(plan, machine, chip, time_of=time_of).timeline().step_s

    first_f, first_t = step_s(one.forward), step_s(one.both)
    layer_f, layer_t = step_s(two.forward) - first_f, step_s(two.both) - first_t
    ends_f, ends_t = first_f - layer_f, first_t - layer_t
    again = r.recompute in ("full", "early_stop")  # a forward pass more
    layer_b = layer_t if again else layer_t - layer_f
    if r.recompute == "early_stop":
        rows = r.micro_batch * r.seq // r.cp * (r.top_k if r.experts else 1)
        layer_b -= chip.product_s(r.dtype, 1, rows, r.hidden, r.ffn // r.tp)
    ends_b = ends_t - ends_f

    def shared_s(op: str, size: float, stride: int, ranks: int) -> float:
        groups = [[i + stride * k for k in range(ranks)] for i in range(stride)]
        return collective_time(op, size, groups, topology).time_s if ranks > 1 else 0.0

    layer_weights = two.weights - one.weights
    expert_weights = two.expert_weights - one.expert_weights
    ends_weights = one.weights - layer_weights
    ranks = r.dp * r.cp
    width = 4 if r.dtype == "f32" else 2
    if r.zero == 3:
        gather_s = shared_s("all_gather", width * layer_weights, r.tp, ranks)
        reduce_s = shared_s("reduce_scatter", r.grad_bytes * layer_weights, r.tp, ranks)
        layer_f, layer_b = max(layer_f, gather_s), max(layer_b, gather_s + reduce_s)
    # The pipeline.
    name = "Interleaved1F1B" if r.interleave > 1 else r.schedule
    table = pipeline_table(name, r.pp, r.microbatches, r.interleave if r.interleave > 1 else None)
    layers = _shares(r.layers, table.stages)
    hop_s = _hop_s(r, topology) if r.pp > 1 else 0.0
    held = 0.0 if r.overlap_pp else hop_s
    f = [n * layer_f + held for n in layers]
    b = [n * layer_b + held for n in layers]
    f[-1] += ends_f - held
    b[-1] += ends_b
    b[0] -= held
    kept = two.kept_bytes - one.kept_bytes
    if again:
        kept = 2 * r.micro_batch * r.seq * r.hidden // (r.cp * (r.tp if r.sp else 1))
    halves = [x / 2 for x in b]
    line = run_table(
        table, f, halves, halves, hop_s - held, activation=[float(n * kept) for n in layers]
    )
    pipeline_s = line.makespan_s
    # Gradients, weights and state of the heaviest rank.
    deepest = max(sum(layers[i] for i in table.stages_of(rank)) for rank in range(r.pp))
    own = layer_weights * deepest + ends_weights // (2 if r.pp > 1 else 1)
    experts = expert_weights * deepest
    reduce_s = 0.0
    if r.zero < 3:
        for count, n, stride in ((own, ranks, r.tp), (experts, ranks // r.ep, r.tp * r.ep)):
            op = "reduce_scatter" if r.zero else "all_reduce"
            took_s = shared_s(op, r.grad_bytes * count, stride, n)
            if r.overlap_dp:  # behind the last microbatch's backward pass, but for its last layer
                took_s = max(took_s / deepest, took_s - sum(b) / r.pp)
            reduce_s += took_s
            if r.zero:
                took_s = shared_s("all_gather", width * count, stride, n)
                if r.overlap_dp:
                    took_s = max(took_s / deepest, took_s - sum(f) / r.pp)
                reduce_s += took_s
    split = r.dp if r.zero else 1
    updated = (own + experts) / split
    optimizer_s = chip.memory_s(OPTIMIZER_BYTES * updated)
    total_s = pipeline_s + reduce_s + optimizer_s
    memory = (
        (own + experts) * width / (r.dp if r.zero == 3 else 1)
        + (own + experts) * r.grad_bytes / (r.dp if r.zero >= 2 else 1)
        + STATE_BYTES * updated
        + max(line.peak_activations)
        + one.working_bytes
        + (two.kept_bytes - one.kept_bytes if again else 0)
    )
    counted = r.hardware_flops if r.flops == "hardware" else r.model_flops
    peak = chip.rate(r.dtype).peak_flops_per_s
    return Prediction(
        total_s, counted / total_s / r.chips / 1e12, r.model_flops / total_s / r.chips / peak,
        memory / GIB, pipeline_s, reduce_s, optimizer_s,
    )  # fmt: skip


def _shares(layers: int, stages: int) -> list[int]:
    """Returns the layers of each stage; if they do not divide, the outer stages have one less,
    which have the embedding and the loss besides.

    >>> _shares(8, 4), _shares(6, 4), _shares(9, 4)
    ([2, 2, 2, 2], [1, 2, 2, 1], [2, 2, 3, 2])
    """
    most = -(-layers // stages)
    found = [most] * stages
    order = sorted(range(stages), key=lambda i: min(i, stages - 1 - i))
    for i in order[: most * stages - layers]:
        found[i] -= 1
    return found


def _hop_s(r: Row, topology: Topology) -> float:
    """Returns the time to send a microbatch to the next stage: each rank sends its part of it, and
    gathers the others' unless the sequence stays split."""
    size = 2 * r.micro_batch * r.seq // r.cp * r.hidden
    ends = [topology.coords(d) for d in (0, min(r.tp * r.cp * r.dp, topology.size - 1))]
    level = topology.levels[_first_difference(*ends)]
    took_s = level.link.latency_s + size / r.tp / level.link.bytes_per_s
    if r.tp > 1 and not r.sp:
        took_s += collective_time("all_gather", size, [range(r.tp)], topology).time_s
    return took_s


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a) - 1)
