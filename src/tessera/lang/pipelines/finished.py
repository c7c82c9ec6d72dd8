"""What does the finished recording of one microbatch say?

What is repeated for each microbatch, what is added up over them, and what comes after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...core.errors import GraphError, fail
from ...ir.graph.again import free_nodes
from ...ir.graph.node import Graph, Node, reachable
from ...ir.schedule.pipelines.pipeline import Recorded
from ...ir.schedule.pipelines.stages import depends, stage_numbers
from ..record import Recorder
from .microbatch import PipeState, state_of
from .verdicts import inseparable


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a pipelined function, recorded to its end.

    `origins` maps nodes of the gradient to those that they are of, `sums` inputs of what comes
    after all microbatches to the values that are added up for them; `final` gives for each node as
    it was recorded the one in `graph`.
    """

    recorder: Recorder
    state: PipeState
    graph: Graph
    final: Callable[[Node], Node]
    origins: Mapping[Node, Node]
    sums: Mapping[Node, Node]

    @staticmethod
    def of(recorder: Recorder, outputs: Sequence[Node]) -> Microbatch:
        """What `recorder` has recorded, with these results. Raises GraphError if what comes
        after the gradients needs single microbatches."""
        state, b = state_of(recorder), recorder.builder
        assert state is not None
        graph, new, replaced = b.graph(outputs), b.finals, b.replaced

        def final(n: Node) -> Node:
            n = replaced.get(n, n)
            return new.get(n, n)

        origins = {new.get(n, n): final(o) for n, o in b.origins.items()}
        sums = {k: final(n) for k, n in state.sums.items()}
        made = Microbatch(recorder, state, graph, final, origins, sums)
        made._check_after()
        return made

    @cached_property
    def repeated(self) -> set[Node]:
        """What depends on the microbatch, of the gradients also what comes after them."""
        key = [self.recorder.key] if self.recorder.key is not None else []
        return depends(self.graph.nodes, [*self.state.batch, *key])

    @cached_property
    def after(self) -> set[Node]:
        """What is computed once, after all microbatches."""
        return depends(self.graph.nodes, self.sums)

    @cached_property
    def free(self) -> frozenset[Node]:
        """What each stage makes for itself."""
        return free_nodes(self.graph.nodes)

    def _check_after(self) -> None:
        for n in self.graph.nodes:
            if n in self.after and any(a in self.repeated and a not in self.after for a in n.args):
                raise fail(
                    GraphError,
                    f"{self.state.pipe.name}: what comes after the gradients needs a value of"
                    " single microbatches",
                    [("value", n.type)],
                    at=n.loc,
                    fix="use gradients, weights and state there; return losses as they are",
                )

    @cached_property
    def results(self) -> tuple[frozenset[Node], frozenset[Node]]:
        """(the results that are averaged over the microbatches, those whose rows are put
        together). What modules set, such as running statistics, is averaged. Raises GraphError for
        a result of another kind. Those that the host sees of each microbatch are put together."""
        rows_each = next(iter(self.state.batch)).type.shape[0]
        means, rows = set[Node](), set[Node]()
        state, each = ({self.final(n) for n in s} for s in (self.state.kept_after, self.state.each))
        for o in self.graph.outputs:
            if o not in self.repeated or o in self.after or o.op == "input":
                continue
            if o in each:
                rows.add(o)
            elif o.type.dtype.is_float and (o in state or not o.type.rank):
                means.add(o)
            elif o.type.rank and o.type.shape[0] == rows_each:
                rows.add(o)
            else:
                raise inseparable(self.state.pipe.name, o)
        return frozenset(means), frozenset(rows)

    @cached_property
    def forward(self) -> set[Node]:
        """The nodes of the forward pass: the results need them, or gradients were derived from
        them, as the loss itself may not be a result."""
        means, rows = self.results
        others = set(self.graph.nodes) - depends(self.graph.nodes, self.origins)
        return reachable((*means, *rows)) | others

    def parts(self) -> list[list[Node]]:
        """The nodes of the forward pass of each part that the pipeline was written with."""
        pipe, nodes = self.state.pipe, self.recorder.builder.nodes
        if pipe.body is not None:  # its parts are known by the names of their scopes
            scopes = [getattr(p, "name", "") for p in pipe.parts]
            every = [[n for n in self.graph.nodes if s in n.scope.split("/")] for s in scopes]
        else:
            every = [
                _with_loops(self.final(n) for n in nodes[first:stop])
                for first, stop in self.state.spans
            ]
        here = {n for n in self.forward if n.op != "input"} - self.free
        return [[n for n in part if n in here] for part in every]

    def shares(self, parts: Sequence[Sequence[Node]]) -> list[list[Node]]:
        """What each of `parts` computes for a microbatch: with gradients, and with the loss."""
        marked = {n: i for i, part in enumerate(parts) for n in part}
        numbers = stage_numbers(self.graph.nodes, marked, self.origins, len(parts) - 1, self.free)
        used = reachable(n for n in self.repeated - self.after)
        out: list[list[Node]] = [[] for _ in parts]
        for n, i in numbers.items():
            if n in used:
                out[i].append(n)
        return out

    def recorded(self, stages: Sequence[Sequence[Node]]) -> Recorded:
        """All that a schedule is made of, with the nodes of each of the `stages`."""
        state, final = self.state, self.final
        means, rows = self.results
        resting = state.resting | {
            n for t, n in self.recorder.captured if t.mesh in (state.mesh, state.given)
        }
        return Recorded(
            self.graph,
            state.batch,
            self.sums,
            means,
            rows,
            {n: s for s, nodes in enumerate(stages) for n in nodes},
            self.origins,
            {k: final(n) for k, n in state.ahead.items()},
            {final(g): w for g, w in state.gradient_of.items() if w in resting},
            self.recorder.key,
        )


def _with_loops(nodes: Iterable[Node]) -> list[Node]:
    """`nodes`, each once, and before each that is a result of several what gives them: a loop that
    gives its own gradient too was made late, in place of another."""
    found: dict[Node, None] = {}
    for n in nodes:
        if n.op == "item":
            found.setdefault(n.args[0])
        found.setdefault(n)
    return list(found)
