"""Graph functions: `graph.training_step`, `graph.stage`, `graph.parameters`.

They are compiled functions that own the weights made inside them (lang/jit/weight_store.py).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from ...autotune.choices import Timing
from ...core.checks import function_of, unfit
from ...core.context import settings
from ...core.contexts import above
from ...core.declared import Function
from ...core.errors import StrategyWarning, UsageError, lines_up
from ...core.interrupts import handle_waiting, whole
from ...core.mesh import Mesh
from ...core.options import ScheduleOptions
from ...core.tracebacks import boundary
from ...ir.graph.build import Builder
from ...ir.graph.node import Graph
from ...ir.schedule.schedule import Schedule
from ..autodiff.grad import grad, weight_names, weights_read
from ..jit import weight_store
from ..jit.guards import variables_of
from ..jit.jit import Jit
from ..jit.taken_out import Lowered
from ..jit.trace import trace
from ..jit.weight_store import Collector, NeedsMesh, Store
from ..parallel.idle_axes import idle_axes
from ..parallel.strategy import Strategy, check_reach, place, strategy_or_none
from ..record.box import Box
from ..record.operands import as_tensor
from ..record.recorder import current, named_scope
from ..record.tree import flatten
from ..record.variables import Place
from ..value.checks import asked_function, signature_of
from ..value.host_data import is_array
from ..value.tensor import Tensor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def backward(
    loss: Tensor,
    weights: Any = None,
    *,
    layout: Any = None,
    reduce_partial: bool = True,
    reduce_dtype: object = None,
) -> Any:
    """`ts.grad`, with gradients in the layouts of the strategy of the enclosing `training_step`.

    Without `weights` it returns a dict of gradients by name for all weights that the function has
    used. Raises the errors of `ts.grad`.
    """
    collecting, recorder = weight_store.collector(), current()
    if weights is None and collecting is not None and recorder is not None:
        weights = weights_read(recorder) or None
    if (
        layout is None
        and reduce_partial
        and collecting is not None
        and collecting.strategy is not None
    ):
        layout = collecting.strategy
    return grad(
        loss, weights, layout=layout, reduce_partial=reduce_partial, reduce_dtype=reduce_dtype
    )


class TrainingStep(Generic[P, R]):
    """A compiled step and its weights: `step(batch)`, `step.parameters`."""

    def __init__(self, fn: Callable[P, R], module: str, strategy: Strategy | None) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.module, self.strategy = module, strategy
        self._store = Store(module)
        self._weights: dict[str, Box] = {}
        self._checked = False  # whether the strategy reaches the weights
        self._checked_recording: Builder | None = None  # the last recording checked for idle axes
        self._warned: set[str] = set()
        self._fn = fn
        self._held: list[tuple[Place, Box]] = []  # the variables that hold weights
        self._pipeline_mesh: Mesh | None = None  # the mesh of the pipeline that it calls
        self._batch_on: Mesh | None = None  # the mesh of the batch in this call

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            _name_variables(fn)
            asks = strategy is not None and self._pipeline_mesh is None
            collector = Collector(
                self._weights, module, self._store, strategy, self._batch_on, asks
            )
            with (
                weight_store.collected_by(collector),
                weight_store.owned_by(self._store),
                named_scope(module),
            ):
                before = self._meets()
                out = fn(*args, **kwargs)
                self._adopt(before)
                # The weights of this recording show the mesh: record again with the batch on it.
                if asks and self._batch_on is None and (mesh := self._mesh()) is not None:
                    raise NeedsMesh(mesh, False)
                if strategy is not None and not self._checked:
                    check_reach(strategy, {n: p.type for n, p in self._weights.items()})
                    self._checked = True
            return out

        self._jit = Jit(run, (), True)
        self._jit.chosen = fn.chosen if isinstance(fn, Jit) else None

    @property
    def compiled(self) -> Jit[P, R]:
        """The compiled function of the step."""
        return self._jit

    @property
    def timings(self) -> tuple[Timing, ...]:
        """`Jit.timings` of the compiled function."""
        return self._jit.timings

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(
            f"training_step {self._jit.name}: a step is not copied, nor is what it calls",
            fix="keep its weights, which are values: dict(step.parameters); or make another step:"
            " graph.training_step(...)(fn)",
        )

    def under(self, options: ScheduleOptions) -> TrainingStep[P, R]:
        """Returns the step itself, compiled with these options too: `@schedule(...)`."""
        self._jit = self._jit.under(options)
        return self

    @whole
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        handle_waiting()
        if (called := settings().called) is not None:
            return called(self, args, kwargs)  # type: ignore[no-any-return]  # is R
        out = self._with_batch(self._jit, args, kwargs, self._lay)
        self._see_idle()
        return out

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        """The Schedule that a call with these arguments will run. Nothing is compiled or run, and
        the later call does not record again."""
        return self._with_batch(self._jit.plan, args, kwargs, self._to_be_laid)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """`Jit.lower` of the compiled function."""
        return self._with_batch(self._jit.lower, args, kwargs, self._to_be_laid)

    def _with_batch(
        self, run: Callable[..., T], args: Any, kwargs: Any, lay: Callable[[Tensor, Mesh], Tensor]
    ) -> T:
        """Calls `run` with the arguments, with the batch on the mesh of the step."""
        self._take_anew()
        mesh = self._mesh()
        while True:
            given = args, kwargs
            self._batch_on = mesh
            if self.strategy is not None and mesh is not None:
                given = self._laid(given, mesh, lay)
            try:
                return run(*given[0], **given[1])
            except NeedsMesh as needs:  # repeats outside of the handler: no chained traceback
                mesh = needs.mesh
                self._pipeline_mesh = mesh if needs.always else None

    def _mesh(self) -> Mesh | None:
        """The mesh of the pipeline that the step calls, the current mesh, or the mesh of its
        weights: weights that it has used, or before the first call those in variables that it
        names."""
        if self._pipeline_mesh is not None or settings().mesh is not None:
            return self._pipeline_mesh or settings().mesh
        named = (p.now() for p in ([] if self._weights else _variables(self._fn)))
        held = (*self._weights.values(), *(x for n in named for x in flatten(n)[0]))
        return next((t.mesh for t in held if isinstance(t, Tensor) and t.mesh is not None), None)

    def _lay(self, t: Tensor, mesh: Mesh) -> Any:
        return place(t, self.strategy, mesh, kind="batch")

    def _to_be_laid(self, t: Tensor, mesh: Mesh) -> Tensor:
        assert self.strategy is not None
        return Tensor(None, self.strategy.batch(t.type.on(mesh)))

    def _laid(self, x: Any, mesh: Mesh, lay: Callable[[Tensor, Mesh], Tensor]) -> Any:
        """Returns `x` with the arrays of a batch, which are on no mesh yet, laid out by the
        strategy."""
        if type(x) is dict:
            return {k: self._laid(v, mesh, lay) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            rows = [self._laid(v, mesh, lay) for v in x]
            return type(x)(*rows) if hasattr(x, "_fields") else type(x)(rows)
        array = is_array(x)
        t = as_tensor(x) if array and not isinstance(x, Tensor) else x
        if type(t) is not Tensor or t.type.mesh is not None or not t.ndim:
            return x
        return lay(t, mesh)

    def _see_idle(self) -> None:
        """Gives one StrategyWarning for mesh axes along which all devices compute the same."""
        if self._checked_recording is self._jit.builder:
            return
        self._checked_recording = self._jit.builder
        idle = [a for a in idle_axes(self._jit.program) if a not in self._warned]
        if idle:
            self._warned.update(idle)
            axes = ", ".join(map(repr, idle))
            warnings.warn(
                f"{self._jit.name}: all devices along {axes} compute the same: neither the batch"
                " nor a weight is split there\n  split the batch there: with"
                f' strategy=dist.strategy("data_parallel", {idle[0]!r}) training_step lays out what'
                ' is on no mesh, and dist.place(batch, strategy, mesh, kind="batch") the rest',
                StrategyWarning,
                stacklevel=lines_up(),
            )

    def _take_anew(self) -> None:
        """If a variable of a weight was bound to a plain tensor since the last call, puts the
        tensor into the weight, and the weight back into the variable."""
        for spot, box in self._held:
            x = spot.now()
            if type(x) is Tensor:
                self.update({n: x for n, p in self._weights.items() if p is box})
                spot.put(box)

    @property
    def graph(self) -> Graph:
        """The Graph of the last recording. Raises UsageError before the first call."""
        return self._jit.graph

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The weights of the step, by name. Set it to train; the step is not recorded again.

        Raises UsageError before the first call, which makes them: `graph.parameters(step, batch)`
        makes them without running the step.
        """
        return _parameters(f"training_step {self._jit.name}", self._weights)

    @parameters.setter
    def parameters(self, new: Mapping[str, Tensor]) -> None:
        weight_store.assign(f"training_step {self._jit.name}", self._weights, new, whole=True)

    def update(self, new: Mapping[str, Tensor]) -> None:
        """Sets some of the weights, by name.

        Raises UsageError if a name is unknown, ShapeError or DTypeError if a value does not fit;
        then no weight is set.
        """
        weight_store.assign(f"training_step {self._jit.name}", self._weights, new, whole=False)

    def _meets(self) -> int:
        """The number of tensors that the recording has captured before the step's body runs."""
        recorder = current()
        assert recorder is not None
        recorder.root.earlier_boxes |= {n: p for n, p in self._weights.items() if p.drawn}
        return len(recorder.captured)

    def _adopt(self, before: int) -> None:
        """Makes the outer boxes captured since capture `before` weights of this step. Raises
        UsageError if two have one name."""
        recorder = current()
        assert recorder is not None
        known_ids = set(map(id, self._weights.values()))
        boxes = [t for t, _ in recorder.captured[before:] if isinstance(t, Box)]
        new = [box for box in boxes if id(box) not in known_ids]
        names = weight_names(new)
        for box in new:
            name = names.get(id(box), "")
            if name and self._weights.setdefault(name, box) is not box:
                raise UsageError(
                    f"{self.module or 'training_step'}: two weights are called {name!r}",
                    tensor=box.type,
                    fix="make both parts of one module, or give them names of their own",
                )
        for spot in _variables(self._fn):
            self._held += [(spot, box) for box in new if spot.now() is box]


class Stage(Generic[P, R]):
    """A named part of a model with weights of its own: they are the same at every call."""

    def __init__(self, fn: Callable[P, R], name: str) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.name = name
        self._call: Callable[P, R] = asked_function(f"stage {name!r}", "the function", fn)
        self._store = Store(name)

    @boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with weight_store.owned_by(self._store), named_scope(self.name):
            return self._call(*args, **kwargs)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The stage's own weights by name. Raises UsageError before the first call."""
        return _parameters(f"stage {self.name!r}", self._store.weights)

    @parameters.setter
    def parameters(self, new: Mapping[str, Tensor]) -> None:
        weight_store.assign(f"stage {self.name!r}", self._store.weights, new, whole=True)

    def update(self, new: Mapping[str, Tensor]) -> None:
        """Sets some of the weights, by name.

        Raises UsageError if a name is unknown, ShapeError or DTypeError if a value does not fit;
        then no weight is set.
        """
        weight_store.assign(f"stage {self.name!r}", self._store.weights, new, whole=False)


def _parameters(caller: str, weights: Mapping[str, Box]) -> dict[str, Tensor]:
    if not weights:
        raise UsageError(
            f"{caller}: it has no weights yet",
            fix="call it once, or make them without running it: graph.parameters(step, batch)",
        )
    return _now(weights)


def training_step(
    module: str = "", strategy: Strategy | str | None = None
) -> Callable[[Callable[P, R]], TrainingStep[P, R]]:
    """A decorator that compiles `step(batch)` and keeps the weights that are made in it.

    `step` returns gradients and metrics. Arrays in the arguments that lie on no mesh are a batch,
    which `strategy` splits over the current mesh or that of the weights. Without a strategy they
    are whole on each device; if nothing is split along an axis, a StrategyWarning says so. `module`
    is the scope of its nodes and the first part of the names of its weights. Weights are replicated
    on the mesh of the tensors that they are used with, or laid out by `strategy`. Their first
    values depend on `ts.seed` and their names. Inside, `graph.backward(loss)` covers all of them,
    and all named tensors from outside that the step uses (guide 3, 4.5); a tensor of `dist.tensor`
    without a name gets the name of its variable (guide 1, 7.6). Setting the weights also sets the
    variables in which the step found them. Raises StrategyError if `strategy` is not a strategy,
    UsageError if two weights have one name.
    """
    _named("training_step", "module", module, empty=True)
    laid_by = strategy_or_none("training_step", "the strategy", strategy)

    def decorate(fn: Callable[P, R]) -> TrainingStep[P, R]:
        return TrainingStep(_function("training_step", fn), module, laid_by)

    return above("graph.training_step", decorate)


def stage(name: str) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """A decorator that names a part of a model.

    Its nodes have the scope `name` and its weights belong to it. The weights are the same at every
    call, in every function and in loops. Another function that is made a stage has weights of its
    own (guide 3, 4.4). Raises UsageError if `name` is not a non-empty string.
    """
    _named("stage", "name", name)

    def decorate(fn: Callable[P, R]) -> Stage[P, R]:
        return Stage(_function("stage", fn), name)

    fix = 'write @graph.stage("a") above the function; for a name alone: with ts.named_scope("a"):'
    return above("graph.stage", decorate, fix)


def _named(caller: str, argument: str, name: object, empty: bool = False) -> None:
    if not isinstance(name, str) or not (name or empty):
        raise unfit(
            caller,
            argument,
            name,
            f'write @graph.{caller}("name") above the function'
            if caller == "stage"
            else f'write @graph.{caller}(module="Transformer") above the function',
        )


def _variables(fn: Callable[..., Any]) -> list[Place]:
    fn = inspect.unwrap(fn)
    return list(variables_of(fn)) if inspect.isfunction(fn) else []


def _name_variables(fn: Callable[..., Any]) -> None:
    """Names the unnamed weights of `dist.tensor` in variables of `fn` like their variables."""
    for spot in _variables(fn):
        t = spot.now()
        if isinstance(t, Tensor) and t.drawn and not t.name:
            t.name = spot.key or ""


def _function(caller: str, fn: Callable[P, R]) -> Callable[P, R]:
    signature_of(caller, function_of(caller, "the function", fn))
    return fn


def parameters(fn: Function, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The weights that `fn(*args, **kwargs)` makes, as a dict by name, without running it.

    Arguments may be types in place of tensors. For a training step the dict has all its weights.
    Raises UsageError for a module, which has its weights already.
    """
    if callable(getattr(type(fn), "parameters", None)):
        raise UsageError(
            f"parameters: a call of {type(fn).__name__} makes no weights: it has its own",
            fix="take these: model.parameters()",
        )
    seen: dict[str, Box] = {}
    with weight_store.collected_by(Collector(seen)):
        trace(fn, *args, **kwargs)
    return fn.parameters if isinstance(fn, TrainingStep) else _now(seen)


def _now(weights: Mapping[str, Box]) -> dict[str, Tensor]:
    """Returns the values by name; in a recorded function the weights themselves."""
    recorded = current() is not None
    return {name: p if recorded else p.now() for name, p in weights.items()}
