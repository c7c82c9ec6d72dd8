"""Changes that make a step faster, each simulated, with its gain.

A change is simulated on the same schedule with other inputs (work that is left out, blocks of
another dtype, a machine with other rates), or on the schedule that other options make of the same
program. So a gain is what the model of the step says, and no rule of thumb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from ..core.dtypes import bf16, f32
from ..core.errors import TesseraError
from ..core.machine.chip import Chip
from ..core.machine.machine import Machine
from ..core.options import ProgramOptions, ScheduleOptions
from ..cost.flops import counted
from ..ir.graph.node import Graph, Node, Scope, copied, input_node
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from ..ops.control import after, in_memory
from ..ops.create import full
from ..ops.redistribute import all_reduce, reduce_scatter
from ..passes.plan import plan
from ..passes.simplify import attrs_key
from .simulate import simulate
from .timeline import Timeline

BUCKET_BYTES = 32 << 20
LEAST = 0.0005  # of the step; smaller gains are not shown
SUMS = (all_reduce.name, reduce_scatter.name)
Rewrite = Callable[[Graph], Graph]


@dataclass(frozen=True, slots=True)
class Change:
    """A change, the option of Tessera that makes it, and the simulated time for the tokens of one
    step after it. `gain` is the part of the step that it saves."""

    what: str
    how: str
    step_s: float
    gain: float


def changes(schedule: Schedule, machine: Machine, now: Timeline, room: bool) -> tuple[Change, ...]:
    """Returns the changes that make the step faster, the largest gain first. `room`: twice the rows
    fit into memory."""
    found: list[Change] = []
    for what, how, run in (*_links(schedule, machine, now), *_others(schedule, machine, now, room)):
        try:
            step_s = run()
        except TesseraError:  # the program cannot be planned under these options
            continue
        gain = 1 - step_s / now.step_s if now.step_s else 0.0
        if gain > LEAST:
            found.append(Change(what, how, step_s, gain))
    return tuple(sorted(found, key=lambda c: -c.gain))


Tried = tuple[str, str, Callable[[], float]]


def _links(schedule: Schedule, machine: Machine, now: Timeline) -> Iterator[Tried]:
    """Yields each level of links that carries something, with twice its bandwidth."""

    def faster_s(i: int) -> float:
        return simulate(schedule, _faster(machine, i)).step_s

    for i, link in enumerate(machine.axes):
        axes = dict.fromkeys(a for t in now.traffic if link in t.links for a in t.axes)
        if axes:
            along = ", ".join(axes)
            yield (
                f"links of level {link!r} twice as fast",
                f"the axes {along} use them: name an axis of much traffic later in the mesh, so"
                " that it stays inside of a unit, or split fewer values over it",
                partial(faster_s, i),
            )


def _others(schedule: Schedule, machine: Machine, now: Timeline, room: bool) -> Iterator[Tried]:
    chip = machine.chip
    assert chip is not None

    def under(options: ScheduleOptions) -> float:
        chosen = replace(schedule.options, schedule=options)
        return simulate(plan(_under(schedule.graph, chosen)), machine).step_s

    def on(other: Chip) -> float:
        return simulate(schedule, replace(machine, chip=other)).step_s

    own = schedule.options.schedule
    again = recomputed(schedule).layers
    yield (
        "nothing computed again in the backward pass",
        'remat=False (or "products") of the model or scan: memory then keeps the activations',
        lambda: simulate(rewritten(schedule, lambda g: without(g, again)), machine).step_s,
    )
    yield (
        "sums over devices in bf16",
        'reduce_dtype="bf16" of ts.grad',
        lambda: simulate(rewritten(schedule, sums=narrowed), machine).step_s,
    )
    f32_s, half_s = (chip.product_s(d, 1, 4096, 4096, 4096) for d in ("f32", "bf16"))
    if half_s < f32_s:
        wide = [replace(p, dtype="f32") if p.dtype == "bf16" else p for p in chip.products]
        fast = replace(chip, products=tuple(p for p in wide if p != chip.rate("f32")))
        yield "products of f32 in bf16", 'with ts.autocast("bf16")', lambda: on(fast)
    if room:
        # Twice the elements in each product and kernel, for the time of one.
        half = [replace(p, area=p.area / 2) for p in chip.products]
        more = replace(
            chip, products=tuple(half), kernel_s=chip.kernel_s / 2, program_s=chip.program_s / 2
        )
        rows = "microbatches half as many" if schedule.is_staged else "a batch of twice the rows"
        yield (
            "twice the rows in each kernel (memory has room)",
            f"{rows}; sums of gradients are counted in full, so the gain is at least this",
            lambda: on(more),
        )
    if schedule.is_staged:
        idle_s = min((s.bubble_s for s in now.stages), default=0.0)
        yield (
            "half the bubble: twice the microbatches",
            "microbatches= of the pipeline, or an order with a smaller bubble (ZB-H1, DualPipe)",
            lambda: now.step_s - idle_s / 2,
        )
        return
    if own.overlap is not True:
        yield (
            "communication that overlaps with work",
            "@schedule(overlap=True)",
            lambda: under(replace(own, overlap=True)),
        )
    if own.bucket_bytes is None:
        yield (
            f"sums joined in buckets of {BUCKET_BYTES >> 20} MiB, and overlapped",
            f"@schedule(overlap=True, bucket_bytes={BUCKET_BYTES >> 20} << 20)",
            lambda: under(replace(own, overlap=True, bucket_bytes=BUCKET_BYTES)),
        )
    if own.reshard_after_forward is not False:
        yield (
            "split weights kept whole for the backward pass",
            "@schedule(reshard_after_forward=False): memory then holds the whole weights",
            lambda: under(replace(own, reshard_after_forward=False)),
        )


def _under(graph: Graph, options: ProgramOptions) -> Graph:
    made = graph.rewrite(None, lambda body: _under(body, options))
    return replace(made, options=options)


def _faster(machine: Machine, at: int) -> Machine:
    links = machine.topology
    levels = [
        replace(x, link=replace(x.link, bytes_per_s=2 * x.link.bytes_per_s)) if i == at else x
        for i, x in enumerate(links.levels)
    ]
    return replace(machine, topology=replace(links, levels=tuple(levels)))


# -- what is computed again -----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Again:
    """The nodes that compute again what an earlier part of a schedule computed; `layers` are those
    of whole modules, `all` also those of an op's own loop, as tiles of attention have one."""

    all: frozenset[Node]
    layers: frozenset[Node]


def recomputed(schedule: Schedule) -> Again:
    """Returns what `schedule` computes again: nodes that an earlier one of the same steps equals
    (`ts.remat`), and nodes of a later body (of a loop, or of a pipeline's region) that were
    recorded in the same visit of a module. Bodies of functions without modules show no such
    nodes."""
    equal = set[Node]()
    first: dict[tuple[str, str, tuple[int, ...]], object] = {}
    own = set[tuple[str, str, tuple[int, ...]]]()  # of loops inside of one visit
    found: dict[Node, tuple[str, str, tuple[int, ...]]] = {}
    done: set[object] = set()

    def see(nodes: tuple[Node, ...], owner: object, around: tuple[int, ...]) -> None:
        for n in nodes:
            visits = _visits(n.scope)
            for body in n.attrs.values():
                if isinstance(body, Graph) and body not in done:
                    done.add(body)
                    see(body.nodes, body, visits)
            key = (n.op, n.loc, visits)
            if not visits:
                continue
            if first.setdefault(key, owner) is not owner:
                found[n] = key
            elif visits == around:
                own.add(key)

    def walk(s: Schedule, around: tuple[int, ...]) -> None:
        equal.update(_equal(s))
        for step in s.steps:
            match step:
                case Compute():
                    see(step.graph.nodes, s, around)
                case Loop() | Region():
                    if step.body not in done:
                        done.add(step.body)
                        walk(step.body, _visits(step.scope) if isinstance(step, Loop) else ())
                case Collective() | Send():
                    pass
                case _:
                    assert_never(step)

    walk(schedule, ())
    layers = {n for n, key in found.items() if key not in own}
    return Again(frozenset({*found, *equal}), frozenset(layers | equal))


def _equal(schedule: Schedule) -> set[Node]:
    """Returns the nodes of the steps of `schedule`, without bodies, that compute what an earlier
    one computes, where a value in host memory, or after another, counts as that value."""
    found, values = set[Node](), dict[object, object]()  # of buffers, of nodes, and of equal nodes
    for step in schedule.steps:
        if not isinstance(step, Compute | Collective):
            continue
        for n, buffer in zip(step.graph.inputs, step.reads, strict=True):
            values[n] = values.get(buffer, buffer)
        for n in step.graph.nodes:
            args = tuple([values[a] for a in n.args])
            if n.op in (after.name, in_memory.name):
                values[n] = args[0]
            elif n.op != "input":
                key = (n.op, args, n.types, str(attrs_key(n.attrs))) if n.kind.pure else n
                values[n] = values.setdefault(key, n)
                found.update([n] if values[n] is not n else ())
        for n, buffer in zip(step.graph.outputs, step.writes, strict=True):
            values[buffer] = values[n]
    return found


def _visits(scope: str) -> tuple[int, ...]:
    return scope.visits if isinstance(scope, Scope) else ()


def model_flops(schedule: Schedule) -> int:
    """Returns the FLOPs of products and convolutions of all devices, without what is computed
    again."""
    again = recomputed(schedule).all

    def of(n: Node) -> int:
        return n.flops if n.kind.memory in ("product", "conv") and n not in again else 0

    def total(s: Schedule) -> int:
        flops = 0
        for step in s.steps:
            match step:
                case Compute():
                    flops += counted(step.graph, of)
                case Loop() | Region():
                    flops += total(step.body) * (step.times if isinstance(step, Loop) else 1)
                case Collective() | Send():
                    pass
                case _:
                    assert_never(step)
        return flops

    return total(schedule)


# -- schedules with other graphs, to be simulated only --------------------------------------------
def rewritten(schedule: Schedule, work: Rewrite | None = None, sums: Rewrite | None = None
              ) -> Schedule:  # fmt: skip
    """Returns `schedule` with other graphs in its steps: of computations by `work`, of collectives
    by `sums`. Types of buffers stay, so it can be simulated, and does not run."""
    done: dict[object, Schedule | Graph] = {}

    def graph(g: Graph, rule: Rewrite | None) -> Graph:
        if rule is None:
            return g
        if g not in done:
            done[g] = rule(g)
        made = done[g]
        assert isinstance(made, Graph)
        return made

    def body(s: Schedule) -> Schedule:
        if s not in done:
            done[s] = replace(s, steps=tuple(map(one, s.steps)))
        made = done[s]
        assert isinstance(made, Schedule)
        return made

    def one(step: Step) -> Step:
        match step:
            case Compute():
                return replace(step, graph=graph(step.graph, work))
            case Collective():
                return replace(step, graph=graph(step.graph, sums))
            case Loop() | Region():
                return replace(step, body=body(step.body))
            case Send():
                return step
            case _:
                assert_never(step)

    return body(schedule)


def without(graph: Graph, nodes: frozenset[Node]) -> Graph:
    """Returns `graph` with constants in place of the results of `nodes`. A constant that a product
    reads is written once, as the forward pass writes a value that it keeps."""

    def rule(was: Node, now: Node, emit: Callable[[Node], Node]) -> Node | None:
        if was not in nodes or len(was.types) > 1 or was.is_collective:
            return None
        t = was.type
        attrs = {"dtype": t.dtype, "shape": t.shape, "value": 0.0}
        return emit(Node(full.name, (), was.types, attrs, was.loc, was.scope))

    made = graph.rewrite(rule, lambda body: without(body, nodes))
    return made if made is graph else made.part(made.inputs, made.outputs)


def narrowed(graph: Graph) -> Graph:
    """Returns the graph of a collective with its sums of f32 in bf16; others stay."""
    sums = [n for n in graph.nodes if n.op in SUMS]
    if not sums or any(n.type.dtype is not f32 for n in sums):
        return graph
    new = {x: input_node(x.type.with_dtype(bf16), x.attrs["name"]) for x in graph.inputs}
    nodes = [
        replace(n, types=tuple(t.with_dtype(bf16) for t in n.types))
        for n in copied([n for n in graph.nodes if n.op != "input"], dict(new))
    ]
    inputs = tuple(new.values())
    return Graph(graph.name, (*inputs, *nodes), inputs, tuple(nodes[-1:]), graph.options)


__all__ = ["Change", "changes", "model_flops", "recomputed", "rewritten"]
