"""What is an op? One value: its index string or rule, its local computation, its gradient.

From the index string follow shape, layout, the layout of what must be exchanged, and the FLOPs.
Adding an op means adding one `define(...)` in this folder and one row to the table in
`tests/core/table.py`.
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
    """What a gradient rule sees of a node."""

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
    """Where a gradient rule puts its nodes: `b("mul", g, y)`."""

    options: ProgramOptions
    reduce_dtype: DType | None

    def __call__(self, op: str, /, *args: Any, **attrs: Any) -> Any: ...
    def redistribute(self, x: Any, to: TensorType, reason: str = "") -> Any: ...
    def summed(self, g: Any, to: TensorType, reason: str) -> Any: ...


class Site(Protocol):
    """Where a local implementation runs: the whole array, or one device's block of it."""

    def shape(self, t: TensorType) -> tuple[int, ...]:
        """The shape of `t` here: global for the oracle, a block's on a device."""

    def index(self, t: TensorType, dim: int) -> Array:
        """The global index (int32) of each local element along `dim`."""

    def rank(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Array:
        """The place of this block along `axes` of these sizes, major first (int32)."""

    def start(self, t: TensorType, dim: int, digit: int) -> Array:
        """The first index that this block holds of one split digit of `dim`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a node on one device: everything its local computation may look at."""

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
    """What a rule derives: the layout each argument must have, and the results' types.

    `whole` are the dims of the arguments that the op reduces (argument, dim, kind): where such a
    dim is padded, lowering fills the padding with the identity of `kind`.
    """

    wants: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    reduces: tuple[tuple[int, int, str], ...] = ()


Rule = Callable[[tuple[TensorType, ...], Attrs], Inferred]
Local = Callable[..., Any]
Grad = Callable[[Build, Any, Any], Sequence[Any]]


# What each element of the result is. "computed": computed from the elements at the same place.
# "same": the first argument's element there. "moved": one of the argument's, and all of those are
# in the result. "chosen": one of the argument's. "": none of these.
Elements = Literal["computed", "same", "moved", "chosen", ""]
# Where the result lies when XLA has compiled it for a CPU. "view": in the argument's memory.
# "created" (of nothing), "transposed", "moves", "cheap" (arithmetic): nowhere, as it is computed
# where it is read. "expensive": the same if it is read once. In a buffer of its own lies what is
# "reduced" (a short dim, from elements that are computed there), a "product", a "conv", any other:
# "buffer".
Memory = Literal[
    "view", "created", "transposed", "moves", "cheap", "expensive", "reduced", "product", "conv",
    "buffer",
]  # fmt: skip
# A device's bytes that it needs while it runs, besides its arguments and results.
Scratch = Callable[[tuple[TensorType, ...], tuple[TensorType, ...], Attrs], int]
# Why its bits are the same on every fold of a mesh. "each": each element by itself. "moves": it
# moves or chooses, and adds nothing up. "sums": in an order of its own (runtime/fixed_order.py).
# "added": in the order of what is added. "library": a call into a library, on the block of one
# place. "body": as its body does. "": it does not, and is refused.
Invariance = Literal["each", "moves", "sums", "added", "library", "body", ""]
# How it is linear in its arguments. "each": in each. "joint": in all of them together. "product",
# "quotient": of its arguments. "alone": in each of its floats while the others stay. "": not.
Linear = Literal["each", "joint", "product", "quotient", "alone", ""]


@dataclass(frozen=True, slots=True)
class Batched:
    """An op on arguments that have one dim more in front, all or some of them: with `attrs`, once
    those that have it are given dims of one element behind it up to `rank` dims besides (None: as
    they are). `out` is the place of that dim in the result."""

    attrs: Attrs
    rank: int | None = None
    out: int = 0


# From the attributes, which arguments have the dim, their types without it, and its size. None: not
# so, as where an argument lacks the dim that all need.
Batch = Callable[[Attrs, tuple[bool, ...], tuple[TensorType, ...], int], Batched | None]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An op. `grad(b, node, g)` gives one gradient (or None) per argument; None: no gradient.

    `attrs` names the attributes of its nodes; one with `?` may be left out. What the rest of the
    house asks about an op stands here, each fact with a default that claims nothing.
    """

    name: str
    rule: Rule
    local: Local
    grad: Grad | None = None
    flops: Callable[[tuple[TensorType, ...], tuple[TensorType, ...], Attrs], int] = field(
        default=lambda ins, outs, attrs: sum(t.size for t in outs)
    )
    creates: bool = False  # its value does not depend on arguments' layouts: made where wanted
    own: bool = False  # its rule says itself along which axes each device has its own result
    pure: bool = True
    attrs: str = ""
    bodies: bool = False  # attributes of its are graphs
    many: bool = False  # its local computation gives a tuple, even of one
    elements: Elements = ""
    memory: Memory = "buffer"
    scratch: Scratch = field(default=lambda ins, outs, attrs: 0)
    invariance: Invariance = ""  # where `elements` does not say it
    linear: Linear = ""  # where `elements` does not say it
    incidental: bool = False  # a layout or a dtype may bring it in where nothing else is computed
    batch: Batch | None = None  # as `ts.vmap` applies it; what acts on each element needs none

    def batched(
        self, attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
    ) -> Batched | None:
        """It on arguments of types `ins` of which some have one dim more in front, of `size`; None
        where it has no such form."""
        if self.batch is not None:
            return self.batch(attrs, which, ins, size)
        if self.elements in ("computed", "same"):
            return Batched(attrs, max(t.rank for t in ins))
        return None

    def compute(self, c: Call, *values: Array) -> Any:
        """Its local computation; results without elements are made without it, as most functions
        of arrays have something to ask of their arguments."""
        if not self.pure or any(t.size for t in c.outs):
            return self.local(c, *values)
        made = tuple([c.xp.full(c.site.shape(t), 0, t.dtype) for t in c.outs])
        return made if len(made) > 1 or self.many else made[0]

    @property
    def mesh_invariance(self) -> Invariance:
        """Why its bits are the same on every fold of a mesh; "" where they may not be."""
        if self.invariance:
            return self.invariance
        if self.elements in ("moved", "chosen"):
            return "moves"
        return "each" if self.elements or self.creates else ""

    @property
    def degree(self) -> Linear:
        """`linear`, which elements that only change their places are."""
        return "each" if self.elements in ("moved", "chosen") else self.linear

    @property
    def hands_on(self) -> bool:
        """Whether its result may be its argument, in the argument's memory."""
        return self.memory in ("view", "transposed", "moves") or self.elements in (
            "moved",
            "chosen",
        )

    @property
    def fuses(self) -> bool:
        """Whether the compiler may compute its result where it is read, without a buffer."""
        return self.memory in ("created", "transposed", "moves", "cheap", "expensive")


OPS: dict[str, Op] = {}
BODIES: set[str] = set()  # the names of those whose attributes are graphs: passes ask of each node
# What an input of a graph is: no op, and nothing is claimed of it.
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
    """What the rule of `op` derives. Rules are pure and programs repeat themselves, so answers are
    kept; not for bodies, which would be kept alive with them."""
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
    """The rule's answer. What each device has of its own is computed by each from its own, so a
    rule sees blocks as if they were alone, and the result is each device's own too."""
    varying = set[str]().union(*(t.varying for t in ins))
    if op.own or not varying:
        return op.rule(ins, attrs)
    alone = {k: v.with_varying(()) if isinstance(v, TensorType) else v for k, v in attrs.items()}
    got = op.rule(tuple(t.with_varying(()) for t in ins), alone)
    made = [v.varying for v in attrs.values() if isinstance(v, TensorType)]
    varying = varying.union(*made)
    wants = tuple(w.with_varying(t.varying) for w, t in zip(got.wants, ins, strict=True))
    return Inferred(wants, tuple(t.with_varying(varying) for t in got.outs), got.reduces)
