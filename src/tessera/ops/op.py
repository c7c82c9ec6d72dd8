"""`Op`, the definition of an op: index string or rule, local computation, gradient.

Shape, layout, collectives and FLOPs follow from the index string. A new op is one `define(...)` in
this folder and one row of the table in `tests/core/table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

from ..core.dtypes import DType
from ..core.errors import GraphError
from ..core.layout import TensorType
from ..core.options import ProgramOptions

Array = Any  # whatever the adapter computes with
Attrs = Mapping[str, Any]


class Value(Protocol):
    """The interface of a node for gradient rules."""

    @property
    def op(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def type(self) -> TensorType: ...
    @property
    def types(self) -> tuple[TensorType, ...]: ...
    @property
    def attrs(self) -> Attrs: ...


class Build(Protocol):
    """The interface of a graph builder for gradient rules: `b("mul", g, y)` adds a node."""

    options: ProgramOptions
    reduce_dtype: DType | None

    def __call__(self, op: str, /, *args: Any, **attrs: Any) -> Any: ...
    def redistribute(
        self, x: Any, to: TensorType, reason: str = "", *, algorithm: str = ""
    ) -> Any: ...
    def summed(self, g: Any, to: TensorType, reason: str) -> Any: ...


class Site(Protocol):
    """The place where a local implementation runs: the whole array, or one device's block of it."""

    def shape(self, t: TensorType) -> tuple[int, ...]:
        """The shape of `t` here: global in the oracle, a block's on a device."""

    def index(self, t: TensorType, dim: int) -> Array:
        """The global index (int32) of each local element along `dim`."""

    def rank(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Array:
        """The rank of this block along `axes` of these sizes, major first (int32)."""

    def start(self, t: TensorType, dim: int, digit: int) -> Array:
        """The first index of this block in one split digit of `dim`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a node on one device: all that its local computation may read."""

    xp: Any
    site: Site
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    attrs: Attrs
    run: Callable[[Any, Sequence[Array]], list[Array]]

    @property
    def out(self) -> TensorType:
        return self.outs[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.site.shape(self.outs[0])


@dataclass(frozen=True, slots=True)
class Inferred:
    """The result of a rule: the layout each argument must have, and the results' types.

    `reduces` are the dims of the arguments that the op reduces, as (argument, dim, kind): if such a
    dim is padded, lowering fills the padding with the identity of `kind`.
    """

    wants: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    reduces: tuple[tuple[int, int, str], ...] = ()


Rule = Callable[[tuple[TensorType, ...], Attrs], Inferred]
Local = Callable[..., Any]
Grad = Callable[[Build, Any, Any], Sequence[Any]]


# The source of each element of the result. "computed": the elements at the same place. "same": the
# first argument's element at that place. "moved": one element of the argument, and the result has
# all of them. "chosen": one element of the argument. "": none of these.
Elements = Literal["computed", "same", "moved", "chosen", ""]
# The memory of the result in a program that XLA compiled for a CPU. "view": the argument's memory.
# "created" (no arguments), "transposed", "moves", "cheap" (arithmetic): none, as XLA fuses it into
# each reader. "expensive": the same if it has one reader. A buffer of its own: "reduced" (a short
# dim, whose elements are computed in the reduction), "product", "conv", and any other, "buffer".
Memory = Literal[
    "view", "created", "transposed", "moves", "cheap", "expensive", "reduced", "product", "conv",
    "buffer",
]  # fmt: skip
# Bytes per device of temporaries while the op runs, besides arguments and results.
Scratch = Callable[[tuple[TensorType, ...], tuple[TensorType, ...], Attrs], int]
# The reason why its bits are the same on every fold of a mesh. "each": it is elementwise. "moves":
# it moves or selects, and adds nothing. "sums": additions in a fixed order
# (runtime/fixed_order.py). "added": additions in the order of the updates. "library": a library
# call on one place's block. "body": that of its body. "": none, so the op is refused.
Invariance = Literal["each", "moves", "sums", "added", "library", "body", ""]
# Linearity in the arguments. "each": in each. "joint": in all together. "product", "quotient": of
# its arguments. "alone": in each float argument while the others are fixed. "": not linear.
Linear = Literal["each", "joint", "product", "quotient", "alone", ""]


@dataclass(frozen=True, slots=True)
class Batched:
    """The batched form of an op, whose arguments have one more leading dim, all or some of them:
    the op with the attributes `attrs`. Batched arguments are first padded to `rank` dims besides
    the new one, by dims of size 1 behind it (None: as they are). `out` is the position of the new
    dim in the result."""

    attrs: Attrs
    rank: int | None = None
    out: int = 0


# Called with the attributes, a flag per argument for the new dim, the types without it, and its
# size. None: there is no batched form for these arguments.
Batch = Callable[[Attrs, tuple[bool, ...], tuple[TensorType, ...], int], Batched | None]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An op. `grad(b, node, g)` gives one gradient (or None) per argument; None: no gradient.

    `attrs` names the attributes of its nodes; one with `?` is optional. The other fields are facts
    that passes, runtime and cost model read; the default of each claims nothing.
    """

    name: str
    rule: Rule
    local: Local
    grad: Grad | None = None
    flops: Callable[[tuple[TensorType, ...], tuple[TensorType, ...], Attrs], int] = field(
        default=lambda ins, outs, attrs: sum(t.size for t in outs)
    )
    creates: bool = False  # its value is independent of layouts, so it is made in the wanted one
    varying: bool = False  # its rule handles varying axes itself
    pure: bool = True
    attrs: str = ""
    bodies: bool = False  # it has graphs as attributes
    many: bool = False  # its local computation gives a tuple, even of one
    elements: Elements = ""
    memory: Memory = "buffer"
    scratch: Scratch = field(default=lambda ins, outs, attrs: 0)
    invariance: Invariance = ""  # if it does not follow from `elements`
    linear: Linear = ""  # if it does not follow from `elements`
    incidental: bool = False  # layouts and dtypes may add it without other computation
    batch: Batch | None = None  # for `ts.vmap`; elementwise ops need none

    def batched(
        self, attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
    ) -> Batched | None:
        """The batched form for arguments of types `ins`, some of which have one more leading dim of
        `size`; None if there is none."""
        if self.batch is not None:
            return self.batch(attrs, which, ins, size)
        if self.elements in ("computed", "same"):
            return Batched(attrs, max(t.rank for t in ins))
        return None

    def compute(self, c: Call, *values: Array) -> Any:
        """Runs the local computation. Results without elements are created directly, because most
        array functions reject empty arguments."""
        if not self.pure or any(t.size for t in c.outs):
            return self.local(c, *values)
        made = tuple([c.xp.full(c.site.shape(t), 0, t.dtype) for t in c.outs])
        return made if len(made) > 1 or self.many else made[0]

    @property
    def mesh_invariance(self) -> Invariance:
        """The reason why its bits are the same on every fold of a mesh; "" if they may differ."""
        if self.invariance:
            return self.invariance
        if self.elements in ("moved", "chosen"):
            return "moves"
        return "each" if self.elements or self.creates else ""

    @property
    def degree(self) -> Linear:
        """`linear`, or "each" for an op that only moves elements."""
        return "each" if self.elements in ("moved", "chosen") else self.linear

    @property
    def hands_on(self) -> bool:
        """Returns whether its result may share its argument's memory."""
        return self.memory in ("view", "transposed", "moves") or self.elements in (
            "moved",
            "chosen",
        )

    @property
    def fuses(self) -> bool:
        """Returns whether the compiler may fuse the op into its readers, without a buffer."""
        return self.memory in ("created", "transposed", "moves", "cheap", "expensive")


OPS: dict[str, Op] = {}
BODIES: set[str] = set()  # ops with graphs as attributes; a set, as passes ask for each node
# The kind of a graph's input, which is no op: every fact has its default.
INPUT = Op("input", lambda ins, attrs: Inferred((), ()), lambda c: None)


def define(op: Op) -> Op:
    """Adds `op` to the closed set."""
    assert op.name not in OPS, op.name
    OPS[op.name] = op
    if op.bodies:
        BODIES.add(op.name)
    return op


def op_named(name: str) -> Op:
    """The op called `name`. Raises GraphError if there is none."""
    found = OPS.get(name)
    if found is None:
        raise GraphError(f"op {name!r} does not exist", fix="see tessera.ops for the set")
    return found


def infer(op: Op, ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The result of the rule of `op`. It is cached, because rules are pure and programs repeat
    themselves. It is not cached for ops with bodies, which a cache would keep alive."""
    if op.bodies:
        return _derived(op, ins, attrs)
    given = tuple(attrs.items())
    try:
        hash(given)
    except TypeError:  # an attribute that cannot be hashed
        return _derived(op, ins, attrs)
    return _infer(op, ins, given)


@lru_cache(maxsize=16384)
def _infer(op: Op, ins: tuple[TensorType, ...], attrs: tuple[tuple[str, Any], ...]) -> Inferred:
    return _derived(op, ins, dict(attrs))


def _derived(op: Op, ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The result of the rule, computed without varying axes. Each device computes its own result
    from its own blocks, so the result varies over the axes of the arguments."""
    varying = set[str]().union(*(t.varying for t in ins))
    if op.varying or not varying:
        return op.rule(ins, attrs)
    alone = {k: v.with_varying(()) if isinstance(v, TensorType) else v for k, v in attrs.items()}
    got = op.rule(tuple(t.with_varying(()) for t in ins), alone)
    made = [v.varying for v in attrs.values() if isinstance(v, TensorType)]
    varying = varying.union(*made)
    wants = tuple(w.with_varying(t.varying) for w, t in zip(got.wants, ins, strict=True))
    return Inferred(wants, tuple(t.with_varying(varying) for t in got.outs), got.reduces)
