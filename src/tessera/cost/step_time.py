"""Time of a compute step on one device: its graph as the compiler's kernels, each with its cost.

A kernel fills one buffer of the memory plan (cost/liveness.py), and computes the values that are
fused into it. A product takes the time of its operations at the chip's efficiency for its size, or
that of its bytes; every other kernel takes the time of its bytes, or of its elementwise operations.
Each kernel adds a launch. Copies to the host's memory and back run beside the others.

>>> from tessera.core.layout import parse_type
>>> from tessera.core.machine.chip import CHIPS
>>> from tessera.ir.graph.build import Builder
>>> b = Builder("mlp")
>>> x, w = (b.input(parse_type(t)) for t in ("bf16[4096, 4096]", "bf16[4096, 4096]"))
>>> graph = b.graph([b("tanh", b("contract", x, w, index="a b, b c -> a c"))])
>>> for k in kernels(graph, CHIPS["h100"]):
...     print(k.op, k.flops, k.moved_bytes, f"{k.time_s * 1e6:.0f} µs")
contract 137438953472 100663296 181 µs
tanh 16777216 67108864 29 µs
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..core.layout import TensorType
from ..core.machine.chip import Chip
from ..ir.graph.node import Graph, Node
from ..ir.tile.cost import cost
from ..ir.tile.node import on_block
from ..ops.control import in_memory, iterations
from ..ops.index_string import parse_index
from .flops import on_a_device
from .liveness import buffered
from .program import Program, of_graph

# Operations of an elementwise function such as exp or tanh, in units of an addition: a GPU's
# special functions have an eighth of the rate of additions (CUDA's table of instruction rates).
EXPENSIVE = 8
# A kernel with at least as many operations for each element of its operands and results is priced
# as a product.
DENSE = 8


Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes that decide the time of a kernel, with the axes that split them: `dense` operations
    of a product, `elements` of its result, other operations `ops`, and the bytes of each operand
    and result. On a mesh of other sizes each is smaller or larger by its axes."""

    dense: int
    elements: int
    ops: int
    axes: Axes
    element_axes: Axes
    moved: tuple[tuple[int, Axes], ...]
    is_attention: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a compiled program on one device: the op that names it, its operations, the bytes
    that it reads and writes, and its seconds; it runs `times` in the program. `dtype` is that of a
    product's operands, and "" of other kernels. `work` is what the time is computed from."""

    op: str
    flops: int
    moved_bytes: int
    time_s: float
    times: int = 1
    at: str = ""
    scope: str = ""
    dtype: str = ""
    work: Work = Work(0, 0, 0, (), (), ())

    @property
    def is_copy(self) -> bool:
        """Returns whether it is a copy to the host's memory or back."""
        return self.op == in_memory.name


@dataclass(frozen=True, slots=True)
class StepTime:
    """The sums over the kernels of a graph, on one device; `dtype` is that of most operations in
    products, "" without products. `copies_s` and `copied_bytes` are those of copies to the host's
    memory and back, which are not in the other sums."""

    time_s: float
    flops: int
    moved_bytes: int
    kernels: int
    dtype: str
    copies_s: float = 0.0
    copied_bytes: int = 0


def step_time(graph: Graph, chip: Chip) -> StepTime:
    """Returns the time of one run of `graph` on `chip`, with its operations and bytes."""
    return summed(kernels(graph, chip))


def summed(found: Sequence[Kernel]) -> StepTime:
    """Returns the sums over some kernels."""
    products: Counter[str] = Counter()
    copies = [k for k in found if k.is_copy]
    found = [k for k in found if not k.is_copy]
    for k in found:
        products[k.dtype] += k.flops * k.times if k.dtype else 0
    return StepTime(
        sum(k.time_s * k.times for k in found),
        sum(k.flops * k.times for k in found),
        sum(k.moved_bytes * k.times for k in found),
        sum(k.times for k in found),
        max(products, key=products.__getitem__, default=""),
        sum(k.time_s * k.times for k in copies),
        sum(k.moved_bytes * k.times for k in copies),
    )


def kernels(graph: Graph, chip: Chip) -> list[Kernel]:
    """Returns the kernels of `graph` in order, those of the bodies of loops included."""
    program = of_graph(graph)
    held = buffered(program, gpu=not chip.shared)
    buffers = {*held, *program.inputs}
    return [k for n in held for k in kernels_of(n, program, buffers, chip)]


def kernels_of(n: Node, program: Program, buffers: set[Node], chip: Chip) -> Iterator[Kernel]:
    """Yields the kernel of `n`, or those of the body of a loop, or of the longer branch."""
    bodies = [v for v in n.attrs.values() if isinstance(v, Graph)]
    if bodies:
        each = [kernels(body, chip) for body in bodies]
        longest = max(each, key=lambda ks: sum(k.time_s * k.times for k in ks))
        times = iterations(n.attrs["length"]) if "length" in n.attrs else 1
        yield from (replace(k, times=k.times * times) for k in longest)
        return
    fused, read = reads_of(n, program, buffers)
    parts = [(size, a.type.split_axes) for a, size in read.items()]
    parts += [(t.local_bytes, t.split_axes) for t in n.types]
    moved = sum(size for size, _ in parts)
    if not moved or not any(t.size for t in n.types):
        return
    flops = on_a_device(n)
    if "kernel" in n.attrs:
        c = cost(on_block(n.attrs["kernel"], [a.type.local_shape for a in n.args]))
        flops, moved = c.flops, c.loaded_bytes + c.stored_bytes
        parts = [(moved, n.types[0].split_axes)]
    elements = sum(map(_size, n.types))
    largest = max([elements, *(_size(a.type) for a in n.args)])
    dense = n.kind.memory in ("product", "conv") or "kernel" in n.attrs or flops > DENSE * largest
    work = [(on_a_device(x), is_slow(x)) for x in fused]
    ops = sum(x * (EXPENSIVE if slow else 1) for x, slow in work)
    if not dense:
        ops += flops * (EXPENSIVE if is_slow(n) else 1)
    dtype = ""
    time_s = max(chip.memory_s(moved), ops / chip.ops_per_s)
    if n.op == in_memory.name:
        parts = parts[len(read) :]
        moved = sum(size for size, _ in parts)
        time_s = moved / chip.host_bytes_per_s
    if dense and flops:
        depth = max(1, flops // (2 * elements))
        dtype = n.args[0].type.dtype.name
        if "causal" in n.attrs:  # attention
            peak = chip.rate(dtype).peak_flops_per_s
            time_s = max(time_s, flops / (peak * chip.attention))
        else:
            time_s = max(time_s, chip.product_s(dtype, 1, elements, 1, depth))
            time_s += chip.column_s * _by_columns(n) if chip.column_s else 0.0
    total = flops + sum(x for x, _ in work)
    axes = dict.fromkeys(a for t in (*n.types, *n.ins) for a in t.split_axes)
    yield Kernel(
        n.op, total, moved, time_s + chip.kernel_s, 1, n.loc, n.scope, dtype,
        Work(flops if dtype else 0, elements, ops, tuple(axes), n.types[0].split_axes,
             tuple(parts), "causal" in n.attrs),
    )  # fmt: skip


def reads_of(n: Node, program: Program, buffers: set[Node]) -> tuple[list[Node], dict[Node, int]]:
    """Returns (the nodes that the kernel of `n` computes besides `n`, the bytes that it reads of
    each buffer).

    Of a buffer of which only a part is read, such as a slice, as many elements count as the
    smallest value on the way has.
    """
    read: dict[Node, int] = {}
    seen: dict[Node, int] = {}
    fused: dict[Node, None] = {}
    todo = [(a, _most(n)) for a in program.args[n]]
    while todo:
        a, most = todo.pop()
        most = min(most, sum(map(_size, a.types)))
        if seen.get(a, -1) >= most:
            continue
        seen[a] = most
        if a in buffers:
            read[a] = most * a.type.dtype.bytes
        else:
            fused[a] = None
            todo += [(x, min(most, _most(a))) for x in program.args.get(a, ())]
    return list(fused), read


def _most(n: Node) -> int:
    """Returns the most elements of an argument that `n` reads: those of its result if each element
    comes from one of each argument."""
    return sum(map(_size, n.types)) if n.kind.elements else 1 << 62


def _by_columns(n: Node) -> int:
    """Returns the elements of a product's left operand if it is read along its columns, else 0. The
    left operand is the one with the rows of the result."""
    if "index" not in n.attrs or len(n.args) != 2:
        return 0
    types = [a.type for a in n.args]
    index = parse_index(n.attrs["index"], tuple(t.rank for t in types))
    shared = set(index.args[0]) & set(index.args[1])
    rows = [k for k in index.out if k not in shared]
    left = int(bool(rows) and rows[0] in index.args[1])
    return _size(types[left]) if index.args[left][-1:] and index.args[left][-1] in rows else 0


def is_slow(n: Node) -> bool:
    """Returns whether an element of the result takes several operations."""
    return n.kind.memory == "expensive" and n.kind.elements == "computed"


def _size(t: TensorType) -> int:
    return math.prod(t.local_shape)
