"""Verifier of graphs: infers every type again and names the pass that broke one.

It runs after each pass, so a wrong rewrite is reported at the pass that made it.
"""

from __future__ import annotations

from typing import NoReturn

from ...core.errors import GraphError, TesseraError
from ...core.layout import TensorType, same_type
from ...core.mesh import Mesh, joined
from ...ops.op import OPS, Op, infer
from .node import Graph, Node, need_graph
from .text import node_text


def verify(graph: Graph, after: str = "") -> None:
    """Raises GraphError if `graph` breaks a rule of Graph IR; `after` names the pass to blame.

    - A node occurs once, after its arguments. The inputs are exactly the `input` nodes, and outputs
      are nodes of the graph.
    - Ops and attributes are known. Arguments have the layouts that the op's rule asks for, and
      results have the types that it derives.
    - All nodes are on one mesh.
    - The same holds for bodies of loops and branches, which have the graph's options.
    """
    _Verifier(need_graph("verify", graph), after, None).run()


_FAULT = "this is a fault of the pass, not of the program: report it with the text"


class _Verifier:
    def __init__(self, graph: Graph, after: str, mesh: Mesh | None) -> None:
        self.graph, self.after, self.mesh = graph, after, mesh

    def wrong(self, message: str, node: Node | None = None, fix: str = "") -> NoReturn:
        who = f"pass {self.after!r} broke the graph" if self.after else "the graph is not valid"
        rows: list[tuple[str, object]] = [("graph", self.graph.name)]
        if node is not None:
            rows.append(("node", node_text(self.graph, node)))
        raise GraphError(
            f"verify: {who}: {message}",
            rows=rows,
            fix=fix or (_FAULT if self.after else "correct the text, or what made the graph"),
            at=node.loc if node is not None else "",
        )

    def run(self) -> Mesh | None:
        """Checks each node in order, then inputs and outputs; returns the mesh that all of them are
        on."""
        seen: set[Node] = set()
        for n in self.graph.nodes:
            if n in seen:
                self.wrong("a node stands twice", n)
            for a in n.args:
                if a not in seen:
                    self.wrong("an argument is not defined before it is used", n)
            seen.add(n)
            self.one_mesh(n)
            if n.op == "input":
                self.input(n)
            else:
                self.node(n, self.registered_op(n))
        self.ends(seen)
        return self.mesh

    def ends(self, listed: set[Node]) -> None:
        """Checks that inputs and outputs are nodes of the graph, each input once, each output of
        one value."""
        inputs = set(self.graph.inputs)
        if len(inputs) < len(self.graph.inputs):
            self.wrong("an input is listed twice")
        for n in self.graph.inputs:
            if n not in listed or n.op != "input":
                self.wrong("an input of the graph is not one of its input nodes", n)
        for n in self.graph.nodes:
            if n.op == "input" and n not in inputs:
                self.wrong("an input node is not listed among the graph's inputs", n)
        for n in self.graph.outputs:
            if n not in listed:
                self.wrong("an output is not a node of the graph", n)
            if len(n.types) != 1:
                self.wrong("an output has several results; `item` picks one", n)

    def one_mesh(self, n: Node) -> None:
        inside = (v for v in n.attrs.values() if isinstance(v, TensorType))
        for t in (*n.types, *inside):
            if t.mesh is None or t.mesh is self.mesh:
                continue
            if self.mesh is not None and joined(t.mesh, self.mesh) is None:
                self.wrong(f"mesh {t.mesh.text()} in a graph on mesh {self.mesh.text()}", n)
            self.mesh = t.mesh.space if t.mesh.time else t.mesh

    def input(self, n: Node) -> None:
        if n.args or len(n.types) != 1:
            self.wrong("an input takes no arguments and has one type", n)
        if tuple(n.attrs) != ("name",):
            self.wrong(f"op 'input' has the attribute name, not {', '.join(n.attrs) or 'none'}", n)

    def registered_op(self, n: Node) -> Op:
        op = OPS.get(n.op)
        if op is None:
            self.wrong(f"op {n.op!r} does not exist", n, "see tessera.ops for the set")
        names = op.attrs.split()
        unknown = [k for k in n.attrs if k not in names and f"{k}?" not in names]
        missing = [k for k in names if not k.endswith("?") and k not in n.attrs]
        if unknown:
            self.wrong(f"op {n.op!r} has no attribute {unknown[0]!r}", n)
        if missing:
            self.wrong(f"op {n.op!r} lacks its attribute {missing[0]!r}", n)
        return op

    def node(self, n: Node, op: Op) -> None:
        """Checks the types of the node and its arguments against the op's rule."""
        if n.op == "item":
            self.item(n)
            return
        for a in n.args:
            if len(a.types) != 1:
                self.wrong("an argument has several results; `item` picks one", n)
        for v in n.attrs.values():
            if isinstance(v, Graph):
                if v.options != self.graph.options:
                    self.wrong(f"its body was recorded under other options: {v.options}", n)
                self.mesh = _Verifier(v, self.after, self.mesh).run()
        ins = tuple([a.types[0] for a in n.args])
        try:
            got = infer(op, ins, n.attrs)
        except TesseraError as error:
            self.wrong(f"its rule does not hold: {str(error).splitlines()[0]}", n)
        except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            self.wrong(f"its rule cannot read it: {type(error).__name__}: {error}", n)
        if len(got.outs) != len(n.types):
            self.wrong(f"it has {len(n.types)} results where its rule gives {len(got.outs)}", n)
        for i, (t, want) in enumerate(zip(ins, got.wants, strict=True)):
            if not same_type(t, want):
                self.wrong(f"argument {i} is {t} where its rule wants {want}", n)
        for t, out in zip(n.types, got.outs):
            if not same_type(t, out):
                self.wrong(f"its type is {t} where its rule gives {out}", n)

    def item(self, n: Node) -> None:
        index = n.attrs["index"]
        if len(n.args) != 1 or not isinstance(index, int):
            self.wrong("`item` takes one node and the number of a result", n)
        types = n.args[0].types
        if not 0 <= index < len(types):
            self.wrong(f"there is no result {index} among {len(types)}", n)
        if n.types != (types[index],):
            self.wrong(f"its type is {n.types[0]} where result {index} is {types[index]}", n)
