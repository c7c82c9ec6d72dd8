"""Plan of a step before it runs: the mesh, the memory per device, its peak, and the communication.

`render_plan` reads all of it from types and the recorded graph: nothing is computed, and the mesh
may be larger than the machine.

>>> from tessera.core.layout import parse_type
>>> from tessera.ir.graph.build import Builder
>>> mesh = Mesh(["dp", "tp"], devices=range(8), shape=(2, 4))
>>> b = Builder("step")
>>> sums = b.input(parse_type("f32[512, 1024@tp] +dp", mesh))
>>> done = b.redistribute(sums, sums.type.complete(), "gradient")
>>> traffic(b.graph([done]))
[Traffic(kind='all_reduce', axes=('dp',), reason='gradient', times=1, wire_bytes=524288)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.checks import mapping, unfit
from ..core.declared import Function, Given, NonNegative
from ..core.devices import platform
from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..core.public import checked
from ..cost.flops import device_flops
from ..cost.memory import MemoryPlan, memory_plan, stage_plans
from ..ir.graph.node import Graph, Node, need_graph, scope_family
from ..ir.graph.text import size_text
from ..ir.schedule.schedule import Schedule, Send
from ..lang.jit.trace import trace
from ..lang.record.operands import type_like
from ..lang.record.tree import flatten
from ..lang.value.host_data import is_array
from ..lang.value.tensor import Tensor
from ..ops.control import after, in_memory
from ..passes.plan import prepared
from ..passes.regions import all_kept
from .mesh_picture import render_mesh

MOST_WEIGHTS, MOST_ROWS = 24, 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind, over the same axes, for the same reason.

    `times` is the number of their runs in a step, `wire_bytes` the bytes that one device receives
    in all of them; in a pipeline they are those of all stages and the mean over devices. There,
    `send` is the traffic between stages.
    """

    kind: str
    axes: tuple[str, ...]
    reason: str
    times: int
    wire_bytes: int


def traffic(program: Graph | Schedule) -> list[Traffic]:
    """The collectives of `program` by kind, axes and reason, all iterations of loops included, the
    largest first."""
    if not isinstance(program, Schedule):
        need_graph("traffic", program)
    totals: dict[tuple[str, tuple[str, ...], str], tuple[int, float]] = {}

    def add(key: tuple[str, tuple[str, ...], str], times: int, size: float) -> None:
        before = totals.get(key, (0, 0))
        totals[key] = before[0] + times, before[1] + size

    for node, times in program.collectives():
        key = (node.op, tuple(node.attrs["axes"]), _reason(node))
        share = _share(node.type.mesh, program.mesh)
        add(key, times, share * times * node.wire_bytes)
    if isinstance(program, Schedule):
        for step in program.steps:
            if isinstance(step, Send):
                key = ("send", program.along(step), step.note or "to another stage")
                got = [size * len(ids) for size, ids in program.arrivals(step) if size and ids]
                if got:
                    add(key, len(got), sum(got) / (program.mesh.size if program.mesh else 1))
    rows = [Traffic(*key, count, round(size)) for key, (count, size) in totals.items()]
    return sorted(rows, key=lambda row: -row.wire_bytes)


def _share(part: Mesh | None, whole: Mesh | None) -> float:
    """The fraction of the devices of `whole` that are in `part`."""
    return 1.0 if part is None or whole is None else part.size / whole.size


def _reason(node: Node) -> str:
    """The place in the model, the same for all layers, and the reason: `blocks.*.mlp, for add`."""
    why, scope = node.note or "as written", scope_family(node.scope)
    return why if not scope or node.scope in why else f"{scope}, {why}"


def local_bytes(tree: Any) -> int:
    """The bytes that one device holds of all tensors (or types) in `tree`; if they are on different
    slices of a mesh, those of the device that holds most."""
    here: Counter[Any] = Counter()
    everywhere = 0
    for t in _types(tree):
        if t.mesh is None:
            everywhere += t.device_bytes
        else:
            here.update(dict.fromkeys(t.mesh.physical.device_ids, t.device_bytes))
    return everywhere + max(here.values(), default=0)


def _types(tree: Any) -> list[TensorType]:
    """The types of the tensors, arrays and types in `tree`; other leaves take no memory."""
    leaves = flatten(tree)[0]
    types = (type_like(x) if isinstance(x, Tensor) or is_array(x) else x for x in leaves)
    return [t for t in types if isinstance(t, TensorType)]


@checked
def render_plan(
    mesh: Annotated[Mesh, Given("give the Mesh that the step runs on")],
    program: Graph | Schedule,
    weights: Mapping[str, Tensor | TensorType],
    held: Mapping[str, Any],
    model_flops: NonNegative | None = None,
) -> RenderableType:
    """The plan of one step as a picture for a rich console; `program` is its graph, or a pipeline's
    schedule.

    `weights` are shown one by one with their layouts; `held` names everything that stays on the
    devices between the parts of a step ("weights", "gradients", "optimizer", ...), each a tree of
    tensors or types. `model_flops` are the model's own, if known. The peak is that of a program
    that donates weights and state, or that of each stage. On a folded mesh the peak and the FLOPs
    are those of one place, of which a device has several.
    """
    fix = 'give tensors by name: model.parameters(), or {"w": w}'
    for name, w in mapping("render_plan", "weights", weights, fix).items():
        if not isinstance(w, Tensor | TensorType):
            raise unfit("render_plan", f"weights[{name!r}]", w, fix)
    return Group(
        render_mesh(mesh),
        Text(),
        _weights_table(weights),
        Text(),
        _memory_table(held),
        Text(),
        _peak_table(planned_stages(program, held), _one(mesh)),
        Text(),
        _traffic_table(program),
        Text(),
        Text(_flops_text(program, mesh, model_flops) + _again_text(program)),
    )


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    return table


def _weights_table(weights: Mapping[str, Tensor | TensorType]) -> Table:
    """A row for each of the first weights: name, layout, bytes a device."""
    types = {k: w.type if isinstance(w, Tensor) else w for k, w in weights.items()}
    count = sum(t.size for t in types.values())
    table = _table(
        f"{count:,} parameters in {len(types)} tensors",
        ("name", "left"),
        ("layout", "left"),
        ("a device", "right"),
    )
    for name, t in list(types.items())[:MOST_WEIGHTS]:
        table.add_row(name, Text(str(t)), size_text(t.device_bytes))
    rest = list(types.values())[MOST_WEIGHTS:]
    if rest:
        table.add_row(f"… and {len(rest)} more", "", size_text(local_bytes(rest)))
    return table


def _memory_table(held: Mapping[str, Any]) -> Table:
    table = _table(
        "memory", ("", "left"), ("whole", "right"), ("a device", "right"), ("all devices", "right")
    )
    whole = here = everywhere = 0
    for name, tree in held.items():
        types = _types(tree)
        size, local = sum(t.nbytes for t in types), local_bytes(types)
        total = sum(t.held_bytes for t in types)
        table.add_row(name, size_text(size), size_text(local), size_text(total))
        whole, here, everywhere = whole + size, here + local, everywhere + total
    table.add_section()
    table.add_row("together", size_text(whole), size_text(here), size_text(everywhere))
    return table


def planned_memory(program: Graph | Schedule, held: Mapping[str, Any]) -> MemoryPlan:
    """The peak of one run of `program`; `held` is as in `render_plan`. Gradients count where the
    program computes them, all other trees as its arguments."""
    return memory_plan(program, *_kinds(held))


class Recomputation(NamedTuple):
    """The cost of `ts.remat` in one step, on one device.

    `temporary` and `flops` are those of the step, `temporary_kept` and `flops_kept` those that it
    would have if all values were kept in the device's memory, in bytes and FLOPs; `on_host` are the
    bytes that it keeps in the memory of the host. A CPU has one memory, which `temporary` counts.
    """

    temporary: int
    temporary_kept: int
    flops: int
    flops_kept: int
    on_host: int


def recomputation(program: Graph, on: str | None = None) -> Recomputation:
    """The savings and the cost of the calls of `ts.remat` in `program`, a graph from `planned`.
    `on` is the kind of device, as in `memory_plan`."""
    kept = all_kept(need_graph("recomputation", program))
    nodes = () if (on or platform()) == "cpu" else program.nodes
    host = (n for n in nodes if n.op == in_memory.name and n.attrs["space"] == "host")
    size, size_kept = (memory_plan(g, on=on).temporary for g in (program, kept))
    on_host = sum(n.type.local_bytes for n in host)
    return Recomputation(size, size_kept, device_flops(program), device_flops(kept), on_host)


def planned_stages(program: Graph | Schedule, held: Mapping[str, Any]) -> list[MemoryPlan]:
    """The peak of each stage of a pipeline's schedule; for anything else one plan."""
    if not isinstance(program, Schedule):
        return [planned_memory(program, held)]
    return list(stage_plans(program, *_kinds(held)).values())


def _kinds(held: Mapping[str, Any]) -> tuple[dict[str, list[TensorType]], list[TensorType]]:
    mapping("planned_memory", "what is held", held, 'give {"weights": weights, "optimizer": state}')
    given = {name: _types(tree) for name, tree in held.items() if name != "gradients"}
    return given, _types(held.get("gradients", ()))


def _one(mesh: Mesh) -> str:
    """The unit of per-program figures: "a device", or "one place" of a folded mesh."""
    return "a device" if mesh.onto is None else "one place"


def _peak_table(plans: Sequence[MemoryPlan], one: str) -> Table:
    names = [f"stage {i}" for i in range(len(plans))] if len(plans) > 1 else [one]
    table = _table("planned peak of a step", ("", "left"), *((name, "right") for name in names))
    for kind in dict.fromkeys(kind for plan in plans for kind in plan.rows):
        table.add_row(kind, *(size_text(plan.rows.get(kind, 0)) for plan in plans))
    table.add_section()
    table.add_row("together", *(size_text(plan.peak) for plan in plans))
    return table


def _traffic_table(program: Graph | Schedule) -> RenderableType:
    """A row for each kind of collective of a step: axes, times, bytes that a device receives,
    reason."""
    rows = traffic(program)
    if not rows:
        return Text("no collectives: nothing crosses a wire", style="bold")
    times, size = sum(r.times for r in rows), sum(r.wire_bytes for r in rows)
    count = "1 collective" if times == 1 else f"{times} collectives"
    table = _table(
        f"{count} a step: a device receives {size_text(size)}"
        + (" on average" if isinstance(program, Schedule) else ""),
        ("kind", "left"),
        ("axes", "left"),
        ("times", "right"),
        ("receives", "right"),
        ("reason", "left"),
    )
    table.columns[-1].no_wrap = False  # paths of modules are long
    for r in rows[:MOST_ROWS]:
        table.add_row(r.kind, ", ".join(r.axes), str(r.times), size_text(r.wire_bytes), r.reason)
    if rest := rows[MOST_ROWS:]:
        table.add_row(*_others_row(rest))
    return table


def _others_row(rows: Iterable[Traffic]) -> tuple[str, ...]:
    rows = list(rows)
    axes = dict.fromkeys(a for r in rows for a in r.axes)
    size = sum(r.wire_bytes for r in rows)
    return "others", ", ".join(axes), str(sum(r.times for r in rows)), size_text(size), ""


def _flops_text(program: Graph | Schedule, mesh: Mesh, model_flops: float | None) -> str:
    graphs = [s.graph for s in program.steps] if isinstance(program, Schedule) else [program]
    flops = sum(g.flops for g in graphs)
    own = sum(device_flops(g) * _share(g.mesh, mesh) for g in graphs)
    mean = " on average" if isinstance(program, Schedule) else ""
    text = f"{flops_text(flops)} a step, {flops_text(own)} on {_one(mesh)}{mean}"
    if model_flops is not None:
        text += f"; the model's own products are {flops_text(model_flops)}"
    return text


def _again_text(program: Graph | Schedule) -> str:
    """A line about `ts.remat`, if the program has calls of it."""
    if isinstance(program, Schedule) or not any(n.op == after.name for n in program.nodes):
        return ""
    r = recomputation(program)
    away = f", {size_text(r.on_host)} are in host memory" if r.on_host else ""
    return (
        f"\nrecomputation: temporaries {size_text(r.temporary)} instead of "
        f"{size_text(r.temporary_kept)}{away}; {flops_text(r.flops - r.flops_kept)} more"
    )


def flops_text(n: float) -> str:
    """A number of operations as readable text.

    >>> flops_text(35_060_985_894), flops_text(1.2e6)
    ('35.1 GFLOP', '1.2 MFLOP')
    """
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.1f} {unit}FLOP"
    return f"{n:.0f} FLOP"


@checked
def planned(step: Function, *args: Any) -> Graph:
    """The graph that `step(*args)` will run: recorded and prepared, not run.

    Arguments that the function changes count as its results.
    """

    def whole(*args: Any) -> Any:
        return step(*args), args

    whole.__name__ = getattr(step, "__name__", "step")
    return prepared(trace(whole, *args))
