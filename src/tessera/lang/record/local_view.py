"""The `View` of a local body: its local axes, this device's rank, and the mesh that has the rank.

Along the view's axes every tensor is one device's block: a value that varies along them
(ops/local.py). Along the data axes of a strategy it is whole, until the body reads its rank there
(`NeedsLocal`). The body is recorded once, with a symbolic rank. Code that needs the rank as a
number raises `NeedsRank`, and the body is recorded once per rank (ranks.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...core.dtypes import int32
from ...core.errors import LayoutError, StrategyWarning, UsageError, lines_up
from ...core.layout import Dim, TensorType, plain, shard_count
from ...core.mesh import Mesh
from ...core.mesh import current as open_mesh
from ...ir.graph.node import Node, reachable
from ...ops.local import as_local, as_varying, joined, with_dim
from ...passes.differentiate import reached
from ..value.tensor import Tensor
from .double_sums import pending as pending_over
from .double_sums import summed_over
from .gradients import Goal
from .recorder import WHOLE, Frame, NeedsLocal, Recorder, current, symbolic


class NeedsRank(Exception):
    """The body needs its rank as a number. Caught where the body is recorded."""


class Rank(Tensor):
    """A symbolic rank: an i32 tensor, which becomes a number in operations that only numbers
    have."""

    def __xor__(self, other: Any) -> Any:
        return int(self) ^ other

    def __lshift__(self, other: Any) -> Any:
        return int(self) << other

    def __rshift__(self, other: Any) -> Any:
        return int(self) >> other

    def __and__(self, other: Any) -> Any:
        return int(self) & other

    def __or__(self, other: Any) -> Any:
        return int(self) | other

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __hash__(self) -> int:  # as the key of a dict it must be a number
        return hash(int(self))

    def __divmod__(self, other: int) -> tuple[int, int]:
        return divmod(int(self), other)


@dataclass(eq=False)
class View(Frame):
    """The frame of a distributed function's `body`: local along `axes` of `mesh`, global along
    others.

    `data` are its data axes, while they are global. Along `tensor` a device has blocks of weights.
    Blocks are joined along `dim` by default. `rank` is the place along `axes`, major first, if the
    body is recorded for one rank; the collectives of that rank are in `log`.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    data: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    dim: int = 0
    body: object = None
    rank: int | None = None
    log: Any = field(default=None, repr=False)
    outer: Frame = WHOLE  # the frame of the function that calls the body
    entered: list[TensorType] = field(default_factory=list, repr=False)  # the arguments' layouts
    told: set[Node] = field(default_factory=set, repr=False)  # nodes warned of
    told_of: set[tuple[str, ...]] = field(default_factory=set, repr=False)  # same, (name, *axes)
    # The strategy's layout of optimizer state; for each laid-out argument, its node before.
    rests: Callable[[TensorType], TensorType] | None = field(default=None, repr=False)
    came: dict[Node, Node] = field(default_factory=dict, repr=False)
    # Gradients that are sums over devices, as in twice.py: {gradient: {axis: losses differ}}.
    slopes: dict[Node, dict[str, bool]] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return shard_count(self.axes, self.mesh.sizes)

    @property
    def one_of_many(self) -> bool:  # type: ignore[override]  # a property here
        return self.rank is not None

    def type_of(self, t: Tensor, place: int | None = None) -> TensorType:
        return self.outer.type_of(t, place)

    def part(self, recorder: Recorder, node: Node) -> Node:
        """Returns this device's block of `node`, which is whole along the axes of the view."""
        left = tuple(p for p in node.types[0].partial if p[0] not in self.axes)
        if len(left) < len(node.types[0].partial):
            node = recorder.builder.redistribute(node, node.type.with_partial(left))
        split = node.types[0].split_axes
        axes = [a for a in self.axes if a in split] if split else ()
        if not axes:
            return node
        return recorder.builder("reinterpret", node, layout=as_local(node.type, axes))

    def joined(self, t: TensorType, axes: Sequence[str]) -> tuple[TensorType, TensorType | None]:
        """Returns (the default type of the whole tensor whose block of type `t` each device along
        `axes` has, an argument that makes the order of blocks ambiguous, or None). Blocks are in
        the order of the devices, or in the order of the arguments' blocks if these are alike and in
        another order."""
        d = self.dim % t.rank
        here = [x for x in self.entered if x.rank > d and {*axes} & _axes(x.dims[d])]
        odd = [x for x in here if not self._in_order(x, d)]
        like = {
            x.dims[d] for x in here
            if {*axes} == _axes(x.dims[d]) & {*self.axes} and as_local(x, axes).dims[d] == t.dims[d]
        }  # fmt: skip
        if odd and len(like) == 1:
            return with_dim(t, d, like.pop()), None
        return joined(t, axes, d), odd[0] if odd else None

    def _in_order(self, t: TensorType, d: int) -> bool:
        """Returns whether the devices' blocks of dim `d` are in the order of the devices."""
        own = [a for a in self.axes if a in _axes(t.dims[d])]
        return joined(as_local(t, own), own, d).dims[d] == t.dims[d]

    def checked_state(self, recorder: Recorder, name: str, node: Node) -> Node:
        t = node.type
        own = [a for a in t.varying if a in self.axes]
        if not own:
            return node
        raise UsageError(
            f"{name} is set in a local body to a value that differs between devices",
            value=t,
            fix=f"combine it first: dist.all_reduce(x, {own[0]!r})",
        )

    def laid(self, to: TensorType, of: TensorType) -> TensorType:
        """Returns the layout `to` of a block, which stays this device's own. Raises LayoutError if
        `to` names a local axis."""
        if here := [a for a in (*to.split_axes, *to.partial_axes) if a in self.axes]:
            raise LayoutError(
                f"redistribute: {here[0]!r} is local here, where a tensor is one device's block",
                tensor=of,
                layout=to,
                fix=f"name other axes; dist.scatter, all_gather and all_reduce move along"
                f" {here[0]!r}",
            )
        to = self.outer.laid(to, of)
        return to if to.varying else to.with_varying(of.varying)

    def gradients(
        self,
        recorder: Recorder,
        loss: Node,
        wrt: Sequence[Node],
        weights: Sequence[Tensor],
        goals: Sequence[Goal],
    ) -> list[Node]:
        """The gradients of `loss`, or of the sum of the devices' losses if they differ."""
        for weight, to in zip(weights, goals, strict=True):
            if to is not None and (local := [a for a in to.split_axes if a in self.axes]):
                raise LayoutError(
                    f"grad: {local[0]!r} is local here, where a gradient is like its weight's"
                    " block",
                    weight=weight.type,
                    layout=to,
                    fix="leave out layout=, and lay out what the body returns",
                )
        varying_axes = [a for a in loss.type.varying if a in self.axes]
        parts = [a for a in varying_axes if a in self.tensor]
        if parts and loss not in self.told:
            self.told.add(loss)
            warnings.warn(
                f"a loss differs along {', '.join(map(repr, parts))} ({loss.loc}), so each device"
                " differentiates its own\n  complete it first where it is a part of one loss:"
                f" dist.all_reduce(x, {parts[0]!r})",
                StrategyWarning,
                stacklevel=lines_up(),
            )
        if recorder.of_row and varying_axes:
            return self._of_row(recorder, loss, wrt, weights, varying_axes)
        gradients = self.outer.gradients(recorder, loss, wrt, weights, goals)
        for g in gradients:
            over = g.type.partial_axes or summed_over(g)
            self.slopes[g] = {a: a in varying_axes for a in over if a in self.axes}
        return gradients

    def _of_row(
        self,
        recorder: Recorder,
        loss: Node,
        wrt: Sequence[Node],
        weights: Sequence[Tensor],
        axes: Sequence[str],
    ) -> list[Node]:
        """The gradients of the loss of one row, which differs along `axes`: each device has those
        of its own rows, and no sum over devices."""
        found = self.outer.gradients(recorder, loss, wrt, weights, [None] * len(wrt))
        b, out = recorder.builder, []
        for g in found:
            own = [a for a in g.type.partial_axes if a in axes]
            g = as_varying(b, g, own) if own else g
            out.append(b.redistribute(g, g.type.complete(), "for the gradient"))
        return out

    def handed_in(self, recorder: Recorder, x: Tensor) -> Tensor:
        """Returns a device's operand of a collective: its block of `x`, or its term of a gradient
        whose sum over devices is pending."""
        own, made_in = x._node, x._trace  # its recorder may be an enclosing one
        if own is not None and (axes := pending_over(self.slopes, own)):
            assert isinstance(made_in, Recorder)
            x = symbolic(as_varying(made_in.builder, own, axes), made_in)
        return x if (block := recorder.node(x)) is x._node else symbolic(block, recorder)

    def ends(self, sources: Set[Node], wrt: Sequence[Node]) -> tuple[str, str] | None:
        calls = self.log.calls if self.rank is not None and self.log is not None else ()
        sources = set(sources)
        for c in reversed(calls):  # an operand may be the result of an earlier collective
            if c.result in sources:
                before = reached(c.operand)
                if not before.isdisjoint(wrt):
                    return (
                        f"no gradient goes back through {c.key[0]} in a body that reads its rank as"
                        " a Python number",
                        "leave the rank a tensor: w[rank], x * rank, and for an if"
                        " ts.where(rank == 0, x, y)",
                    )
                sources |= before
        return None

    def reads(self, node: Node) -> None:
        """Raises NeedsRank if `node`, whose value is read, depends on the rank alone."""
        if self.rank is None and all(n.op != "input" for n in reachable([node])):
            raise NeedsRank

    def symbol(self, recorder: Recorder) -> Tensor:
        """The rank as an i32 tensor that varies along the axes."""
        t = plain(int32, (), self.mesh).with_varying(self.axes)
        node = recorder.builder("axis_index", axes=self.axes, layout=t)
        found = Rank(None, t)
        found._node, found._trace = node, recorder
        return found


def view_of(recorder: Recorder | None) -> View | None:
    """The view of the local body that `recorder` records, or None."""
    frame = recorder.frame if recorder is not None else None
    return frame if isinstance(frame, View) and frame.axes else None


def view() -> View | None:
    """The view of the local body that is being recorded, or None."""
    return view_of(current())


class LocalMesh(Mesh):
    """The mesh of a local body, with this device's rank on it."""

    __slots__ = ("_view",)
    _view: View

    def __getitem__(self, axes: str | tuple[str, ...]) -> LocalMesh:
        """The mesh of these axes, with this device's place along them."""
        return _local(super().__getitem__(axes), self._view)

    @property
    def rank(self) -> Any:
        """This device's place along the mesh's axes, major first: an i32 tensor, or a number once
        it is used as one."""
        local_view = self._view
        if local_view.rank is not None:
            at = np.unravel_index(
                local_view.rank, [local_view.mesh.sizes[a] for a in local_view.axes]
            )
            place = dict(zip(local_view.axes, map(int, at), strict=True))
            return _place(place, self)
        recorder = current()
        frame = None if recorder is None else recorder.frame
        if (
            recorder is None
            or not isinstance(frame, View)
            or frame.entered is not local_view.entered
        ):
            raise UsageError(
                "mesh.rank: the mesh of a local body is used after the body ended",
                mesh=self.text(),
                fix="ask ts.mesh.current() inside the body",
            )
        along = [a for a in self.axes if local_view.mesh.sizes[a] > 1]
        if not along:
            return 0
        if any(a in local_view.data for a in along):
            raise NeedsLocal(local_view.body)
        return replace(local_view, axes=self.axes).symbol(recorder)


def current_mesh() -> Mesh:
    """The mesh of the innermost `with mesh:`; in the body of a distributed function, the mesh of
    its axes, with a `rank`.

    Raises MeshError if no mesh is open.
    """
    recorder = current()
    seen = recorder.frame if recorder is not None else None
    if not isinstance(seen, View):
        return open_mesh()
    return _local(
        seen.mesh[tuple(a for a in seen.mesh.axes if a in (*seen.axes, *seen.data))], seen
    )


def _local(part: Mesh, view: View) -> LocalMesh:
    mesh = LocalMesh(part.axes, devices=part.array())
    object.__setattr__(mesh, "_view", view)
    return mesh


def _place(at: dict[str, int], mesh: Mesh) -> int:
    """The place along the axes of `mesh`, major first, of the device at the coordinates `at`."""
    place = 0
    for axis in mesh.axes:
        place = place * mesh.sizes[axis] + at[axis]
    return place


def pending(recorder: Recorder, x: Tensor, axes: Sequence[str]) -> Tensor:
    """Returns each device's `x` along `axes` as a term of one pending sum."""
    t = x.type
    partial = (*t.partial, *((a, "sum") for a in axes))
    to = TensorType(t.dtype, t.dims, partial, t.mesh, (a for a in t.varying if a not in axes))
    return symbolic(recorder.builder("reinterpret", recorder.node(x), layout=to), recorder)


def _axes(dim: Dim) -> set[str]:
    return {a for f in dim for a in f.axes}
