"""Recording of functions: in a `Recorder` each op becomes a node of the function's graph.

Tensors from outside become hidden inputs (captures). The body of a loop is a recorder inside a
recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np

from ...core.context import settings
from ...core.contexts import within
from ...core.declared import String
from ...core.devices import process_count
from ...core.dtypes import uint32
from ...core.errors import UsageError
from ...core.layout import TensorType, plain
from ...core.locks import RECORDING_LOCK, recording_lock_released
from ...core.options import ProgramOptions
from ...ir.graph.build import Builder
from ...ir.graph.node import Node, entered
from ...ir.schedule.schedule import Schedule
from ...ops.elementwise import stop_gradient
from ..value.eager import CURRENT_TRACE, current_trace, eager
from ..value.host_outputs import Act, HostOutput
from ..value.tensor import ON_READ, Tensor, Trace
from .chunk import Chunk
from .gradients import Goal, derived
from .state_effects import Changes, Written

Held = Callable[[Node], Tensor | None]
Check = Callable[[Tensor], None]  # called with an argument at each call
Reader = Callable[["Recorder", Node], "np.ndarray[Any, Any]"]
KEY_TYPE = plain(uint32, (2,))


CALLED: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The modules that were called outside of recorded functions, by their ids."""


class Frame:
    """The meaning of a recording's values: whole values here, one device's block in a local body
    (lang/record/local_view.py)."""

    is_read = True  # whether the function may read values on the host
    one_of_many = False  # whether this is one of several recordings of the function, by rank

    def type_of(self, t: Tensor, place: int | None = None) -> TensorType:
        """Returns the type of the input for `t`: the argument's tensor number `place`, or a tensor
        from outside of the function."""
        return t.type

    def part(self, recorder: Recorder, node: Node) -> Node:
        """Returns the node that stands for `node` in this frame."""
        return node

    def laid(self, to: TensorType, of: TensorType) -> TensorType:
        """Returns the layout in this frame for the layout `to` that a user requests of a value of
        type `of`."""
        return to

    def reads(self, node: Node) -> None:
        """Called before a read of `node`, whose value differs between devices."""

    def gradients(
        self,
        recorder: Recorder,
        loss: Node,
        wrt: Sequence[Node],
        weights: Sequence[Tensor],
        goals: Sequence[Goal],
    ) -> list[Node]:
        """The gradients of `loss` by `wrt`, the nodes of `weights` (`gradients.derived`)."""
        return derived(recorder.builder, loss, wrt, goals)

    def ends(self, sources: Set[Node], wrt: Sequence[Node]) -> tuple[str, str] | None:
        """Returns (reason, fix) if a gradient of a loss made of `sources` does not reach all of
        `wrt`; None if it does."""
        return None

    def checked_state(self, recorder: Recorder, name: str, node: Node) -> Node:
        """Returns the node whose value the module attribute `name` holds after the run, for its new
        value `node`."""
        return node

    def scheduled(
        self, recorder: Recorder, results: Sequence[Node], held: Held
    ) -> tuple[list[Node], Schedule] | None:
        """Returns (the inputs, the Schedule) of a recording with these `results` that is not one
        program of its nodes; None for one program. `held` returns the tensor of an input, None for
        the random key."""
        return None


class NeedsLocal(Exception):
    """The function must be recorded anew with `body` in `Recorder.local`: the body of a distributed
    function reads its rank along a data axis."""

    def __init__(self, body: object) -> None:
        self.body = body


WHOLE = Frame()


class Recorder:
    """Records one function (or one loop body, inside `parent`)."""

    compiles = False  # whether the recording will run: set by `ts.jit`

    def __init__(
        self,
        name: str,
        parent: Recorder | None = None,
        reader: Reader | None = None,
        options: ProgramOptions | None = None,
    ):
        if options is None:
            options = settings().program if parent is None else parent.options
        self._builder = Builder(name, options)
        self.parent = parent
        self.reader = reader
        self.captured: list[tuple[Tensor, Node]] = []
        self.key: Node | None = None
        self.streams = 0
        self.draws: list[Tensor] | None = None  # in a loop's body: the key inputs [n, 2]
        self.chunk: Chunk | None = None  # in the function of `map_chunks`
        self.checks: list[tuple[Node, Check]] = []  # checks of arguments, by their inputs
        self.named_inputs: list[Tensor] = []  # inputs that are parameters or have a name
        # `dist.tensor` boxes of earlier recordings, by name
        self.earlier_boxes: dict[str, Any] = {}
        self.labels: dict[int, str] = {}  # the names of weights of graph functions, by their ids
        self._nodes: dict[int, Node] = {}
        self.changes = Changes()
        self.created_ids: set[int] = set()  # ids of modules made during this recording
        self.called_modules: dict[int, Any] = {}  # modules from outside that were called
        self.host_outputs: list[HostOutput] = []  # values shown on the host after a call
        self.host_reads: list[
            tuple[Tensor, ref[Tensor]]
        ] = []  # reads of outer values: (box, value)
        self.piped = False  # whether a pipeline ran as a plain function
        self.stages: Any = None  # the stages of the pipeline that it calls (pipelines/)
        self.chosen: dict[
            Any, None
        ] = {}  # the schedule options of the functions that it calls: jit/schedule_options.py
        self.kernel_sizes: dict[str, int] = {}  # sizes of tiles of its kernels, and their warps
        self.open_choices: dict[str, tuple[Any, ...]] = {}  # that it reads, with further values
        self.local: Set[object] = frozenset()  # bodies that are local along their data axes
        self.frame = WHOLE
        self.of_row = False  # in the function of `vmap`: a gradient is that of one row
        if parent is not None:
            around, b = parent.builder, self.builder
            b.scope, b.slices, b.whole = around.scope, around.slices, around.whole
            b.stages_axis = around.stages_axis
            self.frame, self.compiles = parent.frame, parent.compiles
            self.of_row = parent.of_row

    @property
    def builder(self) -> Builder:
        """The builder of the graph, with the settings at the current line of the user's code."""
        now, b = settings(), self._builder
        b.strict, b.ordered, b.reduce_dtype = now.strict, now.ordered, now.reduce_dtype
        return b

    @property
    def options(self) -> ProgramOptions:
        """The options in force when the recording of the whole function began; later changes have
        no effect."""
        return self._builder.options

    @property
    def root(self) -> Recorder:
        """The recorder of the whole function."""
        return self if self.parent is None else self.parent.root

    def give(self, box: Any, node: Node) -> None:
        """Registers the parameter `box` as an argument whose input is `node`."""
        self.changes.boxes[id(box)] = Written(box, box.type, node, node)
        self._nodes[id(box)] = node

    def write(self, box: Any, value: Tensor) -> None:
        """Puts `value` into the parameter `box` when the program has run. Raises UsageError in the
        body of a loop or branch."""
        root = self.root
        born = id(box) in root.changes.created
        inner = self.parent is not None and box._trace is not self
        if inner and not born:
            raise UsageError(
                "a weight is set in the body of a loop, a branch or vmap",
                weight=box,
                fix="return the new value from the body, and set the weight after it",
            )
        node = self.node(value)
        is_created = born or box._trace is not None  # made, or copied, in the function itself
        before = box._node if is_created else root._nodes.get(id(box))
        if is_created:
            root.changes.put(box, before, node)
            box.bind(node, self)
        else:
            root.changes.write(box, before, node)
            root._nodes[id(box)], box.type = node, node.type

    def holds(self, box: Any) -> Tensor | None:
        """Returns the current value of the parameter `box` if this recording was given it or has
        written it, else None."""
        root = self.root
        return symbolic(root._nodes[id(box)], root) if id(box) in root.changes.boxes else None

    def add_created(self, created: Any) -> None:
        """Notes that the module or parameter `created` was created in the recorded function."""
        self.root.changes.created[id(created)] = created
        self.created_ids.add(id(created))

    def is_outside(self, holder: Any) -> bool:
        """Returns whether the module `holder` exists after the run: it was created outside of the
        function, or of the body of the loop."""
        born = self.created_ids if self.draws is not None else self.root.changes.created
        return id(holder) not in born

    def assign(self, holder: Any, name: Any, value: Tensor) -> Tensor:
        """Returns the stand-in for `value` as an attribute of a module from outside, or as an item
        of its list or dict; the value is set when the program has run. Raises UsageError in the
        body of a loop, a branch or vmap."""
        if self.parent is not None or self.draws is not None:
            raise UsageError(
                f"{type(holder).__name__}.{name} is set in the body of a loop, a branch or vmap",
                tensor=value.type,
                fix="return the new value from the body, and set it after it",
            )
        held = f"{type(holder).__name__}.{name}"
        last = symbolic(self.frame.checked_state(self, held, self.node(value)), self)
        self.changes.assign(holder, name, last)
        return last

    def set_number(self, holder: Any, name: str) -> None:
        """Notes that the attribute `name` of a module is about to be set to a number."""
        if id(holder) not in self.root.changes.created:
            self.root.changes.assign(holder, name)

    def clear(self) -> None:
        """Drops the state that only a recording needs."""
        self.named_inputs.clear()
        self.changes.clear()

    @property
    def host_tensors(self) -> list[Tensor]:
        """The tensors of all host outputs, in order."""
        return [t for output in self.host_outputs for t in output.tensors]

    def input(self, type: TensorType, name: str = "") -> Tensor:
        return symbolic(self.builder.input(type, name), self)

    def apply(self, op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        if op == "redistribute":
            moved = self.node(args[0])
            to = self.frame.laid(attrs["to"], moved.type)
            by = attrs.get("algorithm", "")
            return [symbolic(self.builder.redistribute(moved, to, algorithm=by), self)]
        node = self.builder(op, *map(self.node, args), **attrs)
        nodes = [node]
        if len(node.types) > 1 or node.kind.many:
            nodes = [self.builder("item", node, index=i) for i in range(len(node.types))]
        return [symbolic(self._without_gradient(n), self) for n in nodes]

    def _without_gradient(self, node: Node) -> Node:
        """Returns `node`; inside `ts.no_grad` as a constant for gradients."""
        if not settings().no_grad or not node.type.dtype.is_float or node.op == stop_gradient.name:
            return node
        return self.builder("stop_gradient", node)

    def node(self, t: Tensor) -> Node:
        """Returns the node of `t` in this recording; a tensor from outside becomes a hidden
        input."""
        node = t._node if t._trace is self else self.read(t)
        assert node is not None
        return self.frame.part(self, node)

    def on_whole_mesh(self, t: Tensor) -> Tensor:
        """Returns `t`; a value on the slice of a pipeline's stage as a value on the pipeline's
        mesh."""
        if t.mesh not in self.builder.slices:
            return t
        return symbolic(self.builder.on_one_mesh((self.node(t),))[0], self)

    def read(self, t: Tensor) -> Node:
        """Returns the node of the box or tensor `t` from outside: an input of this recording and of
        the enclosing ones, up to the recording of `t`."""
        known = self._nodes.get(id(t))
        if known is not None:
            return known
        if t._trace is not None and not self._encloses(t._trace):
            raise _ended(t)
        if self.parent is not None:
            self.parent.node(t)
        kind = t.type if self.parent is not None else self.frame.type_of(t)
        node = self.builder.input(kind, f"captured{len(self.captured)}")
        self.captured.append((t, node))
        self._nodes[id(t)] = node
        return node

    def _encloses(self, other: Trace) -> bool:
        outer = self.parent
        while outer is not None and outer is not other:
            outer = outer.parent
        return outer is other

    def show(self, tensors: Sequence[Tensor], act: Act) -> None:
        self.host_outputs.append(HostOutput(tuple(tensors), act))

    def check(self, t: Tensor) -> None:
        """Raises UsageError if `t`, of this recording, is used after the recording ended."""
        now = current()
        if now is not self and not (now is not None and now._encloses(self)):
            raise _ended(t)

    def random_key(self) -> tuple[Tensor, int]:
        """Returns (the hidden key input of this recording, a new stream number)."""
        if self.draws is not None:
            return self.random_keys(1), 0
        self.streams += 1
        if self.frame.one_of_many and self.parent is not None:
            whole, _ = self.parent.random_key()  # the recordings of all ranks share one key
            return symbolic(self.node(whole), self), self.streams
        if self.key is None:
            self.key = self.builder.input(KEY_TYPE, "random_key")
        return symbolic(self.key, self), self.streams

    def random_keys(self, count: int) -> Tensor:
        """Returns keys [count, 2] (for one: [2]) for draws in the body of a loop, different in each
        iteration."""
        assert self.draws is not None
        kind = KEY_TYPE if count == 1 else plain(uint32, (count, 2))
        self.draws.append(self.input(kind, f"random_key{len(self.draws)}"))
        return self.draws[-1]

    def value(self, t: Tensor) -> np.ndarray[Any, Any]:
        """The value of `t` while recording: the program is split here. Raises UsageError if the
        value differs between devices, or if this recording cannot read."""
        self.check(t)
        node = self.node(t)
        if node.type.varying:
            self.frame.reads(node)
            raise UsageError(
                "a value that differs between devices is read",
                tensor=node.type,
                made_at=node.loc,
                fix="combine it first: dist.all_reduce(x, axis), or choose with ts.where",
            )
        if self.reader is None:
            raise UsageError(
                "a value cannot be read here: the function is recorded without running",
                rows=_shown(t),
                fix="read values inside ts.jit only, and outside of loop bodies"
                if self.frame.is_read and self.root.stages is None
                else "return the value, and read it after the call",
            )
        return self.reader(self, node)


def _noted(t: Tensor) -> None:
    """Notes that the recorded function reads an outer value: the recording is valid only for that
    value."""
    recorder = current()
    if recorder is not None:
        recorder.root.host_reads.append((t, ref(t.now())))


ON_READ.append(_noted)


def symbolic(node: Node, recorder: Recorder) -> Tensor:
    """Returns the tensor of a recording that stands for `node`."""
    t = Tensor(None, node.types[0])
    t._node, t._trace = node, recorder
    return t


def _shown(t: Tensor) -> list[tuple[str, object]]:
    loc = t._node.loc if t._node is not None else ""
    return [("tensor", t.type), *([("made_at", loc)] if loc else [])]


def _ended(t: Tensor) -> UsageError:
    return UsageError(
        "a tensor of a recorded function is used after that function ended",
        rows=_shown(t),
        fix="return it from its function and use what the call gives back",
    )


def current() -> Recorder | None:
    """The innermost function that is being recorded, or None."""
    trace = current_trace()
    return trace if isinstance(trace, Recorder) else None


def options_of_run() -> ProgramOptions:
    """The program options for a whole function, with the number of processes that run it. An eager
    op is the same program for any number of processes."""
    return replace(settings().program, processes=process_count())


def current_options() -> ProgramOptions:
    """The options of the current recording, or of a recording that would begin here."""
    recorder = current()
    return settings().program if recorder is None else recorder.options


def open_choice(name: str, values: Iterable[Any]) -> None:
    """Notes that the current recording reads the choice `name` (autotune/choices.py), and values
    that the autotuner may try."""
    recorder = current()
    if recorder is not None:
        known = recorder.root.open_choices.setdefault(name, ())
        recorder.root.open_choices[name] = tuple(dict.fromkeys((*known, *values)))


def choose(name: str, default: Any, others: Iterable[Any] = ()) -> Any:
    """Returns the value of the choice `name` for the current recording: `default` if no value is
    set. `others` are the values that the autotuner may try."""
    open_choice(name, (value for value in others if value != default))
    return dict(current_options().schedule.choices or ()).get(name, default)


def need_before_recording(caller: str, **chosen: Any) -> None:
    """Raises UsageError inside a recorded function whose options differ from `chosen`: they are
    fixed when its recording begins."""
    now = current_options()
    asked = replace(now, **chosen)
    if current() is not None and now != asked:
        raise UsageError(
            f"{caller}: the options of a recorded function are settled before it is recorded",
            recorded_under=str(now),
            wanted=str(asked),
            fix="write it around the call of the compiled function, or before it",
        )


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    with RECORDING_LOCK:
        token = CURRENT_TRACE.set(recorder)
        try:
            yield recorder
        finally:
            CURRENT_TRACE.reset(token)
            if recorder.parent is None:
                recorder.changes.undo()


@contextmanager
def outside(recorder: Recorder) -> Iterator[None]:
    """A context in the middle of a recording with the state from before it, for other threads
    too."""
    with eager(), recorder.root.changes.aside(), recording_lock_released():
        yield


@within("ts.named_scope")
@contextmanager
def named_scope(name: String) -> Iterator[None]:
    """A context that names the recorded nodes: `named_scope("mlp")` gives `mlp`, nested
    `mlp/up`."""
    recorder = current()
    if recorder is None:
        yield
        return
    with in_scope(recorder, entered(recorder.builder.scope, name)):
        yield


@contextmanager
def in_scope(recorder: Recorder, scope: str) -> Iterator[None]:
    """A context whose recorded nodes are in `scope`."""
    before = recorder.builder.scope
    recorder.builder.scope = scope
    try:
        yield
    finally:
        recorder.builder.scope = before
