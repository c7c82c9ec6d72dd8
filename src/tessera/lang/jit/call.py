"""Recording of one call of a compiled function: inputs, the run of the function, results.

Tensors among the arguments become inputs. The function runs once. Its results, its state changes
and the values that it shows on the host become results of the program.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from types import FunctionType
from typing import Any

from ...core.context import settings
from ...core.errors import MeshError, ShapeError
from ...core.interrupts import opens
from ...core.layout import TensorType
from ...core.locks import RECORDING_LOCK
from ...core.reshard import completed
from ...ir.graph.node import Node
from ...ops.elementwise import stop_gradient
from ..record.parameter import Parameter
from ..record.recorder import (
    WHOLE,
    Frame,
    NeedsLocal,
    Recorder,
    options_of_run,
    recording,
    symbolic,
)
from ..record.submesh import NeedsSlices, need_one_mesh
from ..record.to_host import is_local, local_value
from ..record.tree import Path, Spec, call_paths, flatten, path_name, spec_paths, unflatten
from ..record.variables import Place
from ..value.checks import bound
from ..value.host_outputs import HostOutput, HostValue
from ..value.tensor import Past, Tensor, wrapped
from .argument_updates import Assigned, Edit, Pending, Snapshot, Variables
from .guards import Guards, guards, variables
from .segments import Reads
from .side_effects import drawn, states
from .weight_store import owned_by, store_of


@dataclass(eq=False)
class Recorded:
    """A recorded call: its recorder, its result, its state changes and its guards."""

    recorder: Recorder
    out: Any
    edits: list[Edit]  # changes of the containers of its arguments, and of variables
    put: list[Any]  # the leaves of the new values in `edits`
    guards: Guards
    places: list[Place]  # the variables
    held: list[Place]  # the variables that are read as arguments are
    once: list[str]  # side effects that a later call does not repeat
    buffers: dict[Node, Path]  # the inputs that are buffers of modules among its arguments

    def _mine(self, values: Sequence[Any]) -> list[int]:
        """The indices of the tensors of this recording in `values`."""
        of = self.recorder
        return [i for i, x in enumerate(values) if isinstance(x, Tensor) and x._trace is of]

    def results(self, place: Mapping[int, int], complete: bool) -> tuple[list[Node], Written]:
        """Returns (the result nodes of the program, where they go after a call). With `complete`,
        pending sums of the results are completed. `place` maps the id of each tensor of the call to
        its number."""
        recorder = self.recorder
        leaves, spec = flatten(self.out)
        put = list(self.put)
        slots, written_slots = self._mine(leaves), self._mine(put)
        # A returned parameter is the caller's own object, with its value at the end.
        same = [(i, place[id(x)]) for i, x in enumerate(leaves) if id(x) in recorder.changes.boxes]
        back = {id(leaves[i]) for i, _ in same}
        opened = [o for i, o in recorder.changes.boxes.items() if o.is_set or i in back]
        assigned = recorder.changes.assigned
        results = [
            *(leaves[i] for i in slots),
            *(put[i] for i in written_slots),
            *(symbolic(o.last, recorder) for o in opened if o.last is not None),
            *(a.last for a in assigned),
            *recorder.host_tensors,
        ]
        for i in slots:
            leaves[i] = None
        for i in written_slots:
            put[i] = None
        nodes = [recorder.node(t) for t in results]
        by, flows = Past([], False, recorder.builder.name), self._flows()
        written = Written(
            spec, leaves, slots, self.edits, put, written_slots, self.places,
            recorder.host_outputs, [place[id(o.box)] for o in opened], same,
            [a.place for a in assigned], [by if n in flows else None for n in nodes],
        )  # fmt: skip
        return [self._completed(n) for n in nodes] if complete else nodes, written

    @property
    def never_donated(self) -> set[Node]:
        """The inputs that are never donated: frozen weights and buffers that the call does not set.
        Their modules hold them after the call."""
        new = {path for edit in self.edits for path in edit.paths()}
        boxes = self.recorder.changes.boxes.values()
        frozen = {
            o.argument_node for o in boxes if o.argument_node and o.box.frozen and not o.is_set
        }
        return frozen | {n for n, path in self.buffers.items() if path not in new}

    def _flows(self) -> set[Node]:
        """The nodes that a gradient reaches from the function's inputs. Buffers of modules, such as
        a running mean, are constants."""
        recorder, on = self.recorder, set[Node]()
        fixed = {*self.buffers} | {n for t, n in recorder.captured if _is_buffer(t)}
        for n in recorder.builder.nodes:
            stops = n.op == stop_gradient.name or not any(t.dtype.is_float for t in n.types)
            given = n.op == "input" and n not in fixed
            if not stops and (given or not on.isdisjoint(n.args)):
                on.add(n)
        return on

    def _completed(self, n: Node) -> Node:
        b = self.recorder.builder
        b.loc = n.loc
        done = b.redistribute(n, completed(n.type, n.type.partial_axes), "for the result")
        b.loc = None
        return done


def _is_buffer(t: Tensor) -> bool:
    return type(t) is not Parameter and t.home is not None


def _check(variables: Variables, edits: Sequence[Edit], put: Sequence[Any]) -> None:
    """Raises ShapeError if a value that varies between devices is put into a variable."""
    left = iter(put)
    for edit in edits:
        first = edit.path[1] if len(edit.path) > 1 else edit.set[0][0]
        for t in islice(left, len(list(edit.paths()))):
            own = t.type.varying if isinstance(t, Tensor) else ()
            if own:
                label = variables.places[first].label
                raise ShapeError(
                    f"{label} is set in a local body to what differs between devices",
                    value=t.type,
                    fix=f"combine it first: dist.all_reduce(x, {own[0]!r}); or return it",
                )


@dataclass(eq=False)
class Call:
    """A call of the function `fn`, which may be a method of objects of the classes `owners`.
    `leaves` are those of its arguments; the ones at the indices `dynamic` are tensors."""

    fn: Callable[..., Any]
    name: str
    signature: inspect.Signature
    owners: set[type]
    leaves: list[Any]
    spec: Spec
    dynamic: list[int]
    names: list[str] = field(init=False)
    local: frozenset[object] = frozenset()  # bodies that are local along their data axes

    def __post_init__(self) -> None:
        self.names = list(map(path_name, call_paths(self.signature, self.spec)))

    def record(self, reads: Reads) -> Recorded:
        """Records the call in the first frame that fits the function."""
        frame: Frame = WHOLE
        while True:
            try:
                return self.within(frame, reads)
            except NeedsLocal as found:
                self.local |= {found.body}
                frame = WHOLE
            except NeedsSlices as found:
                frame = found.slices
            reads.begin()

    @opens
    def within(self, frame: Frame, reads: Reads) -> Recorded:
        """Records the call in `frame`. `reads` gets the sources of the inputs and answers reads of
        values."""
        reader = reads if frame.is_read else None
        recorder = Recorder(self.name, reader=reader, options=options_of_run())
        recorder.frame, recorder.compiles, recorder.local = frame, True, self.local
        inputs, bindings = self._inputs(recorder, reads)
        at, own = spec_paths(self.spec), self.leaves
        buffers = {recorder.node(t): at[i] for i, t in inputs.items() if _is_buffer(own[i])}
        functions = [self.fn, *(x for x in self.leaves if isinstance(x, FunctionType))]
        named = partial(variables, functions, [x for x in self.leaves if type(x) in self.owners])
        outside = Variables(named())
        before_draws = states(outside)

        def mine(x: Any) -> bool:
            return any(isinstance(t, Tensor) and t._trace is recorder for t in flatten(x)[0])

        try:
            with recording(recorder), owned_by(store_of(self.fn, self.name)):
                for box, node in bindings:
                    recorder.give(box, node)
                leaves = [inputs.get(i, x) for i, x in enumerate(self.leaves)]
                args, kwargs = unflatten(self.spec, leaves)
                bound(self.name, self.signature, args, kwargs)
                before = Snapshot((args, kwargs))
                try:
                    out = self.fn(*args, **kwargs)
                except MeshError:
                    need_one_mesh(recorder)
                    raise
                need_one_mesh(recorder)
            outside.look_again(named())
            edits, put = before.changes()
            more, new = outside.changes(mine)
            _check(outside, more, new)
        finally:
            outside.restore(mine)
        written = {e.path[1] if len(e.path) > 1 else e.set[0][0] for e in more}
        conditions, held = guards(recorder, outside, written)
        # A tensor from outside that is put into a variable becomes an input of the program.
        new = [symbolic(recorder.node(t), recorder) if type(t) is Tensor else t for t in new]
        warnings_of_draws = drawn(before_draws, outside)
        return Recorded(
            recorder,
            out,
            edits + more,
            put + new,
            conditions,
            outside.places,
            held,
            warnings_of_draws,
            buffers,
        )

    def _inputs(
        self, recorder: Recorder, reads: Reads
    ) -> tuple[dict[int, Tensor], list[tuple[Parameter, Node]]]:
        """Returns ({index of a leaf: the function's argument in its place}, the parameters among
        the leaves with their inputs). A parameter is passed as itself."""
        inputs: dict[int, Tensor] = {}
        bindings: list[tuple[Parameter, Node]] = []
        seen_ids: set[int] = set()
        for k, i in enumerate(self.dynamic):
            leaf = self.leaves[i]
            if id(leaf) in seen_ids:  # a parameter under a second name
                inputs[i] = leaf
                continue
            t = recorder.input(recorder.frame.type_of(leaf, i), self.names[i])
            node = recorder.node(t)
            t.name, t.drawn = leaf.name, leaf.drawn
            if t.name or type(leaf) is Parameter:
                recorder.named_inputs.append(leaf if type(leaf) is Parameter else t)
            reads.sources[node] = k
            inputs[i] = t
            if type(leaf) is Parameter:
                inputs[i] = leaf
                seen_ids.add(id(leaf))
                bindings.append((leaf, node))
        return inputs, bindings


# Outputs and writes of a recorded call: the structure of its result, and its state changes.


@dataclass
class Written:
    """The outputs of a recorded call: the structure of its result, its writes and its host
    outputs."""

    spec: Spec
    leaves: list[Any]  # the result's leaves; None for each result of the program
    slots: list[int]  # the indices in `leaves` of the program's first results
    edits: list[Edit]  # the changes of the containers of the arguments, and of variables
    put: list[Any]  # the leaves of the new values in `edits`
    written_slots: list[int]  # the indices in `put` of the program's next results
    places: Sequence[Place]  # the variables that `edits` may change
    host_outputs: list[HostOutput]  # these take the program's last results
    fills: list[int]  # the parameters that take the results after `written_slots`
    same: list[tuple[int, int]]  # returned parameters: (index in `leaves`, index of the tensor)
    assigned: list[Place]  # the attributes and items that take the results after `fills`
    pasts: list[Past | None]  # of all results; None for one without a gradient

    def __post_init__(self) -> None:
        into = self.edits, self.fills, self.assigned
        calm = not any(into) and not self.host_outputs
        self.plain = calm and len(self.slots) == len(self.leaves)

    def give(
        self,
        outs: Sequence[Any],
        types: Sequence[TensorType],
        args: Any,
        kwargs: Any,
        tensors: Sequence[Any],
    ) -> Any:
        """Returns the call's result from the program's results, and writes new values into the
        caller's containers, the parameters among the call's `tensors`, and modules."""
        pasts = repeat(None) if settings().no_grad else self.pasts
        return self.put_results(list(map(wrapped, outs, types, pasts)), args, kwargs, tensors)

    def put_results(
        self, results: list[Tensor], args: Any, kwargs: Any, tensors: Sequence[Any]
    ) -> Any:
        """`give` for results that are tensors."""
        if self.plain:
            return unflatten(self.spec, results)
        leaves = list(self.leaves)
        for i, t in zip(self.slots, results, strict=False):
            leaves[i] = t
        rest = results[len(self.slots) :]
        taken = len(rest) - sum(len(output.tensors) for output in self.host_outputs)
        pending = Pending(self.edits, self.put, (args, kwargs, Assigned(self.places)))
        with RECORDING_LOCK:
            try:
                self._put_all(rest[:taken], pending, tensors)
            except BaseException:
                with contextlib.suppress(Exception):  # after an interrupt: all weights or none
                    self._put_all(rest[:taken], pending, tensors)
                raise
        for i, k in self.same:
            leaves[i] = tensors[k]
        left = iter(rest[taken:])
        for output in self.host_outputs:
            values = [next(left) for _ in output.tensors]
            if all(map(is_local, values)):
                output.act([HostValue(local_value(v), v.type) for v in values])
        return unflatten(self.spec, leaves)

    def _put_all(self, values: list[Tensor], pending: Pending, tensors: Sequence[Any]) -> None:
        """Writes the results of a call to their places. It may be repeated."""
        rest = iter(values)
        for i in self.written_slots:
            pending.leaves[i] = next(rest)
        pending.put()
        for k in self.fills:
            new = next(rest)
            tensors[k].fill(new._data, new.type)
        for place in self.assigned:
            place.assign(next(rest))
