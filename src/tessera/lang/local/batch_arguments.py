"""Which arguments of a local body hold the batch, and are cut over its data axes? Facts of the
tensors decide, and what the body does with them.

A weight is known by how it was made (a parameter, `dist.tensor`, a name, ZeRO's layout) and by the
gradients that the body asks for. Of the others, the batch is what may have twice as many rows while
all else stays: the body is recorded for it, and its results must have twice as many too. Only where
this leaves it open is the argument's name read, if it is one of a few plain words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

from ...core.context import replaced
from ...core.errors import UsageError, fail
from ...core.layout import Factor, TensorType, ways
from ...core.reshard import gathered
from ...ir.graph.node import Node
from ...ops.local import as_local
from ..captured_names import Outside
from ..parameter import Parameter, stand_ins
from ..pipelines.means import cuts_more
from ..record import Recorder, recording
from ..store import Store, collected_by, owned_by
from ..tensor import Tensor
from ..tree import Path, flatten, path_name, unflatten
from .boundary import Borders
from .merge import record_ranks
from .view import NeedsRank

# What says by itself what it holds, where nothing else does.
BATCHES = frozenset({"batch", "micro_batches", "inputs", "targets", "labels", "x", "y"})
WEIGHTS = frozenset({
    "weights", "weight", "bias", "params", "parameters", "gradients", "gradient", "grads",
    "optimizer_state",
})  # fmt: skip
TRIES = 32  # of sets of arguments with equally many rows
Group = frozenset[int]  # tensors of one argument with equally many rows, by their places


def batches(
    around: Recorder,
    borders: Borders,
    body: Callable[..., Any],
    leaves: Sequence[Any],
    spec: Any,
    paths: Sequence[Path],
    types: Mapping[int, TensorType],
) -> frozenset[int]:
    """Which of the tensors among the `leaves` of a call, of these `types` by place, hold the batch.

    `body` takes what `spec` makes of the leaves. Raises UsageError if nothing tells.
    """
    view, said = borders.view, borders.layouts
    if borders.strategy is None or ways(view.batch, view.mesh.sizes) == 1:
        return frozenset()
    mine = {i: p for i, p in enumerate(paths) if i in types and str(p[0]) not in said}
    if borders.batch is not None:
        return frozenset(i for i, p in mine.items() if str(p[0]) in borders.batch)

    def record(cut: frozenset[int]) -> Trial | None:
        kinds = {}
        for i, t in types.items():
            if i not in cut:
                kinds[i] = as_local(borders.wanted(t, paths[i], False), view.axes)
                continue
            t = as_local(gathered(t, view.batch), view.axes)
            if (twice := doubled(t)) is None:
                return None
            kinds[i] = twice.with_varying((*t.varying, *view.batch))
        return tried(around, borders, body, leaves, spec, kinds, failed)

    failed: list[Exception] = []
    known = frozenset(i for i in mine if _is_weight(leaves[i]))
    return _Question(
        borders.name, {i: types[i] for i in mine}, mine, known, record, failed
    ).answer()


def doubled(t: TensorType) -> TensorType | None:
    """`t` with twice as many rows; None where their dim is split into several."""
    if len(t.dims[0]) > 1:
        return None
    return t.with_dims(((Factor(2 * t.shape[0], t.dims[0][0].axes),), *t.dims[1:]))


def tried(
    around: Recorder,
    borders: Borders,
    body: Callable[..., Any],
    leaves: Sequence[Any],
    spec: Any,
    kinds: Mapping[int, TensorType],
    failed: list[Exception] | None = None,
) -> Trial | None:
    """The body recorded for tensors of these types, to be thrown away; None where it raises, and
    `failed` gets what it raised."""
    trial, mesh = Recorder("trial", around), borders.view.mesh
    trial.undone = True
    trial.frame = seen = replace(
        borders.view, asked=[], copied=set(), drawn=[], by_row=None, states=[]
    )
    inputs = {i: trial.input(t) for i, t in kinds.items()}

    outside = Outside(body, leaves, ())

    def once() -> Any:
        given = [inputs.get(i, x) for i, x in enumerate(leaves)]
        args, kwargs = unflatten(spec, stand_ins(leaves, given))
        before = {id(x) for x in flatten((args, kwargs))[0]}
        out = body(*args, **kwargs)
        put = [x for x in flatten((args, kwargs))[0] if type(x) is Tensor and id(x) not in before]
        seen.states += [n for n in map(trial.node, put) if seen.averages(n.type)]
        return out

    try:
        with recording(trial), owned_by(Store("trial")), collected_by(None), replaced(mesh=mesh):
            try:
                out, by_rank = once(), False
            except NeedsRank:
                out, by_rank = record_ranks(trial, once, {}), True
    except Exception as error:  # of our rules, or of the user's own checks
        if failed is not None:
            failed.append(error)
        return None
    finally:
        outside.restore(trial)
        trial.changes.undo()
    handed = {id(t) for t in inputs.values()}
    results = [x for x in flatten(out)[0] if isinstance(x, Tensor) and id(x) not in handed]
    asked = {n for _, nodes in seen.asked or () for n in nodes}
    nodes = {i: trial.node(t) for i, t in inputs.items()}
    numbers = [trial.node(x) for x in results if not x.shape]
    return Trial(
        [x.type for x in results],
        {i for i, n in nodes.items() if n in asked},
        {i for i, n in nodes.items() if n in seen.copied},
        any(_is_weight(t) for t, _ in trial.captured),
        by_rank,
        trial.builder.nodes,
        nodes,
        [*(loss for loss, _ in seen.asked or () if loss is not None), *numbers],
        seen.drawn,
        [trial.node(x) for x in results if x.shape],
        seen.states,
    )


def _is_weight(x: Tensor) -> bool:
    """Whether the way `x` was made says that it is a weight, or state of one."""
    return isinstance(x, Parameter) or bool(x.name) or x.drawn or bool(x.type.rest)


@dataclass
class Trial:
    """A recording of the body: the types of its results, which tensors it asks gradients for, and
    which as arguments of `ts.value_and_grad` and its like; whether it used weights from outside,
    and whether ranks do different work in it; its nodes, the inputs among them by their places,
    losses and results that are numbers; the first sizes of what it draws by a shape."""

    results: list[TensorType]
    asked: set[int]
    by_value: set[int]
    weights_outside: bool
    by_rank: bool
    nodes: Sequence[Node]
    inputs: Mapping[int, Node]
    numbers: Sequence[Node]
    drawn: Sequence[int]
    arrays: Sequence[Node]  # results that are no numbers
    states: Sequence[Node]  # what it sets attributes and items to


@dataclass
class _Question:
    """The tensors among the arguments of the body `name`: `types` on the mesh and `paths` by place;
    `known` are weights by how they were made. `record` records the body with those given
    having twice as many rows, each device's own; None where that is not possible, and `failed`
    gets the errors."""

    name: str
    types: Mapping[int, TensorType]
    paths: Mapping[int, Path]
    known: frozenset[int]
    record: Callable[[frozenset[int]], Trial | None]
    failed: list[Exception]
    asked: frozenset[int] = field(default=frozenset())

    def answer(self) -> frozenset[int]:
        """The places of those that hold the batch. Raises UsageError if nothing tells them."""
        if not self._open():
            return frozenset()
        whole = self.record(frozenset())
        if whole is not None:
            # What is given to ts.value_and_grad may be the batch: a weight only if need be.
            for more in dict.fromkeys((frozenset[int](), frozenset(whole.by_value - whole.asked))):
                self.asked = frozenset(whole.asked | more)
                if not self._open():
                    return frozenset()
                found = [c for c in map(self._least(whole), self._by_rows()) if c]
                others = self.known or self.asked or whole.weights_outside
                if len(found) == 1 and (others or self._open() - found[0]):
                    cut = found[0]
                    return self._by_words() if whole.by_rank and self._are_weights(cut) else cut
                self.failed.clear()  # it runs, but not with any rows cut
        return self._by_words()

    def _open(self) -> frozenset[int]:
        """The arguments that may be a batch; a tensor of one row cannot be one."""
        rows = {i for i, t in self.types.items() if t.rank and t.shape[0] > 1}
        return frozenset(rows - self.known - self.asked)

    def _by_rows(self) -> Iterator[list[Group]]:
        groups: dict[int, dict[object, set[int]]] = {}
        for i in sorted(self._open()):
            mine = groups.setdefault(self.types[i].shape[0], {})
            mine.setdefault(self.paths[i][:1], set()).add(i)
        for by_argument in groups.values():
            yield [frozenset(g) for g in by_argument.values()]

    def _least(self, whole: Trial) -> Callable[[list[Group]], frozenset[int]]:
        """What finds the smallest set of arguments that can be cut into halves so that the body
        runs, and the results have half the rows: first the largest set that works, then without
        each group that need not be cut."""

        def possible(cut: frozenset[int], some: bool = True) -> bool:
            trial = self.record(cut)
            if trial is None or (some and cuts_more(whole.nodes, trial.nodes)):
                return False
            if self.asked:
                return True
            pairs = [(a, b) for a, b in zip(trial.results, whole.results, strict=True) if a.rank]
            return not pairs or any(a.shape[0] == 2 * b.shape[0] for a, b in pairs)

        def least(groups: list[Group]) -> frozenset[int]:
            every = frozenset[int]().union(*groups)
            some = (c for n in range(len(groups), 0, -1) for c in combinations(groups, n))
            firsts = (frozenset[int]().union(*c) for c in islice(some, TRIES))
            cut = next((c for c in firsts if possible(c, c != every)), frozenset[int]())
            for g in reversed(groups):
                if g < cut and possible(cut - g):
                    cut -= g
            return cut

        return least

    def _are_weights(self, cut: frozenset[int]) -> bool:
        """Whether all of them are weights by name: a body whose ranks divide work among them may be
        one that updates them, weight by weight."""
        return all(_said(self.paths[i]) is False for i in cut)

    def _with_asked(self, cut: frozenset[int]) -> frozenset[int]:
        """`cut` and the fewest arguments with as many rows that the body asks gradients by, where
        it runs with all of these cut, and not with `cut` alone; else nothing."""
        rows = {self.types[i].shape[:1] for i in cut}
        more: dict[object, set[int]] = {}
        for i in sorted(self.asked - self.known):
            if self.types[i].shape[:1] in rows:
                more.setdefault(self.paths[i][0], set()).add(i)
        if not more or self.record(cut) is not None:
            return frozenset()
        some = (c for n in range(1, len(more) + 1) for c in combinations(more.values(), n))
        sets = (cut.union(*c) for c in islice(some, TRIES))
        return next((c for c in sets if self.record(c) is not None), frozenset())

    def _by_words(self) -> frozenset[int]:
        """Which of the open arguments are the batch, by their names. Raises UsageError if a name
        says neither."""
        said = {i: _said(self.paths[i]) for i in sorted(self._open())}
        cut = frozenset(i for i, batch in said.items() if batch)
        rather = self._with_asked(cut or self._open())
        if None not in said.values() and not rather:
            return cut
        notes = dict.fromkeys(self.asked, ", which a gradient is by") | dict.fromkeys(
            self.known, ", a weight"
        )
        rows = [(path_name(self.paths[i]), f"{t}{notes.get(i, '')}")
                for i, t in self.types.items() if t.rank]  # fmt: skip
        if rather:
            names = dict.fromkeys(str(self.paths[i][0]) for i in sorted(rather))
            given = "batch=(" + ", ".join(f'"{name}"' for name in names) + ")"
        else:
            said |= {i: _said(self.paths[i]) or False for i in self.asked - self.known}
            likely = sorted((i for i in said if said[i] is not False), key=lambda i: not said[i])
            empty = [i for i, t in self.types.items() if t.rank and not t.shape[0]]  # of no rows
            names = dict.fromkeys(str(self.paths[i][0]) for i in (*empty, *likely))
            given = " or ".join(f'batch="{name}"' for name in [*names][:3])
        rows = rows[:8]
        if self.failed:
            said_of = str(self.failed[0]).splitlines() or [""]
            rows.append(("on trial", f"{type(self.failed[0]).__name__}: {said_of[0]}"))
        raise fail(
            UsageError,
            f"{self.name}: it is not clear which arguments hold the batch",
            rows,
            fix=f"name them, and all others are whole: {given}; batch=() for none",
        )


def _said(path: Path) -> bool | None:
    """Whether words on the path say "a batch" (or "a weight"): the first that says either."""
    told = [w in BATCHES for w in map(str, path) if w in BATCHES or w in WEIGHTS]
    return told[0] if told else None
