"""`@ts.distribute` and `@op.kernel`: functions with a local body, which gets one device's blocks.

The arguments are laid out on a mesh. The data axes of a strategy are global: the body gets whole
tensors, whose rows are split there. They are local in a body that reads its rank along them. The
body is recorded once, with a symbolic rank, into the same graph as all other ops; only if it reads
the rank as a number is it recorded per rank (lang/parallel/local/ranks.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ....core.checks import axes_of, function_of, unfit
from ....core.context import replaced, settings
from ....core.contexts import above
from ....core.errors import LayoutError, MeshError, StrategyError, UsageError
from ....core.mesh import Mesh, auto
from ....core.tracebacks import boundary
from ...jit.argument_updates import Edit, Pending, Snapshot
from ...jit.jit import Jit
from ...math.create import ShardSpec
from ...record.local_view import NeedsRank, View, view_of
from ...record.operands import as_tensor
from ...record.parameter import Parameter, stand_ins
from ...record.recorder import Recorder, current, symbolic
from ...record.tree import LEAF, Path, call_paths, flatten, spec_paths, unflatten
from ...value.checks import mesh_or_none, signature_of
from ...value.host_data import is_array
from ...value.tensor import Tensor
from ..builtin_strategies import strategy as strategy_named
from ..per_rank.merge import record_ranks
from ..strategy import Combined, Strategy
from .boundary import Borders, by_name
from .collectives import recorder_now

P = ParamSpec("P")
R = TypeVar("R")


class Local(Generic[P, R]):
    """A function with a local body. The `.graph` of its `ts.jit` shows the collectives."""

    def __init__(
        self,
        fn: Callable[P, R],
        strategy: Strategy | None,
        axes: tuple[str, ...] | None,
        mesh: Mesh | None,
        layouts: Mapping[str, ShardSpec],
        batch: tuple[str, ...] | None,
        name: str,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.body, self.strategy, self.axes, self.mesh, self.layouts = (
            fn,
            strategy,
            axes,
            mesh,
            layouts,
        )
        self.batch = batch
        self._kind, self._signature = name, signature_of(name, fn)
        inside = functools.wraps(fn)(lambda *args, **kwargs: self._inside(args, kwargs))
        ours = str(getattr(fn, "__module__", "")).startswith(f"{__name__.partition('.')[0]}.")
        self._compiled: Jit[P, R] = Jit(inside, (), True, quiet=ours)
        takes = self._signature.parameters
        for said, names, more in (("layouts", layouts, ("return",)), ("batch", batch or (), ())):
            unknown = [k for k in names if k not in takes and k not in more]
            if unknown:
                raise UsageError(
                    f"{name}: {said} names {unknown[0]!r}, which {self._name} does not take",
                    arguments=", ".join(takes),
                    fix="name arguments" + ', or "return"' * bool(more),
                )

    @property
    def _name(self) -> str:
        return getattr(self.body, "__name__", "function")

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    @property
    def graph(self) -> Any:
        """The Graph of the last recording of a call outside any other function."""
        return self._compiled.graph

    @boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        recorder = current()
        if recorder is None:
            if settings().op_by_op and any(map(_on_tape, flatten((args, kwargs))[0])):
                raise UsageError(
                    f"{self._name}: a local body runs as a program of its own here, so no gradient"
                    " goes through it",
                    fix="differentiate it in a compiled function:"
                    " ts.jit(lambda x: ts.value_and_grad(f)(x))",
                )
            return self._compiled.at_once(*args, **kwargs)
        around = view_of(recorder)
        if around is not None:  # called inside a local body
            mesh = around.mesh
            local = [a for a in self._axes() or mesh.axes if a not in self._data()]
            more = [a for a in local if a not in around.axes]
            if any(mesh.sizes.get(a, 2) > 1 for a in more):
                raise UsageError(
                    f"{self._name}: it is local along {', '.join(map(repr, more))}, and the body"
                    " that calls it is not",
                    body=", ".join(around.axes),
                    fix="name these axes there, too: mesh_axes="
                    f"{(*around.axes, *more)!r}; or call it outside of that body",
                )
            return self.body(*args, **kwargs)
        return self._inside(args, kwargs)  # type: ignore[no-any-return]

    # -- one call ---------------------------------------------------------------------------------
    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records the body inside the current recording: arguments enter, as blocks along local
        axes, the body runs (once per rank, if it reads its rank as a number), and results and
        changed containers leave as whole tensors."""
        recorder = recorder_now()
        leaves, spec = flatten((args, kwargs))
        leaves = [as_tensor(x) if is_array(x) else x for x in leaves]
        names = call_paths(self._signature, spec)
        mesh = self._where([x for x in leaves if isinstance(x, Tensor)])
        view = self._view(mesh, recorder)
        whole = {p: x for p, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)}
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        parts = self.strategy.parts if self.strategy is not None else ()
        rows = Combined(tuple(p for p in parts if p.axis in self._data()))
        borders = Borders(self._name, self.strategy, self.layouts, self.batch, rows, view)
        types = {i: borders.on(x, names[i]) for i, x in tensors.items()}
        cut = borders.of_batch(leaves, names, types)
        blocks = list(leaves)
        laid = {i: borders.wanted(types[i], names[i], i in cut) for i in tensors}
        view.entered.extend(laid.values())
        for i, x in tensors.items():
            blocks[i] = borders.enter(recorder, x, laid[i])
        places = {}
        for full, path in zip(_full_paths(args, kwargs), names, strict=True):
            places[full] = path

        def body() -> Any:
            mine_args, mine_kwargs = unflatten(spec, stand_ins(leaves, blocks))
            before = Snapshot((mine_args, mine_kwargs))
            boxes = flatten((mine_args, mine_kwargs))[0]
            out = self.body(*mine_args, **mine_kwargs)
            edits, now = before.changes()
            here = recorder_now()  # the recorder of one rank, if recorded per rank
            first: dict[int, int] = {}  # a weight may have several names
            for i, box in enumerate(boxes):
                if type(box) is Parameter and type(leaves[i]) is Parameter:
                    first.setdefault(id(box), i)
            weights = {str(i): symbolic(here.node(boxes[i]), here) for i in first.values()}
            return {"out": out, "edits": edits, "leaves": now, "weights": weights}

        before, recorder.frame = recorder.frame, view
        mark = len(recorder.builder.nodes), len(recorder.host_outputs)
        try:
            with replaced(mesh=mesh):
                out = None
                with contextlib.suppress(NeedsRank):
                    out = body()
                if out is None:  # outside of the handler: errors do not chain to NeedsRank
                    _forget(recorder, mark)
                    out = self._by_ranks(
                        recorder,
                        view,
                        body,
                        dict(zip(_full_paths(args, kwargs), blocks, strict=True)),
                    )
        finally:
            recorder.frame = before
        given = [recorder.node(x) for x in blocks if isinstance(x, Tensor)]
        borders.check_reach(given, recorder.builder.nodes[mark[0] :])
        edits, put = out["edits"], out["leaves"]
        type_of = {names[i]: t for i, t in laid.items() if i not in cut}
        for i, path in enumerate(path for edit in edits for path in edit.paths()):
            if isinstance(put[i], Tensor):
                at = places.get(path, ())
                put[i] = borders.leave(recorder, put[i], path, whole.get(at), type_of.get(at))
        Pending(edits, put, (args, kwargs)).put()
        for at, x in out["weights"].items():
            i = int(at)
            if recorder.node(x) is not recorder.node(blocks[i]):
                leaves[i].put(borders.weight(recorder, x, names[i], leaves[i], laid[i]))
        results, made_spec = flatten(out["out"])
        for i, path in enumerate(spec_paths(made_spec)):
            if isinstance(x := results[i], Tensor):
                like = by_name(path, recorder.node(x).type, type_of, view.axes)
                results[i] = borders.leave(recorder, x, (), None, like)
        return unflatten(made_spec, results)

    def _by_ranks(
        self, recorder: Recorder, view: View, body: Callable[[], Any], before: dict[Path, Any]
    ) -> Any:
        """Records the body per rank. A value that only one rank puts into a container is put there
        for all: the other ranks take it from that rank."""

        def padded() -> Any:
            # Ranks may write different places, but must return one structure: all places.
            out = body()
            edits = out["edits"]
            paths = [path for edit in edits for path in edit.paths()]
            now = dict(zip(paths, out["leaves"], strict=True))
            set_to = {(*e.path, key): spec for e in edits for key, spec in e.set}
            return {
                "out": out["out"],
                "weights": out["weights"],
                "gone": [p for e in edits for k in e.gone if (p := (*e.path, k)) not in set_to],
                "now": {repr(p): now.get(p, x) for p, x in before.items()},
                "new": [repr(p) for p, s in set_to.items() if p not in before or s != LEAF],
            }

        old = {("now", repr(p)): x for p, x in before.items() if isinstance(x, Tensor)}
        merged = record_ranks(recorder, padded, old)
        edits, values = [], []
        by_text = {repr(p): p for p in before}
        for text, value in merged["now"].items():
            if value is not before[by_text[text]] and not _same(value, before[by_text[text]]):
                *path, key = by_text[text]
                edits.append(Edit(tuple(path), (), ((key, LEAF),)))
                values.append(value)
        if merged["new"]:
            raise UsageError(
                "a body that tells its ranks apart adds to its arguments",
                new=", ".join(merged["new"]),
                fix="return it instead",
            )
        edits += [Edit(tuple(path), (key,), ()) for *path, key in merged["gone"]]
        return {**{k: merged[k] for k in ("out", "weights")}, "edits": edits, "leaves": values}

    # -- the mesh and the axes --------------------------------------------------------------------
    def _where(self, tensors: Sequence[Tensor]) -> Mesh:
        given = self.mesh or next((t.mesh for t in tensors if t.mesh is not None), None)
        mesh = given or settings().mesh
        if mesh is not None:
            return mesh
        axes = self._axes()
        if len(axes) == 1:
            return auto(axes)
        raise MeshError(
            f"{self._name}: there is no mesh to distribute over",
            axes=", ".join(axes) or "those of the mesh",
            fix="pass mesh=..., place a tensor on one, or say: with mesh:",
        )

    def _axes(self) -> tuple[str, ...]:
        if self.axes is not None:
            return self.axes
        return tuple(dict.fromkeys(p.axis for p in self.strategy.parts)) if self.strategy else ()

    def _data(self) -> tuple[str, ...]:
        """The data axes of the strategy, among the axes of the body."""
        parts, axes = self.strategy.parts if self.strategy is not None else (), self._axes()
        return tuple(p.axis for p in parts if p.splits_batch and p.axis in axes)

    def _view(self, mesh: Mesh, recorder: Recorder) -> View:
        """The view of a device on `mesh`: the data axes are global, or local if the body reads its
        rank along them. Raises MeshError if an axis of the body does not exist."""
        axes = self._axes() or mesh.axes
        lost = [a for a in axes if a not in mesh]
        if lost:
            raise MeshError(
                f"{self._name}: axis {lost[0]!r} is not an axis of the mesh",
                mesh=mesh.text(),
                fix="name axes of the mesh: mesh_axes=[...]",
            )
        data, outer = self._data(), recorder.frame
        local = data if self in recorder.root.local else ()
        own = tuple(a for a in mesh.axes if a in axes and a not in data)
        parts = self.strategy.parts if self.strategy is not None else ()
        columns = any(p.axis in own and not p.splits_batch for p in parts) and not local
        return View(
            mesh,
            tuple(a for a in mesh.axes if a in own or a in local),
            tuple(a for a in data if a not in local),
            own if parts else (),
            -1 if columns else 0,
            self,
            outer=outer.outer if isinstance(outer, View) else outer,
            rests=functools.partial(self.strategy.optimizer, "") if self.strategy else None,
        )


def _full_paths(args: Any, kwargs: Any) -> list[Path]:
    return spec_paths(flatten((args, kwargs))[1])


def _on_tape(x: Any) -> bool:
    """Returns whether a gradient may be taken through `x`."""
    made = (
        isinstance(x, Tensor) and x.dtype.is_float and (x.of is not None or x._history is not None)
    )
    return made and not (x._past is not None and x._past.stopped)


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a._node is b._node


def _forget(recorder: Recorder, mark: tuple[int, int]) -> None:
    """Removes the nodes recorded since `mark`, except for inputs."""
    b, (at, host_outputs) = recorder.builder, mark
    del recorder.host_outputs[host_outputs:]
    kept = b.nodes[:at] + [n for n in b.nodes[at:] if n.op == "input"]
    here = set(kept)
    b.nodes = kept
    b._moved = {k: v for k, v in b._moved.items() if k[0] in here and v in here}


# -- the decorators -------------------------------------------------------------------------------
def _strategy(
    strategy: str | Strategy | None, axes: tuple[str, ...], layouts: Mapping[str, ShardSpec]
) -> Strategy | None:
    """Returns `strategy` as an object. A name means the strategy over the axes of the body, without
    the axes that `layouts` use; its default axis is always included. Raises StrategyError if no
    axis is left."""
    if strategy is None or isinstance(strategy, Strategy):
        return strategy
    usual = strategy_named(strategy)
    if not axes:
        return usual
    own = {a for said in layouts.values() for a in said.mesh_axes if len(axes) > 1}
    over = [a for a in axes if a not in own or a in {p.axis for p in usual.parts}]
    if not over:
        raise StrategyError(
            f"distribute: over which axis does {strategy!r} go? layouts cut arguments over all",
            mesh_axes=", ".join(axes),
            fix=f"name its axis: strategy=dist.strategy({strategy!r}, axis={axes[0]!r})",
        )
    return Combined(tuple(p for a in over for p in strategy_named(strategy, a).parts))


def distribute(
    fn: Any = None,
    /,
    *,
    strategy: str | Strategy | None = None,
    mesh_axes: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
    layouts: Mapping[str, ShardSpec] | None = None,
    batch: str | Sequence[str] | None = None,
) -> Any:
    """A decorator: the arguments are laid out by a strategy or by `layouts`, and the body is
    recorded on the mesh.

    `strategy` is "data_parallel", "tensor_parallel", "zero_redundancy_optimizer" or a sum of
    strategies. Its data axes are global: the body gets whole tensors whose rows are split over
    them, so a loss, its gradient and state are those of the whole batch. Parameters, named tensors
    and tensors on a mesh keep their layout; of the other tensors, those with as many rows as the
    first are split. `batch` names the arguments that are split instead. This changes the speed,
    never a value. `layouts` gives the ShardSpec of an argument by name, and that of the result as
    "return".

    All other axes of the body are local: it gets one device's blocks, as tensor parallelism and
    `layouts` split them. The data axes are local too in a body that reads its rank: there all
    tensors are whole except for those of `batch`. `mesh_axes` are the axes of the body (default:
    those of the strategy, or all). A strategy given by name is over all of them, except for axes in
    `layouts`, unless such an axis is the strategy's default ("dp", "tp").

    A result that is equal on all devices is one value; blocks along local axes are joined along dim
    0 (along the last dim if the body is tensor parallel).

    Raises UsageError if `batch` or `layouts` names an argument that does not exist; MeshError if
    there is no mesh or it lacks an axis; LayoutError or ShapeError if an argument cannot be split
    so; StrategyError if `layouts` leave no axis to a strategy's name.

    >>> import tessera as ts
    >>> @ts.distribute(strategy="data_parallel")
    ... def step(batch, weights):
    ...     loss = ((batch @ weights["w"]) ** 2).mean()
    ...     return loss, ts.grad(loss, weights)
    >>> with ts.dist.Mesh(("dp",), devices=4):
    ...     loss, grads = step(ts.ones((8, 2)), {"w": ts.ones((2, 1))})
    >>> loss.item(), grads["w"].numpy().tolist()
    (4.0, [[4.0], [4.0]])
    """
    axes = None if mesh_axes is None else axes_of("distribute", mesh_axes)
    where = mesh_or_none("distribute", mesh)
    layouts_given = layouts or {}
    rows = layouts_given.items() if isinstance(layouts_given, Mapping) else [(None, layouts_given)]
    if wrong := [(n, v) for n, v in rows if n is None or not isinstance(v, ShardSpec)]:
        name, value = wrong[0]
        argument = "layouts" if name is None else f"layouts[{name!r}]"
        fix = 'give {"x": dist.ShardSpec(("row",), ("dp",))}'
        raise unfit("distribute", argument, value, fix, LayoutError)
    chosen = _strategy(strategy, axes or (), layouts or {})
    names = (batch,) if isinstance(batch, str) else batch
    if names is not None and (
        not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names)
    ):
        raise unfit("distribute", "batch", batch, 'name arguments, such as batch="images"')
    if names is not None and chosen is None:
        raise UsageError(
            "distribute: batch= is cut by a strategy, and there is none",
            fix='give strategy="data_parallel" too, or layouts=',
        )

    def wrap(f: Callable[P, R]) -> Local[P, R]:
        fix = 'give a function; the strategy comes by name: strategy="data_parallel"'
        function_of("distribute", "what is distributed", f, fix)
        said = None if names is None else tuple(names)
        return Local(f, chosen, axes, where, layouts or {}, said, "distribute")

    return above("ts.distribute", wrap) if fn is None else wrap(fn)


@overload
def kernel(fn: Callable[P, R], /) -> Local[P, R]: ...
@overload
def kernel(
    *, mesh_axes: str | Sequence[str] | None = None, mesh: Mesh | None = None
) -> Callable[[Callable[P, R]], Local[P, R]]: ...
def kernel(
    fn: Any = None,
    /,
    *,
    mesh_axes: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """A decorator: the body gets one device's blocks of its arguments in their layouts (guide 3,
    4.3).

    There is no strategy: each argument keeps its layout, and a replicated one is whole in the body.
    Returned blocks are joined along dim 0, for any split of the arguments; a block in a dict under
    an argument's name is joined as that argument is split. Raises the errors of `distribute`, and
    ShapeError if a returned number differs between devices.

    >>> from tessera import dist, op
    >>> @op.kernel
    ... def total(x):
    ...     return dist.allreduce(x.sum(), axis="dp")
    >>> import tessera as ts
    >>> with dist.Mesh(("dp",), devices=4):
    ...     total(ts.tensor([1.0, 2.0, 3.0, 4.0], layout="[4@dp]")).item()
    10.0
    """
    return distribute(fn, mesh_axes=mesh_axes, mesh=mesh)
