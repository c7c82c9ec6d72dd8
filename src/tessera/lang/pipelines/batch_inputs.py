"""Which inputs of a pipelined function have a row for each example of the batch? What the program
does with them decides, never what they are called.

A reading is a set of inputs that hold the batch. A program means something for a batch of any size,
so a reading is possible if the program can be recorded with twice as many rows in these inputs and
no others, and its pipeline then gives twice as many. Of these the least is right: what may as well
stay whole is whole on one device too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...core.errors import GraphError, ShapeError, UsageError, fail
from ...core.mesh import Mesh
from ...ir.graph.node import Node, reachable
from ...ir.schedule.pipelines.stages import depends
from ..parameter import Parameter
from ..record import Frame, Reframe
from ..tensor import Tensor
from .means import alike, cuts_more, nodes_of, reading
from .microbatch import Pipeline, PipeState
from .verdicts import check, warn_of_crossing

TRIES = 8  # readings to begin with, where the fullest one is not possible
Record = Callable[[Frame], list[Node]]


class NeedsPipe(Reframe):
    """The function being recorded calls a pipeline: it is recorded anew, for one microbatch."""

    def __init__(self, pipe: Pipeline, mesh: Mesh, count: int) -> None:
        self.pipe, self.mesh, self.count = pipe, mesh, count
        super().__init__(f"{pipe.name} is called where no function is compiled")

    def frame(
        self, inputs: Mapping[int, Tensor], names: Sequence[str], record: Record
    ) -> PipeState:
        begin = functools.partial(PipeState.begin, self.pipe, self.mesh, self.count)

        def tried(state: PipeState) -> None:
            state.outputs = record(state)

        return read(begin, inputs, names, tried)


def read(
    begin: Callable[..., PipeState],
    inputs: Mapping[int, Tensor],
    names: Sequence[str],
    record: Callable[[PipeState], None],
) -> PipeState:
    """The state to record one microbatch with. `inputs` are the tensors among the arguments, by
    their places; `record` records the function in a state that `begin` begins. Raises UsageError
    if no reading is possible, or several; and what a recording of the whole batch raises."""
    survey = begin(1)
    record(survey)
    search = _Search(begin, inputs, record, survey)
    found = {rows: cut for rows in search.sizes if (cut := search.least(rows))}
    if len(found) != 1:
        places = dict.fromkeys(i for n in survey.taken for i in sorted(_places(survey, n)))
        raise fail(
            UsageError,
            f"{survey.pipe.name}: it is not clear which argument holds the batch",
            [
                *(
                    (names[i], f"{inputs[i].type}{', a weight' * (i in search.weights)}")
                    for i in places
                ),
                *(
                    ("refused", f"{', '.join(names[i] for i in sorted(cut))} as the batch: {why}")
                    for cut, why in [*search.why.items()][:1]
                ),
            ],
            fix="hand the batch to the compiled function, as an argument; a weight is what ts.grad"
            " is asked for, or what nn.Parameter, dist.tensor or ts.tensor(w, name=...) made",
        )
    ((rows, cut),) = found.items()
    state = begin(0, rows, cut)
    once = begin(1, rows, cut)
    record(once)
    try:
        twice = search.doubled(rows, cut)
    except ShapeError as error:
        raise _of_one_size(survey.pipe.name, rows, error) from error
    if not alike(nodes_of(once), nodes_of(twice)):  # where it goes block by block from some size on
        once, twice = twice, begin(4, rows, cut)
        record(twice)
    read = reading(once)
    check(read, nodes_of(twice))
    state.apart = read.apart
    if once.count > 1:
        warn_of_crossing(read)
    return state


def _of_one_size(name: str, rows: int, error: ShapeError) -> ShapeError:
    first, *lines = str(error).splitlines()
    at = next((x.partition(": ")[2] for x in lines if x.startswith("  at ")), "")
    return fail(
        ShapeError,
        f"{name}: it goes for a batch of {rows} rows and no other, but a pipeline gives it those of"
        " a microbatch",
        [(f"of {2 * rows} rows", first)],
        at=at,
        fix="make what has a row for each row of the batch an argument of the compiled function",
    )


class _Search:
    """The search for the least reading. `survey` is a recording of the whole batch."""

    def __init__(
        self,
        begin: Callable[..., PipeState],
        inputs: Mapping[int, Tensor],
        record: Callable[[PipeState], None],
        survey: PipeState,
    ) -> None:
        self.begin, self.inputs, self.record, self.survey = begin, inputs, record, survey
        self.weights = _weights(survey, inputs)
        taken = [(n, _places(survey, n) - self.weights) for n in survey.taken]
        # What the pipeline is called with.
        self.first = {i: None for _, places in taken for i in sorted(places)}
        # How many rows the batch may have: what the results do not need says nothing of it.
        needed = reachable(survey.results)
        sizes = {n: n.type.shape[0] for n, places in taken if n.type.rank and places}
        self.sizes = dict.fromkeys([sizes[n] for n in sizes if n in needed] or sizes.values())
        self._last: PipeState | None = None  # the last recording
        self.why: dict[frozenset[int], str] = {}  # readings to what a pipeline cannot do

    def doubled(self, rows: int, cut: frozenset[int]) -> PipeState:
        """The recording with twice as many `rows` in the inputs `cut`."""
        if self._last is None or (self._last.rows, self._last.cut) != (rows, cut):
            self._last, trial = None, self.begin(2, rows, cut)
            self.record(trial)
            self._last = trial
        return self._last

    def possible(self, rows: int, cut: frozenset[int], some: bool = True) -> bool:
        """Whether `cut` is a reading: the function can be recorded with twice as many rows in these
        inputs, `some` of those that there are, and the pipeline gives twice as many."""
        try:
            found = self.doubled(rows, cut)
        except GraphError as error:  # of what a pipeline can do
            self.why.setdefault(cut, str(error).splitlines()[0])
            return False
        except Exception:  # of our other rules, or of the user's own checks
            return False
        grown = [
            a.type.shape[0] == 2 * b.type.shape[0]
            for a, b in zip(found.results, self.survey.results, strict=True)
            if a.type.rank and a.op != "input"  # a weight that is handed through
        ]
        if some and cuts_more(nodes_of(self.survey), nodes_of(found)):
            return False
        return any(grown) or not grown

    def least(self, rows: int) -> frozenset[int] | None:
        """The least reading in which inputs have `rows` rows."""
        every = [i for i in self.first if self.inputs[i].shape[:1] == (rows,)]
        every += [
            i for i, t in self.inputs.items()
            if t.shape[:1] == (rows,) and i not in self.weights and i not in self.first
        ]  # fmt: skip
        if len(every) == len(self.sizes) == 1:
            return frozenset(every)
        whole = frozenset(every)
        begin = (c for c in _beginnings(every) if self.possible(rows, c, c != whole))
        cut = next(begin, None)
        for i in reversed(every):
            if cut is not None and i in cut and len(cut) > 1 and self.possible(rows, cut - {i}):
                cut -= {i}
        return cut


def _beginnings(every: list[int]) -> Iterator[frozenset[int]]:
    """Where a search may begin: all, one alone, or all but one."""
    if every:
        yield frozenset(every)
    if len(every) > 1:
        yield from (frozenset([i]) for i in every[:TRIES])
        yield from (frozenset(every) - {i} for i in every[:TRIES])


def _places(state: PipeState, n: Node) -> set[int]:
    """Which of the arguments' tensors `n` is computed from."""
    return {state.place[a] for a in reachable([n]) if a in state.place}


def _weights(survey: PipeState, inputs: Mapping[int, Tensor]) -> set[int]:
    """The places of what is no batch: what was made as a weight, what gradients are asked for, what
    lies on a stage, and what meets the model's results only by way of the gradients."""
    assert survey.recorder is not None
    nodes = survey.recorder.builder.nodes
    late = depends(nodes, survey.asked)
    read = reachable([*survey.taken, *(depends(nodes, survey.results) - late)])
    return {
        i
        for n, i in survey.place.items()
        if isinstance(t := inputs[i], Parameter) or t.name or t.drawn
        or t.type.mesh in survey.slices or n in survey.wrt or n not in read
    }  # fmt: skip
