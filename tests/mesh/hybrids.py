"""Hybrid parallelism: programs under random combinations of mesh, strategies and schedules.

A `Program` is the computation; a `Hybrid` is its placement and order. The numbers depend on the
program alone, so each has one reference, computed on one device.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, optim, pipeline
from tessera.nn.context_parallel import split_sequence, whole_sequence
from tessera.nn.self_attention import Attention
from tessera.nn.stack import Stack

BATCH, SEQ, STEPS = 24, 16, 2
AXES = ("dp", "pp", "ep", "cp", "tp")
TWO_CHUNKS = ("Interleaved1F1B", "ZBV", "DualPipeV")


# -- what is computed -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Program:
    """A small transformer; with `experts`, every second layer has that many instead of an MLP.

    The experts have no capacity and no balance loss: a capacity counts the tokens of a group, and
    the load is that of a microbatch, so a split of the batch would change the program.
    """

    layers: int
    experts: int = 0
    shared: int = 0
    tied: bool = False
    vocab: int = 24
    d: int = 16
    heads: int = 4
    kv_heads: int | None = None
    head_size: int | None = None
    hidden: int = 32
    norm: str = "rms"
    activation: str = "gelu"
    positions: str = "rotary"
    biases: tuple[str, ...] = ()
    logits: bool = False  # the loss takes whole logits, outside of the model
    clip: float = 0.1  # the norm to which gradients are clipped


PROGRAMS = {
    "even": Program(2),
    "odd": Program(5, vocab=19, heads=3, head_size=4, hidden=27, norm="layer", positions="learned"),
    "tied": Program(6, tied=True, kv_heads=2, positions="alibi", biases=("qkv", "out", "mlp")),
    "logits": Program(3, vocab=22, activation="swiglu", hidden=30, tied=True, logits=True),
    "experts": Program(2, experts=4, logits=True),
    "experts6": Program(3, experts=6, shared=1, tied=True, vocab=19, hidden=27, norm="layer"),
}


@dataclass(frozen=True)
class Hybrid:
    """A program's placement on a mesh, and the order of its stages."""

    program: str
    dp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0
    zero_axis: str = "dp"
    schedule: str = ""  # the pipeline's schedule
    microbatches: int = 1
    context: str = ""  # the kind of attention over cp
    sequence_parallel: bool = False
    recompute: str = ""
    rows_over_ep: bool = False  # the batch is split over ep too
    by_cost: bool = False  # the pipeline is one function, cut by cost

    @property
    def id(self) -> str:
        """The test id: the choices that differ from one device."""
        said = [self.program]
        said += [f"{a}{getattr(self, a)}" for a in AXES if getattr(self, a) > 1]
        if self.zero:
            said.append(f"zero{self.zero}{self.zero_axis if self.zero_axis != 'dp' else ''}")
        if self.schedule:
            said.append(f"{self.schedule}x{self.microbatches}")
        said += [x for x in (self.context, self.recompute) if x]
        said += [f.name for f in fields(self) if getattr(self, f.name) is True]
        return "-".join(said)

    @property
    def stages(self) -> int:
        return self.pp * (2 if self.schedule in TWO_CHUNKS else 1)

    @property
    def mesh(self) -> dist.Mesh:
        sizes = {a: getattr(self, a) for a in AXES if getattr(self, a) > 1 or a == "dp"}
        return dist.Mesh(tuple(sizes), shape=sizes)


class Layer(nn.Module):
    """Attention, then an MLP or experts."""

    def __init__(self, c: nn.GPTConfig, p: Program) -> None:
        self.sequence_parallel = c.sequence_parallel
        self.norm_1, self.attention, self.norm_2 = c.make_norm(), Attention(c), c.make_norm()
        self.moe = nn.MoE(c.d, p.hidden, p.experts, shared=p.shared, gated=bool(p.shared))

    def __call__(self, x: Any) -> Any:
        axis = self.sequence_parallel
        x = x + split_sequence(self.attention(self.norm_1(x)), axis)
        return x + self.moe(self.norm_2(x))


class Model(nn.Module):
    """The program with separate layers, so that a pipeline stage may begin at each."""

    def __init__(self, p: Program, h: Hybrid) -> None:
        c = self.config = nn.GPTConfig(
            p.vocab, SEQ, p.d, p.layers, p.heads, p.kv_heads, p.hidden, p.norm, p.activation,
            p.positions, p.tied, head_size=p.head_size, biases=p.biases,
            context=h.context or None, sequence_parallel="tp" if h.sequence_parallel else None,
        )  # fmt: skip
        self.cp, self.logits = h.cp, p.logits
        self.embed = nn.Embedding(p.vocab, p.d)
        self.position = nn.Parameter(SEQ, p.d) if p.positions == "learned" else None
        self.layers = [
            Stack(
                Layer(c, p) if p.experts and i % 2 else nn.TransformerBlock(c),
                1,
                remat=h.recompute or False,
            )
            for i in range(p.layers)
        ]
        self.norm = c.make_norm()
        self.head = None if p.tied else nn.Parameter(p.d, p.vocab)

    def placed(self, x: Any, dim: int = 1) -> Any:
        """Returns `x`, a sequence along `dim`, in the order and layout of the layers."""
        if self.config.context is None or x.mesh is None:
            return x
        x = nn.zigzag(x, self.cp, dim) if self.config.context == "ring" else x
        return split_sequence(x, "cp", dim)

    def first(self, ids: Any) -> Any:
        x = self.embed(self.placed(ids))
        x = split_sequence(x, self.config.sequence_parallel)
        if self.position is not None:
            where = self.position if x.mesh is None else dist.shard(self.position, ())
            x = x + self.placed(where, 0)
        return x

    def last(self, x: Any) -> Any:
        x = whole_sequence(self.norm(x), self.config.sequence_parallel)
        return x @ self.weight if self.logits else x

    @property
    def weight(self) -> Any:
        return self.embed.weight.T if self.head is None else self.head

    def parts(self) -> list[Callable[..., Any]]:
        """The model as functions of (model, activations), in order."""
        one = [lambda m, x: (m, m.first(x))]
        many = [lambda m, x, i=i: (m, m.layers[i](x)) for i in range(len(self.layers))]
        return [*one, *many, lambda m, x: m.last(x)]

    def loss(self, out: Any, labels: Any) -> Any:
        """The loss from the last part's output."""
        labels = self.placed(labels)
        if self.logits:
            return nn.cross_entropy(out, labels)
        return nn.linear_cross_entropy(out, self.weight, labels)


def in_order(parts: list[Callable[..., Any]]) -> Callable[..., Any]:
    def run(model: Any, ids: Any) -> Any:
        out: Any = (model, ids)
        for part in parts:
            out = part(*out)
        return out

    return run


@functools.cache
def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    ids, labels = rng.integers(0, 19, (2, BATCH, SEQ)).astype(np.int32)
    labels[rng.random((BATCH, SEQ)) < 0.2] = -100
    labels[:5] = -100  # rows without a label
    return ids, labels


@functools.cache
def weights(name: str) -> dict[str, Any]:
    """Random initial weights: large enough that no part of the program is nearly linear, small
    enough that rounding errors do not grow from layer to layer."""
    model, rng = Model(PROGRAMS[name], Hybrid(name)), np.random.default_rng(7)
    found = {}
    for k, t in model.parameters().items():
        wide = 0.7 if k.startswith("embed") else 1.0 / np.sqrt(PROGRAMS[name].d)
        found[k] = (rng.normal(size=t.shape) * wide + ("norm" in k)).astype(np.float32)
    return found


def plan_of(h: Hybrid) -> Any:
    rules = [(r"moe\.(up|gate|down)$", -3)]
    plan = dist.strategy("data_parallel")
    if h.ep > 1:
        plan = plan + dist.strategy("tensor_parallel", "ep", rules=rules)
    if h.tp > 1:
        plan = plan + dist.strategy("tensor_parallel")
    if h.zero:
        plan = plan + dist.strategy("zero_redundancy_optimizer", h.zero_axis, stage=h.zero)
    return plan


# For each step: the loss, the gradients, the new weights and the optimizer's new moments.
Steps = list[tuple[float, dict[str, Any], dict[str, Any]]]


def trained(h: Hybrid, steps: int = STEPS) -> tuple[Steps, Any]:
    """Returns (the steps, the model's function, which has the plan of a pipeline)."""
    program, mesh, plan = PROGRAMS[h.program], h.mesh, plan_of(h)
    model = Model(program, h)
    laid = {}
    for k, t in model.parameters().items():
        to = plan.weight(k, t.type.on(mesh))
        laid[k] = ts.tensor(weights(h.program)[k], mesh=mesh, layout=to)
    model.load_parameters(laid)
    optimizer = optim.AdamW(0.02, eps=0.01)
    state = optimizer.init(model.parameters(), plan)
    run = in_order(model.parts())
    if h.pp > 1:
        how: Any = {"mesh": mesh, "schedule": h.schedule, "microbatches": h.microbatches}
        if h.by_cost:
            run = pipeline.run(("pp",), **how)(run)
        else:
            run = pipeline.compose(h.stages, model.parts(), **how)

    @ts.jit
    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        loss = model.loss(run(model, ids), labels)
        params = model.parameters()
        grads = ts.grad(loss, params, layout=plan)
        clipped, _ = optim.clip_by_global_norm(grads, program.clip)
        new, state = optimizer.update(params, clipped, state)
        return loss, grads, new, state

    rows = "(dp,ep)" if h.rows_over_ep else "dp"
    batch = [ts.tensor(x, mesh=mesh, layout=f"[{BATCH}@{rows}, {SEQ}]") for x in data()]
    found: Steps = []
    for _ in range(steps):
        loss, grads, new, state = step(model, state, *batch)
        model.load_parameters(new)
        parts = {"weight": new, "m": state["m"], "v": state["v"]}
        after = {f"{part} {k}": t.numpy() for part, of in parts.items() for k, t in of.items()}
        found.append((loss.item(), {k: g.numpy() for k, g in grads.items()}, after))
    return found, run


@functools.cache
def alone(name: str) -> Steps:
    return trained(Hybrid(name))[0]


# -- which of them --------------------------------------------------------------------------------
CHOICES: dict[str, tuple[Any, ...]] = {
    "program": tuple(PROGRAMS),
    "dp": (1, 2, 3, 4, 5),
    "pp": (1, 2, 4),
    "ep": (1, 2, 3, 4),
    "cp": (1, 2, 4),
    "tp": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
    "zero_axis": ("dp", "ep", "cp"),
    "schedule": ("", *pipeline.SCHEDULES),
    "microbatches": (1, 2, 3, 4, 6, 8),
    "context": ("", "ring", "all_to_all"),
    "sequence_parallel": (False, True),
    "recompute": ("", "recompute", "products", "together"),
    "rows_over_ep": (False, True),
    "by_cost": (False, True),
}
NEEDS = {"pp": ("schedule", "microbatches", "by_cost"), "cp": ("context",),
         "tp": ("sequence_parallel",), "ep": ("rows_over_ep",)}  # fmt: skip
SET_ONLY = ("schedule", "microbatches", "context")  # first value: hybrids without the feature
MESHES = [m for m in itertools.product(*(CHOICES[a] for a in AXES)) if 1 < math.prod(m) <= 8]


def legal(h: Hybrid) -> bool:
    """Returns whether the program, the schedule and the mesh of `h` are compatible."""
    p, shares = PROGRAMS[h.program], h.dp * (h.ep if h.rows_over_ep else 1)
    return (
        (h.ep == 1 or (p.experts > 0 and p.experts % h.ep == 0))
        and (h.pp == 1 or BATCH % (shares * h.microbatches) == 0)
        and h.stages <= p.layers + 2
        and (h.schedule != "DualPipeV" or h.microbatches >= 2 * h.pp)
        and (h.context != "all_to_all" or (p.kv_heads or p.heads) % (h.cp * h.tp) == 0)
        and (getattr(h, h.zero_axis) > 1 if h.zero else h.zero_axis == "dp")
    )


def drawn(seed: int) -> Iterator[Hybrid]:
    """Yields random legal hybrids without end."""
    rng = random.Random(seed)
    while True:
        sizes = dict(zip(AXES, rng.choice(MESHES), strict=True))
        idle = {k for axis, ks in NEEDS.items() if sizes[axis] == 1 for k in ks}
        rest = {
            k: many[0] if k in idle else rng.choice(many[k in SET_ONLY :])
            for k, many in CHOICES.items()
            if k not in AXES
        }
        h = Hybrid(**sizes, **rest)
        if legal(h):
            yield h


def traits(h: Hybrid) -> frozenset[Any]:
    """The choices of `h`, and all pairs of them."""
    ones = [(k, getattr(h, k)) for k in CHOICES]
    return frozenset(ones) | frozenset(itertools.combinations(ones, 2))


def most_first(hybrids: Iterable[Hybrid]) -> Iterator[Hybrid]:
    """Yields the hybrids greedily: next the one with the most traits that no earlier one has."""
    left = {h: traits(h) for h in hybrids}
    while left:
        best = max(left, key=lambda h: len(left[h]))
        new = left.pop(best)
        left = {h: rest - new for h, rest in left.items()}
        yield best


@functools.cache
def sample(count: int, seed: int = 4, draws: int = 500) -> list[Hybrid]:
    """Returns `count` of `draws` random hybrids that together cover the most pairs of choices."""
    pool = itertools.islice(drawn(seed), draws)
    found = itertools.islice(most_first(pool), count)
    return sorted(found, key=lambda h: list(PROGRAMS).index(h.program))


ANY = ("program", "schedule", "microbatches")


def kinds(h: Hybrid) -> set[Any]:
    """The kinds of choices of `h`: for an axis whether its size is above 1; `ANY` is left out."""
    found = {k: getattr(h, k) for k in CHOICES if k not in ANY}
    return {(k, v > 1 if k in AXES else v) for k, v in found.items()}


def few(hybrids: Sequence[Hybrid], beside: Hybrid) -> set[Hybrid]:
    """Returns a nearly minimal set that covers all `kinds` which `beside` lacks, with few layers
    and stages preferred."""
    found, left = set(), set().union(*map(kinds, hybrids)) - kinds(beside)

    def worth(h: Hybrid) -> float:
        return len(kinds(h) & left) / (6 + PROGRAMS[h.program].layers * max(h.stages, 1))

    while left:
        best = max(hybrids, key=worth)
        found.add(best)
        left -= kinds(best)
    return found
