"""Traces: a sequence of ops that is captured once, and replayed as one program.

Between `begin_trace_capture` and `end_trace_capture` ops run as they always do, and are written
down. A replay reads the tensors that the ops read, as they are then (a new value is written by
`copy_host_to_device_tensor`), and writes into the tensors that the capture gave. Ops on disjoint
parts of a mesh are a program each, so that the parts work at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import NoneType
from typing import Any, cast
from weakref import WeakValueDictionary, ref

from ..core.checks import instance
from ..core.interrupts import whole
from ..lang.jit.jit import Jit, Straight, jit
from ..lang.value.tensor import Tensor as Value
from ..lang.value.tensor import wrapped
from .args import check_types, mesh_device
from .device import MeshDevice
from .errors import TTNNError, wrong
from .tensor import Tensor

TRACKING = "TT_METAL_TRACE_ALLOC_TRACKING"
_numbers = itertools.count()
_data_of = attrgetter("stored")
_active_captures: set[int] = set()  # the captures


@dataclass(frozen=True)
class MeshTraceId:
    """The number of a captured trace."""

    number: int


@dataclass
class Segment:
    """Ops one after the other on one mesh: a program of its own.

    While the trace is captured all their tensors are held. Then only those stay that the ops read
    from elsewhere, and results that somebody else holds too.
    """

    device: MeshDevice
    # What runs, on which tensors, into which.
    steps: list[tuple[Callable[..., Any], list[Tensor], list[Tensor]]] = field(default_factory=list)
    plan: list[tuple[Callable[..., Any], list[int], list[int]]] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, ref[Tensor]] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    reads: list[Tensor] = field(default_factory=list)  # the inputs and outputs, once it is closed
    writes: list[Tensor] = field(default_factory=list)
    program: Jit[..., tuple[Value, ...]] | None = None
    straight: Straight | None = None  # the fast path to what the program runs
    has_run: bool = False

    def forget(self) -> None:
        """Lets go of the tensors that lie between its ops."""
        for call, reads, writes in self.steps:
            for t in reads:
                if id(t) not in self.results:
                    self.inputs.setdefault(id(t), t)
            self.plan.append((call, [*map(id, reads)], [*map(id, writes)]))
            self.results |= {id(t): ref(t) for t in writes}
        self.steps.clear()

    def close(self) -> None:
        """Makes the program."""
        found = {i: r() for i, r in self.results.items()}
        self.outputs = {i: t for i, t in found.items() if t is not None}
        names, wanted, plan = [*self.inputs], [*self.outputs], self.plan

        def replay(*values: Value) -> tuple[Value, ...]:
            at = dict(zip(names, values, strict=True))
            for call, reads, writes in plan:
                at |= zip(writes, call(*[at[i] for i in reads]), strict=True)
            return tuple(at[i] for i in wanted)

        self.reads, self.writes = [*self.inputs.values()], [*self.outputs.values()]
        self.program = jit(replay)

    def run(self) -> None:
        """Replays the ops. The tensors keep their types, so after the first replay nothing asks
        for them."""
        assert self.program is not None
        values = [t.value_ for t in self.reads]
        if not self.device.is_open or NoneType in map(type, values):
            values = [t.value for t in self.reads]  # one is gone: an error says so
        if self.straight is None:
            given = cast(list[Value], values)
            found: Sequence[Value] = self.program(*given)
            if not self.has_run:  # it may have no short way
                self.straight, self.has_run = self.program.straight(*given), True
        else:
            call, types = self.straight
            found = list(map(wrapped, call(list(map(_data_of, values))), types))
        for t, value in zip(self.writes, found):
            t.value_ = value
        self.device.last = found[-1] if found else None


class Capture:
    """A trace, while it is captured and after."""

    def __init__(self, device: MeshDevice) -> None:
        self.device, self.id = device, MeshTraceId(next(_numbers))
        self.segments: list[Segment] = []

    def add(
        self, device: MeshDevice, call: Callable[..., Any], reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Writes an op down: behind the last one on the same devices, if no other is between."""
        ids = set(device.get_device_ids())
        found = None
        for segment in reversed(self.segments):
            if segment.device is device:
                found = segment
                break
            if ids & set(segment.device.get_device_ids()):
                break
        if found is None:
            found = Segment(device)
            self.segments.append(found)
        found.steps.append((call, [*reads], [*writes]))

    def close(self) -> None:
        """Makes the programs."""
        for segment in self.segments:
            segment.forget()
        for segment in self.segments:
            segment.close()


def begin_trace_capture(mesh_device: MeshDevice, cq_id: int | None = None) -> MeshTraceId:
    """Begins to write down the ops that run on a mesh and its parts. Raises TTNNError if a capture
    is under way there."""
    mesh_device.queue(cq_id)
    for d in _family(mesh_device):
        if d.capture is not None:
            where = "this mesh" if d is mesh_device else "a mesh that shares its devices"
            raise wrong(
                f"begin_trace_capture: a trace is being captured on {where}",
                [("device", mesh_device), ("captures", f"{d.capture.id} on {d}")],
                fix="end that first: ttnn.end_trace_capture(device, trace_id)",
            )
    capture = Capture(mesh_device)
    mesh_device.capture = capture
    _active_captures.add(capture.id.number)
    mesh_device.traces[capture.id.number] = capture
    return capture.id


def end_trace_capture(
    mesh_device: MeshDevice, trace_id: MeshTraceId, cq_id: int | None = None
) -> None:
    """Ends a capture; `execute_trace` replays it. Raises TTNNError if it is not under way."""
    mesh_device.queue(cq_id)
    capture = _trace("end_trace_capture", mesh_device, trace_id)
    if mesh_device.capture is not capture:
        raise wrong(
            "end_trace_capture: this trace is not being captured",
            [("trace", trace_id)],
            fix="end each capture once",
        )
    mesh_device.capture = None
    _active_captures.discard(capture.id.number)
    capture.close()
    if os.environ.get(TRACKING) == "1":
        mesh_device.after[trace_id.number] = WeakValueDictionary()  # by id


@whole
def execute_trace(
    mesh_device: MeshDevice, trace_id: MeshTraceId, *, cq_id: int | None = None,
    blocking: bool = True,
) -> None:  # fmt: skip
    """Replays a trace: its ops, on the present values of its operands, into the tensors of the
    capture.

    With `blocking` it returns when all is computed. Raises TTNNError if there is no such trace, or
    it is being captured. Where TT_METAL_TRACE_ALLOC_TRACKING=1, also if a tensor was made on the
    mesh after the capture and still has its values: on hardware they would be overwritten.
    """
    if cq_id:
        mesh_device.queue(cq_id)
    capture = _trace("execute_trace", mesh_device, trace_id)
    if _active_captures and (within := next((d for d in _family(mesh_device) if d.capture), None)):
        assert within.capture is not None
        this = "this trace" if within.capture is capture else f"{within.capture.id}, not this one,"
        raise wrong(
            f"execute_trace: {this} is being captured",
            [("trace", trace_id)],
            fix="end the capture first: ttnn.end_trace_capture(device, trace_id)",
        )
    if mesh_device.after:
        _check_allocations(mesh_device, trace_id)
    for segment in capture.segments:
        segment.run()
    if blocking:
        for segment in capture.segments:
            _wait(segment.device.last)


def release_trace(mesh_device: MeshDevice, trace_id: MeshTraceId) -> None:
    """Forgets a trace. Raises TTNNError if there is no such trace."""
    _trace("release_trace", mesh_device, trace_id)
    del mesh_device.traces[trace_id.number]
    mesh_device.after.pop(trace_id.number, None)


def _trace(name: str, device: MeshDevice, trace_id: MeshTraceId) -> Capture:
    found: Capture | None = mesh_device(name, device).traces.get(getattr(trace_id, "number", -1))
    if found is None:
        _ = device.mesh  # it is open, or an error says so
        raise wrong(
            f"{name}: the mesh has no trace {trace_id!r}",
            [("traces", [*device.traces] or "none")],
            fix="give what ttnn.begin_trace_capture returned, and the mesh that it was given",
        )
    return found


def _family(device: MeshDevice) -> Iterator[MeshDevice]:
    yield from device.ancestry()
    yield from device.parts()


# -- tensors that a replay would overwrite --------------------------------------------------------
@contextlib.contextmanager
def corruptible_allocation_scope(mesh_device: MeshDevice) -> Iterator[None]:
    """Tensors that are made within the block may be overwritten by replays."""
    after, mesh_device.after = mesh_device.after, {}
    try:
        yield
    finally:
        mesh_device.after = after


def mark_corruptible(tensor: Tensor) -> Tensor:
    """Allows replays to overwrite `tensor`."""
    if tensor.device_ is not None:
        for holder in tensor.device_.ancestry():
            for tensors in holder.after.values():
                tensors.pop(id(tensor), None)
    return tensor


def _check_allocations(device: MeshDevice, trace_id: MeshTraceId) -> None:
    made = device.after.get(trace_id.number, {})
    found = [t for t in made.values() if t.is_allocated()]
    if found:
        raise wrong(
            f"execute_trace: {len(found)} tensors were made after the capture, and a replay would"
            " overwrite them on hardware",
            [("first", f"{found[0].shape}, {found[0].dtype}")],
            fix="make them before the capture, deallocate them, or say that it does not matter:"
            " ttnn.mark_corruptible(tensor)",
        )


# -- events ---------------------------------------------------------------------------------------
_EVENT = "event = ttnn.record_event(device, 0); ttnn.wait_for_event(1, event)"


@dataclass(frozen=True)
class MeshEvent:
    """A moment of a command queue."""

    device: MeshDevice
    cq_id: int
    last: Any = field(repr=False)


def record_event(
    mesh_device: MeshDevice, cq_id: int | None = None, sub_device_ids: Sequence[Any] = (),
    device_range: Any = None,
) -> MeshEvent:  # fmt: skip
    """The moment at which all that was given to a command queue so far is done."""
    check_types("record_event", device_range=device_range)
    for one in sub_device_ids:
        check_types("record_event", sub_device_ids=one)
    return MeshEvent(mesh_device, mesh_device.queue(cq_id), mesh_device.last)


def wait_for_event(cq_id: int, mesh_event: MeshEvent) -> None:
    """Lets a command queue wait for an event. (Ops run in the order of their operands anyway.)
    Raises TTNNError if there is no such queue."""
    instance("wait_for_event", "mesh_event", mesh_event, MeshEvent, _EVENT, TTNNError)
    mesh_event.device.queue(cq_id)


def event_synchronize(mesh_event: MeshEvent) -> None:
    """Returns when an event has happened."""
    instance("event_synchronize", "mesh_event", mesh_event, MeshEvent, _EVENT, TTNNError)
    _wait(mesh_event.last)


def synchronize_device(
    device: MeshDevice, cq_id: int | None = None, sub_device_ids: Sequence[Any] = ()
) -> None:
    """Returns when all that was given to a mesh and its parts is done."""
    for one in sub_device_ids:
        check_types("synchronize_device", sub_device_ids=one)
    mesh_device("synchronize_device", device).queue(cq_id)
    for part in device.parts():
        _wait(part.last)


def _wait(value: Value | None) -> None:
    if value is not None:
        value.stored.block_until_ready()


__all__ = [
    "MeshEvent", "MeshTraceId", "begin_trace_capture", "corruptible_allocation_scope",
    "end_trace_capture", "event_synchronize", "execute_trace", "mark_corruptible", "record_event",
    "release_trace", "synchronize_device", "wait_for_event",
]  # fmt: skip
