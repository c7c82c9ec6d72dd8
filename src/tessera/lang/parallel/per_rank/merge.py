"""Merge of the recordings of a body, one per rank, into one program.

Equal parts merge: nodes that all ranks compute appear once. Operands of collectives and results are
chosen by rank (`cond`); each branch has only the nodes that its ranks compute alone. The k-th
collective of one rank is the k-th of every other (lang/parallel/per_rank/agreement.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ....core.errors import TesseraError, UsageError
from ....core.layout import TensorType
from ....core.reshard import gathered
from ....ir.graph.node import Node
from ....ops.op import OPS
from ...math import functions
from ...record.local_view import view_of
from ...record.recorder import Recorder, recording, symbolic
from ...record.tree import Path, flatten, path_name, spec_paths, unflatten
from ...value.host_outputs import on_rank
from ...value.tensor import Tensor
from ..local.ranks import Log, Promised, Waits
from .agreement import (
    check_collectives,
    check_messages,
    check_order,
    check_structure,
    deadlock,
    differ,
    progress,
    raised_error,
)
from .graphs import Part, attrs_key, choose, each_element


def record_ranks(around: Recorder, body: Callable[[], Any], before: Mapping[Path, Tensor]) -> Any:
    """Records `body` once for each rank of the view of `around`, merges the recordings into
    `around`, and returns the merged result.

    A rank that returns at a path the tensor that was there `before` has not written it: the value
    that one rank put there holds for all. Raises UsageError if the ranks do not agree.
    """
    view = view_of(around)
    assert view is not None
    logs: list[Log] = []
    logs.extend(Log(rank, logs) for rank in range(view.size))
    todo, streams = list(range(view.size)), around.streams
    while todo:
        waits: dict[int, Waits] = {}
        raised: dict[int, Exception] = {}
        for rank in todo:
            log = logs[rank] = Log(rank, logs)
            log.recorder = Recorder(around.builder.name, around)
            log.recorder.frame = replace(view, rank=rank, log=log)
            log.recorder.streams = streams
            with recording(log.recorder):
                try:
                    out = body()
                except Waits as wait:
                    waits[rank] = wait
                    continue
                except TesseraError:
                    raise
                except Exception as error:  # the user's own: raised if all ranks raise
                    raised[rank] = error
                    continue
            log.leaves, log.spec = flatten(out)
            for x in (*log.leaves, *log.recorder.host_tensors):  # captures returned outer tensors
                if isinstance(x, Tensor) and not isinstance(x, Promised):
                    log.recorder.node(x)
            log.paths, log.done = spec_paths(log.spec), True
        if len(raised) == view.size:
            raise raised[0]
        if raised:
            raise raised_error(logs, waits, raised) from next(iter(raised.values()))
        if len(waits) == len(todo) and not progress(logs, waits):
            raise deadlock(waits)
        todo = list(waits)
    around.streams = max(log.recorder.streams for log in logs if log.recorder is not None)
    return _Merge(around, logs, before).result()


class _Merge:
    def __init__(self, around: Recorder, logs: list[Log], before: Mapping[Path, Tensor]) -> None:
        view = view_of(around)
        assert view is not None
        self.before = before
        self.around, self.logs, self.view = around, logs, view
        self.parts: dict[Any, Part] = {}
        self.of: list[dict[Node, Part]] = []  # per rank
        self.outside: dict[int, Tensor] = {}
        self.making: list[object] = []  # keys in progress, to detect a cycle
        self.merged_nodes: dict[object, Node] = {}
        self.alike: dict[Part, Node] = {}
        self._symbol: Node | None = None

    def result(self) -> Any:
        check_order(self.logs)
        for log in self.logs:
            self.of.append(self._numbered(log))
        check_collectives(self.logs, [(p.node, p.ranks) for p in self.parts.values()])
        check_messages(self.logs)
        first = self.logs[0]
        check_structure(self.logs)
        for k in range(len(first.calls)):
            self._call(k)  # also collectives whose results are not used
        out = unflatten(first.spec, [self._leaf(i) for i in range(len(first.leaves))])
        for log in self.logs:
            self._host_outputs(log)
        return out

    def _host_outputs(self, log: Log) -> None:
        """Adds the host outputs of one rank to the merged recording."""
        assert log.recorder is not None
        for output in log.recorder.host_outputs:
            nodes = [self._chosen({log.rank: self._part(log, t)}) for t in output.tensors]
            values = [symbolic(n, self.around) for n in nodes]
            self.around.host_outputs.append(
                on_rank(output, log.rank, self.view.axes, self.view.mesh.sizes, values)
            )

    # -- equal parts ------------------------------------------------------------------------------
    def _numbered(self, log: Log) -> dict[Node, Part]:
        """Returns the part for each node of the rank's recording; ranks with an equal node share
        the part."""
        recorder = log.recorder
        assert recorder is not None
        outside = {node: t for t, node in recorder.captured}
        given: dict[Node, Any] = {}
        for k, call in enumerate(log.calls):
            if call.result is not None:
                given[call.result] = ("call", k)
        for (source, name), items in log.taken.items():
            for i, item in enumerate(items):
                given[item.result] = ("recv", source, log.rank, name, i)  # type: ignore[index]
        for (owner, name), node in log.asked.items():
            given[node] = ("from", owner, name)
        found: dict[Node, Part] = {}
        for n in recorder.builder.nodes:
            n_args = tuple(found[recorder.builder.replaced.get(a, a)] for a in n.args)
            leaf = None
            if n.op == "input":
                leaf = ("captured", id(outside[n])) if n in outside else given[n]
                if n in outside:
                    self.outside[id(outside[n])] = outside[n]
                key: Any = leaf
            else:
                key = (n.op, tuple(map(id, n_args)), attrs_key(n), n.types)
                if not OPS[n.op].pure:
                    key = (key, n)
            part = self.parts.get(key)
            if part is None:
                part = self.parts[key] = Part(n, n_args, len(self.logs), leaf=leaf)
            part.ranks.add(log.rank)
            found[n] = part
        for old, new in recorder.builder.replaced.items():
            if new in found:
                found[old] = found[new]
        return found

    # -- values -----------------------------------------------------------------------------------
    def _leaf(self, i: int) -> Any:
        """Returns result number `i` as one value: equal on all ranks, one rank's value that the
        others took from it, or a choice by rank. Raises UsageError if no single value can stand for
        all ranks."""
        values = [log.leaves[i] for log in self.logs]
        path = path_name(self.logs[0].paths[i])
        if not any(isinstance(v, Tensor) for v in values):
            if any(v is not values[0] and v != values[0] for v in values):
                raise differ("plain values", path, values)
            return values[0]
        if not all(isinstance(v, Tensor) for v in values):
            raise differ("kinds of values", path, values)
        parts = [self._part(log, v) for log, v in zip(self.logs, values, strict=True)]
        old = self.before.get(self.logs[0].paths[i])
        put = {k: p for k, p in enumerate(parts) if old is None or p.leaf != ("captured", id(old))}
        if 0 < len(put) < len(parts) and len(set(put.values())) == 1:
            owner, part = next(iter(put.items()))
            node = self._alike(part) or self._everywhere(owner, part)
            return symbolic(node, self.around)
        # A value that its owner returns, and the others return from `recv_from`, is one value.
        asked = {p.leaf for p in parts if p.leaf is not None and p.leaf[0] == "from"}
        if len(asked) == 1:
            _, owner, name = leaf = next(iter(asked))
            mine = self.logs[owner].returned(name)
            if mine is values[owner] and all(
                p.leaf == leaf for k, p in enumerate(parts) if k != owner
            ):
                return symbolic(self._from(owner, name), self.around)
        if len({(p.node.type.shape, p.node.type.dtype) for p in parts}) > 1:
            raise differ("shapes", path, [p.node.type for p in parts])
        return symbolic(self._chosen(dict(enumerate(parts))), self.around)

    def _chosen(self, parts: dict[int, Part]) -> Node:
        """Returns the value that is `parts[rank]` on each rank; on other ranks it is arbitrary."""
        groups: dict[Part, list[int]] = {}
        for rank, part in parts.items():
            groups.setdefault(part, []).append(rank)
        if len(groups) == 1 and next(iter(groups)).common:
            return self._plain(next(iter(groups)))
        leaves = dict.fromkeys(p for part in groups for p in part.cone()[1])
        given = {p: self._plain(p) for p in leaves}
        # The largest group comes last: `choose` needs no comparison of ranks for it.
        few_first = dict(sorted(groups.items(), key=lambda group: len(group[1])))
        return choose(self.around.builder, self.symbol, given, few_first)

    @property
    def symbol(self) -> Node:
        if self._symbol is None:
            self._symbol = self.around.node(self.view.symbol(self.around))
        return self._symbol

    def _plain(self, part: Part) -> Node:
        """Returns the merged node of a part that all ranks have."""
        if part.merged_node is None:
            if part.leaf is not None:
                part.merged_node = self._outside(part)
            else:
                part.merged_node = replace(part.node, args=tuple(self._plain(a) for a in part.args))
                self.around.builder.nodes.append(part.merged_node)
        return part.merged_node

    def _outside(self, part: Part) -> Node:
        match part.leaf:
            case ("captured", which):
                return self.around.node(self.outside[which])
            case ("call", k):
                return self._call(k)
            case ("recv", source, to, name, i):
                return self._message(source, to, name, i, part.node.type)
            case ("from", owner, name):
                return self._from(owner, name)
            case ("zeros", t):
                b = self.around.builder
                return b("full", dtype=t.dtype, shape=t.shape, value=0.0, layout=t)
        raise AssertionError(part.leaf)

    def _once(self, key: object, loc: str, make: Callable[[], Node]) -> Node:
        """Returns the node under `key`, made by `make` at the first request. Raises UsageError for
        a request during `make`: the ranks wait for each other in a cycle."""
        node_before = self.merged_nodes.get(key)
        if node_before is not None:
            return node_before
        if key in self.making:
            raise UsageError(
                "ranks wait for each other and none goes on",
                rows=[("at", loc)] if loc else [],
                fix="a rank must not need what it waits for to give what the others wait for",
                at="",
            )
        self.making.append(key)
        self.around.builder.loc = loc
        try:
            self.merged_nodes[key] = made = make()
        finally:
            self.around.builder.loc = None
            self.making.pop()
        return made

    def _call(self, k: int) -> Node:
        """Returns the result of the ranks' `k`-th collective, applied to the operand of each
        rank."""
        first = self.logs[0].calls[k]
        if first.build is None:
            return self.symbol
        build = first.build

        def make() -> Node:
            operands = {}
            for log in self.logs:
                operand = log.calls[k].operand
                assert operand is not None
                operands[log.rank] = self.of[log.rank][operand]
            x = symbolic(self._chosen(operands), self.around)
            return self.around.node(build(x))

        return self._once(("call", k), first.loc, make)

    def _message(self, source: int, to: int, name: str, i: int, t: TensorType) -> Node:
        item = self.logs[source].sent[to, name][i]

        def make() -> Node:
            assert item.operand is not None
            x = self._chosen({source: self.of[source][item.operand]})
            b = self.around.builder
            return b("permute", b.redistribute(x, t), axes=self.view.axes, pairs=((source, to),))

        return self._once(("recv", source, to, name, i), item.loc, make)

    def _from(self, owner: int, name: str) -> Node:
        def make() -> Node:
            mine = self.logs[owner].returned(name)
            assert mine is not None
            if isinstance(mine, Promised):
                return self._from(mine.owner, mine.key)
            part = self._part(self.logs[owner], mine)
            alike = self._alike(part)
            if alike is None:
                return self._everywhere(owner, part)
            whole = gathered(alike.type.in_use, self.view.axes)
            return self.around.builder.redistribute(alike, whole)

        return self._once(("from", owner, name), "", make)

    def _part(self, log: Log, t: Tensor) -> Part:
        if not isinstance(t, Promised):
            assert log.recorder is not None
            return self.of[log.rank][log.recorder.node(t)]
        key = ("from", t.owner, t.key)
        if key not in self.parts:
            t.value()  # raises UsageError if the owner returns no such value
            self._from(t.owner, t.key)  # raises UsageError for a cycle of promises
            self.parts[key] = Part(t._node, (), len(self.logs), leaf=key)
        return self.parts[key]

    def _alike(self, part: Part) -> Node | None:
        """Returns a part of only some ranks as a computation of all devices, in the split of
        optimizer state: each device computes its block. The part must be elementwise and follow
        from values of all ranks; None if not, and then its rank alone computes it
        (`_everywhere`)."""
        if part in self.alike:
            return self.alike[part]
        own, leaves = part.cone()
        if any(set(p.node.type.varying) & set(self.view.axes) for p in (*own, *leaves)):
            return None
        if not all(each_element(p.node) for p in own):
            return None
        b, rests = self.around.builder, self.view.rests

        def value(p: Part) -> Node:
            """Returns the merged node of `p`, in the layout of optimizer state if it has the shape
            of `part`."""
            if p in self.alike:
                return self.alike[p]
            made = self._plain(p)
            t = made.type if made.type.mesh is not None else made.type.on(self.view.mesh)
            if rests is None or t.shape != part.node.type.shape:
                return made
            return b.redistribute(self.view.came.get(made, made), rests(t.complete()))

        given = {p: value(p) for p in leaves}
        for p in own:
            if p not in self.alike:
                args = [self.alike.get(a) or given[a] for a in p.args]
                with b.at(p.node.loc, p.node.scope):
                    self.alike[p] = b(p.node.op, *args, **p.node.attrs)
        return self.alike.get(part) or given[part]

    def _everywhere(self, owner: int, part: Part) -> Node:
        """Returns the value of rank `owner` on all ranks: its sum with zeros from the others."""
        n, zero = part.node, Part(part.node, (), len(self.logs))
        zero.leaf = ("zeros", n.type.with_varying(()))
        others = dict.fromkeys(range(len(self.logs)), zero)
        value = symbolic(self._chosen({**others, owner: part}), self.around)
        t = value.type if value.type.mesh is not None else value.type.on(self.view.mesh)
        own = functions.relayout(value, t.with_varying((*t.varying, *self.view.axes)))
        left = [a for a in own.type.varying if a not in self.view.axes]
        partial = (*t.partial, *((a, "sum") for a in self.view.axes))
        b = self.around.builder
        to = TensorType(t.dtype, t.dims, partial, t.mesh, left)
        return b.redistribute(b("reinterpret", self.around.node(own), layout=to), to.complete())
