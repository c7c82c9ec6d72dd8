"""Graph builder: adds nodes, infers their types, and inserts collectives for their layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from ...core.dtypes import DType
from ...core.errors import LayoutError, caller
from ...core.layout import Factor, TensorType, dim_axes, same_type
from ...core.mesh import Mesh, joined
from ...core.options import PLAIN, ProgramOptions
from ...core.reshard import completed, gathered, steps_between
from ...ops.cast import narrowed, rounded
from ...ops.movement import broadcast_to
from ...ops.op import Op, infer, op_named
from ...ops.redistribute import NAMES, gathers_for_use, step_attrs
from .node import NO_ATTRS, Graph, Node, copied, input_node
from .remat import is_form


class Builder:
    """Builds one graph: a call adds a node, `b("mul", x, y)`, and redistributes its arguments.

    `options` are those of the program that contains the graph. With `strict`, an inserted
    collective is an error. While `ordered` is set, sums over devices are added in the order of the
    options, at every level. Sums of gradients that `summed` redistributes are sent in
    `reduce_dtype` (None: in their own dtype).
    """

    def __init__(
        self,
        name: str = "graph",
        options: ProgramOptions = PLAIN,
        strict: bool = False,
        ordered: bool = False,
    ) -> None:
        self.name, self.options, self.strict, self.ordered = name, options, strict, ordered
        self.reduce_dtype: DType | None = None
        self.nodes: list[Node] = []
        self.inputs: list[Node] = []
        self.scope = ""
        self.loc: str | None = None  # set while nodes are derived from others (gradients)
        self.origin: Node | None = None  # the node that is being differentiated
        self.constants: Set[Node] = set()  # no gradient flows through these
        self.origins: dict[Node, Node] = {}  # gradient node → its forward node
        self.finals: dict[Node, Node] = {}  # nodes of the last `graph()` that had to be made anew
        self.gathers_again = options.schedule.reshard_after_forward is not False
        # For a pipeline: the mesh slices of its stages, the mesh they are slices of, and its axis.
        self.slices: tuple[Mesh, ...] = ()
        self.whole: Mesh | None = None
        self.stages_axis = ""
        self.is_body = False  # a loop or branch sums its gradient outside
        self.replaced: dict[Node, Node] = {}  # node → its replacement in the finished graph
        self.reports: list[object] = []  # reports of functions, for `dist.inspect`
        self._moved: dict[tuple[Node, TensorType, bool, bool, str], Node] = {}
        self._gathered: dict[Node, Node] = {}  # weights, for the forward and the backward pass

    @contextmanager
    def at(self, loc: str | None, scope: str) -> Iterator[None]:
        """Sets line and scope of the nodes that are added inside, for example those of the node
        that they decompose."""
        before = self.loc, self.scope
        self.loc, self.scope = loc, scope
        try:
            yield
        finally:
            self.loc, self.scope = before

    def input(self, type: TensorType, name: str = "") -> Node:
        node = input_node(type, name or f"x{len(self.inputs)}")
        self.nodes.append(node)
        self.inputs.append(node)
        return node

    def __call__(self, op: str, /, *args: Node, **attrs: Any) -> Node:
        """Adds a node for `op`, redistributing arguments to the layouts that its rule wants."""
        value = op_named(op)
        if any(a.types[0].mesh is not args[0].types[0].mesh for a in args):
            args = self.on_one_mesh(args)
        if self.options.mesh_invariant and any(a.types[0].rest_axes for a in args):
            args = self._awake(value, args)
        ins = args[0].types if op == "item" else tuple([a.types[0] for a in args])
        got = infer(value, ins, attrs)
        if op != "item" and got.wants != ins:
            args = tuple(
                a if same_type(w, t) else self._insert(a, w, op)
                for a, w, t in zip(args, got.wants, ins, strict=True)
            )
        loc = caller() if self.loc is None else self.loc
        return self._add(Node(op, args, got.outs, attrs or NO_ATTRS, loc, self.scope))

    def on_one_mesh(self, args: tuple[Node, ...]) -> tuple[Node, ...]:
        """`args` on one mesh. An argument that lacks the mesh's axis in time is whole along it; a
        value on a pipeline stage's slice becomes a value of the whole mesh."""
        mesh: Mesh | None = None
        for m in dict.fromkeys(a.types[0].mesh for a in args):
            if m is not None and m not in self.slices:
                mesh = m if mesh is None else joined(mesh, m)
                if mesh is None:
                    return args
        mesh = mesh or (self.whole if self.slices else None)
        if mesh is None or not (mesh.time or self.slices):
            return args
        return tuple([self.onto(a, mesh) for a in args])

    def onto(self, x: Node, mesh: Mesh) -> Node:
        """`x` on `mesh`. It is whole along the axes that its own mesh or `mesh` lacks, and for a
        stage of a pipeline also along the stages' axis."""
        if x.type.mesh is None or x.type.mesh == mesh or len(x.types) > 1:
            return x
        if mesh.time and self.stages_axis in x.type.split_axes:
            x = self.redistribute(x, gathered(x.type, (self.stages_axis,)), "for a stage")
        to = x.type.on(mesh)
        known = self._moved.get((x, to, False, False, ""))
        if known is None:
            known = self._moved[x, to, False, False, ""] = self("to_mesh", x, layout=to)
        return known

    def _awake(self, op: Op, args: tuple[Node, ...]) -> tuple[Node, ...]:
        """`args` gathered along the axes of their layout at rest, in a program whose bits must not
        depend on that layout. Elementwise ops and ops that read blocks in place take them as they
        are."""
        if op.name in NAMES or op.varying or op.bodies:  # it reads blocks, or is a change of layout
            return args
        apart = op.elements in ("computed", "same", "chosen")  # whichever block they are in
        if apart and _alike([a.type for a in args]):
            return args
        return tuple(
            self._insert(a, a.type.in_use, op.name) if a.types[0].rest_axes else a for a in args
        )

    def _wakes(self, x: Node, to: TensorType) -> bool:
        """Returns whether `_awake` would gather `x`, created in the layout at rest `to`."""
        return bool(to.rest_axes) and self.options.mesh_invariant and x.op == broadcast_to.name

    def _add(self, node: Node) -> Node:
        if self.origin is not None:
            if self.gathers_again:
                node = node.with_args(tuple(map(self._again, node.args)))
            self.origins[node] = self.origin
        self.nodes.append(node)
        return node

    def _again(self, n: Node) -> Node:
        """`n` as a gradient reads it: a matrix at rest that was gathered for the forward pass is
        gathered again, so that no device keeps it whole. Vectors, such as those of norms, are small
        and stay gathered."""
        if n in self.origins:
            return n
        if n not in self._gathered:
            new = n
            if gathers_for_use(n) and n.note and n.type.rank > 1:
                attrs, why = {**n.attrs, "again": True}, "again for the gradient"
                new = Node(n.op, n.args, n.types, attrs, n.loc, n.scope, why)
            elif is_form(n):
                new = n.with_args((self._again(n.args[0]),))
            if new is not n:
                assert self.origin is not None
                self.nodes.append(new)
                self.origins[new] = self.origin
            self._gathered[n] = new
        return self._gathered[n]

    def _insert(self, x: Node, want: TensorType, op: str) -> Node:
        if self.strict and any(s.wire_bytes for s in steps_between(x.type, want)):
            raise LayoutError(
                f"{op}: needs a collective that ts.strict() forbids to insert",
                have=x.type,
                need=want,
                made_at=x.loc,
                fix=f"write dist.redistribute(x, {str(want)!r}) where you want it",
            )
        return self.redistribute(x, want, f"for {op}")

    def summed(self, g: Node, to: TensorType, reason: str) -> Node:
        """The gradient `g` in the layout `to`. Its sums over devices are sent in `reduce_dtype`:
        each device's term is rounded to it."""
        time = g.type.mesh.time if g.type.mesh is not None else ()
        sent = self.reduce_dtype
        if sent is None or not g.type.partial:
            return self.redistribute(g, to, reason)
        if time:  # local sums of a device are not rounded
            g = self.redistribute(g, completed(g.type, time), reason)
        if sent is not g.type.dtype:
            g = self("cast", g, dtype=sent, terms=True)
        made = self.redistribute(g, to.with_dtype(sent), reason, as_is=True)
        return made if sent is to.dtype else self("cast", made, dtype=to.dtype)

    def redistribute(
        self, x: Node, to: TensorType, reason: str = "", *, as_is: bool = False,
        algorithm: str = "",
    ) -> Node:  # fmt: skip
        """`x` in the layout `to`. `reason` marks the steps as inserted, "" as written by the user.
        `as_is` sends the value in its own dtype, even if it was cast from a narrower one.
        `algorithm` is that of each all_to_all, unless the mesh is folded."""
        if x.type is to:
            return x
        if x.type.mesh != to.mesh and x.type.mesh is not None and to.mesh is not None:
            x = self._between(x, to, reason)
        o = self.options
        exact = self.ordered or o.mesh_invariant
        done = self._moved.get((x, to, exact, as_is, algorithm))
        if done is not None:
            return done
        made, start = x, x
        if x.type.varying != to.varying:
            made = self._spread(x, to, reason)
        elif not to.partial and not to.varying and _makeable(x) and not self._wakes(x, to):
            made = self._created_in(x, to, reason)
        elif not exact and not as_is and not to.varying and (narrow := self.narrow(x, to)):
            narrow = self.redistribute(narrow, to.with_dtype(narrow.type.dtype), reason)
            made = self("cast", narrow, dtype=x.type.dtype)
        else:
            if x.type.mesh is None and to.mesh is not None:
                made = x = self("to_mesh", x, layout=to.replicated())
            order = o.order if self.ordered and not o.mesh_invariant else ""
            for step in steps_between(x.type, to, exact, o.schedule.topology):
                loc = caller() if self.loc is None else self.loc
                attrs = step_attrs(step, made.type, order)
                mesh = step.type.mesh
                if algorithm and step.kind == "all_to_all" and mesh is not None and not mesh.onto:
                    attrs["algorithm"] = algorithm
                made = self._add(
                    Node(step.kind, (made,), (step.type,), attrs, loc, self.scope, reason)
                )
        if made.type is not to and same_type(made.type, to) and made.type.mesh == to.mesh:
            made = self("reinterpret", made, layout=to)  # it rests now, or it no longer does
        self._moved[start, to, exact, as_is, algorithm] = made
        return made

    def _between(self, x: Node, to: TensorType, reason: str) -> Node:
        """`x` on the mesh of `to`. The two meshes differ by an axis in time, or one is a stage's
        slice of the other."""
        assert x.type.mesh is not None and to.mesh is not None
        if to.mesh in self.slices and self.whole is not None:
            if x.type.mesh not in self.slices:
                x = self.redistribute(x, to.on(self.whole), reason)
            return self.onto(x, to.mesh)
        mesh = to.mesh if x.type.mesh in self.slices else joined(x.type.mesh, to.mesh)
        if mesh is not None and mesh == to.mesh:
            return self.onto(x, mesh)
        if mesh is not None and to.mesh == mesh.space:
            return self.onto(self.redistribute(x, to.on(mesh), reason), to.mesh)
        return x

    def narrow(self, x: Node, to: TensorType) -> Node | None:
        """A narrower value to send in place of `x`, in fewer bytes; None if there is none."""
        found: Node | None = narrowed(self, x)
        if found is None and not to.partial and not x.type.varying:
            found = rounded(self, x)
        return found

    def _spread(self, x: Node, to: TensorType, reason: str) -> Node:
        """`x` as a varying value, along all axes along which `to` varies."""
        if not set(x.type.varying) <= set(to.varying):
            raise LayoutError(
                "a value that differs between devices stands where one value is needed",
                value=x.type,
                needed=to,
                made_at=x.loc,
                fix="combine it first: dist.all_reduce(x, axis), dist.all_gather(x, axis)",
            )
        return self(
            "reinterpret", self.redistribute(x, to.with_varying(x.type.varying), reason), layout=to
        )

    def _created_in(self, x: Node, to: TensorType, reason: str) -> Node:
        """The makeable value `x`, created in the layout `to`: its smaller arguments are
        redistributed in its place."""
        if x.kind.creates:
            return self(x.op, *x.args, **{**x.attrs, "layout": to})
        parts = (self.redistribute(a, spread_to(to, a.type), reason) for a in x.args)
        if x.op == broadcast_to.name:
            return self(x.op, *parts, shape=to.shape, layout=to)
        return self(x.op, *parts, **x.attrs)

    def graph(self, outputs: Iterable[Node]) -> Graph:
        """The recorded graph, in program order, without the nodes in `replaced`."""
        self.finals = {}
        if not self.replaced:
            return self._graph(self.nodes, outputs)
        new: dict[Node, Node] = {}
        # A replacement is placed before its first reader.
        nodes = copied([n for n in self.nodes if n not in self.replaced], new, self.replaced)
        out = tuple(new[self.replaced.get(o, o)] for o in outputs)
        self.finals = new
        return self._graph(nodes, out)

    def _graph(self, nodes: Iterable[Node], outputs: Iterable[Node]) -> Graph:
        ends = tuple(self.inputs), tuple(outputs)
        return Graph(self.name, tuple(nodes), *ends, self.options)


def _alike(ins: Sequence[TensorType]) -> bool:
    """Returns whether the values at rest among `ins` rest in the same layout, and no other of `ins`
    is split or partial over their axes. Then an elementwise op can work block by block."""
    places = {(i - t.rank, t.dims[i]) for t in ins for i in range(t.rank) if _axes_at(t, i)}
    rest = {a for t in ins for a in t.rest_axes}
    taken = {
        a for t in ins for a in (*t.split_axes, *t.partial_axes, *t.varying) if a not in t.rest_axes
    }
    spots = [spot for spot, _ in places]
    return len(spots) == len(set(spots)) and not rest & taken


def _axes_at(t: TensorType, dim: int) -> set[str]:
    return set(t.rest_axes).intersection(dim_axes(t.dims[dim]))


def _makeable(x: Node, depth: int = 3) -> bool:
    """Returns whether `x` costs less to create again in another layout than to cut: it is created
    without arguments, broadcast from a smaller value, or elementwise on such values."""
    if x.kind.creates:
        return True
    if x.op == broadcast_to.name:
        return x.args[0].type.size < x.type.size
    return (
        depth > 0
        and x.kind.elements == "computed"
        and all(a.type.size < x.type.size or _makeable(a, depth - 1) for a in x.args)
    )


def spread_to(to: TensorType, t: TensorType) -> TensorType:
    """The layout of an argument of type `t` that is broadcast to `to`: that of `to` in the dims of
    equal size."""
    extra = to.rank - t.rank
    dims = (
        d if n == m else (Factor(n),) for d, n, m in zip(to.dims[extra:], t.shape, to.shape[extra:])
    )
    return TensorType(t.dtype, dims, (), to.mesh, (), to.rest_axes)
