"""`@ts.distribute` and `@op.kernel`: functions whose body is what one device does with its blocks.

A strategy says how the arguments are cut into blocks and what is made of the results. The body is
recorded once, with a symbol for the rank, into the same graph as everything else; only if it asks
for the rank as a number is it recorded per rank (lang/local/ranks.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from ...core.context import replaced, settings
from ...core.errors import LayoutError, MeshError, ShapeError, UsageError, fail
from ...core.layout import TensorType
from ...core.mesh import Mesh, auto
from ...core.reshard import gathered
from ...ir.graph.node import Node
from ...ops.local import as_local, joined
from ..checks import axes_of, function_of, mesh_or_none, shown, signature_of
from ..collectives import split_over
from ..create import ShardSpec
from ..jit import Jit
from ..record import Recorder, current
from ..strategy import Plan, Strategy, holds_weights
from ..strategy import strategy as strategy_named
from ..tensor import Tensor, as_tensor, symbolic
from ..tree import Path, call_paths, flatten, path_name, unflatten
from ..writes import changes, put, remove, snapshot
from .merge import record_ranks
from .view import NeedsRank, View

P = ParamSpec("P")
R = TypeVar("R")


class Local(Generic[P, R]):
    """A function with a local body. `.graph` of what `ts.jit` makes of it shows the collectives."""

    def __init__(
        self,
        fn: Callable[P, R],
        plan: Plan | None,
        axes: tuple[str, ...] | None,
        mesh: Mesh | None,
        layouts: Mapping[str, ShardSpec],
        name: str,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.body, self.plan, self.axes, self.mesh, self.layouts = fn, plan, axes, mesh, layouts
        self._kind, self._signature = name, signature_of(name, fn)
        inside = functools.wraps(fn)(lambda *args, **kwargs: self._inside(args, kwargs))
        self._compiled: Jit[P, R] = Jit(inside, (), True)
        unknown = [k for k in layouts if k not in self._signature.parameters and k != "return"]
        if unknown:
            raise fail(
                UsageError,
                f"{name}: layouts names {unknown[0]!r}, which {self._name} does not take",
                [("arguments", ", ".join(self._signature.parameters))],
                fix='name arguments, or "return"',
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

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        recorder = current()
        if recorder is None:
            return self._compiled(*args, **kwargs)
        if recorder.view is not None:  # a part of a body that is local already
            return self.body(*args, **kwargs)
        return self._inside(args, kwargs)  # type: ignore[no-any-return]

    # -- one call ---------------------------------------------------------------------------------
    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = current()
        assert recorder is not None
        leaves, spec = flatten((args, kwargs))
        leaves = [as_tensor(x) if isinstance(x, np.ndarray) else x for x in leaves]
        names = call_paths(self._signature, spec)
        mesh = self._where([x for x in leaves if isinstance(x, Tensor)])
        view = self._view(mesh)
        whole = {p: x for p, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)}
        blocks = [
            self._enter(recorder, x, path, view) if isinstance(x, Tensor) else x
            for x, path in zip(leaves, names, strict=True)
        ]
        places = {}
        for full, path in zip(_full_paths(args, kwargs), names, strict=True):
            places[full] = path

        def body() -> Any:
            mine_args, mine_kwargs = unflatten(spec, blocks)
            before = snapshot((mine_args, mine_kwargs))
            out = self.body(*mine_args, **mine_kwargs)
            writes, removed = changes(before, (mine_args, mine_kwargs))
            return {"out": out, "writes": [list(w) for w in _split(writes)], "removed": removed}

        recorder.view = view
        mark = len(recorder.builder.nodes), len(recorder.taps)
        try:
            with replaced(mesh=mesh):
                try:
                    out = body()
                except NeedsRank:
                    _forget(recorder, mark)
                    out = self._by_ranks(
                        recorder,
                        view,
                        body,
                        dict(zip(_full_paths(args, kwargs), blocks, strict=True)),
                    )
        finally:
            recorder.view = None
        (paths, values), removed = out["writes"], out["removed"]
        for path, value in zip(paths, values, strict=True):
            like = whole.get(places.get(tuple(path), ()))
            if isinstance(value, Tensor):
                value = self._leave(recorder, value, tuple(path), view, like)
            put((args, kwargs), tuple(path), value)
        for path in removed:
            remove((args, kwargs), tuple(path))
        made, made_spec = flatten(out["out"])
        ends = [
            self._leave(recorder, x, (), view, None) if isinstance(x, Tensor) else x for x in made
        ]
        return unflatten(made_spec, ends)

    def _by_ranks(
        self, recorder: Recorder, view: View, body: Callable[[], Any], before: dict[Path, Any]
    ) -> Any:
        """The body recorded per rank. What only one rank puts into a container is put there: the
        others, which left it as it was, take it from that rank."""

        def padded() -> Any:
            # Every rank hands back every place that any rank may have written.
            out = body()
            paths, values = out["writes"]
            now = dict(zip(map(tuple, paths), values, strict=True))
            return {
                "out": out["out"],
                "removed": out["removed"],
                "now": {repr(p): now.get(p, x) for p, x in before.items()},
                "new": {repr(p): v for p, v in now.items() if p not in before},
            }

        old = {("now", repr(p)): x for p, x in before.items() if isinstance(x, Tensor)}
        merged = record_ranks(recorder, padded, old)
        paths, values = [], []
        by_text = {repr(p): p for p in before}
        for text, value in merged["now"].items():
            if value is not before[by_text[text]] and not _same(value, before[by_text[text]]):
                paths.append(by_text[text])
                values.append(value)
        if merged["new"]:
            raise fail(
                UsageError,
                "a body that tells its ranks apart adds to its arguments",
                [("new", ", ".join(merged["new"]))],
                fix="return it instead",
            )
        return {"out": merged["out"], "writes": [paths, values], "removed": merged["removed"]}

    # -- the mesh and the axes --------------------------------------------------------------------
    def _where(self, tensors: Sequence[Tensor]) -> Mesh:
        given = self.mesh or next((t.mesh for t in tensors if t.mesh is not None), None)
        mesh = given or settings().mesh
        if mesh is not None:
            return mesh
        axes = self._axes()
        if len(axes) == 1:
            return auto(axes)
        raise fail(
            MeshError,
            f"{self._name}: there is no mesh to distribute over",
            [("axes", ", ".join(axes) or "those of the mesh")],
            fix="pass mesh=..., place a tensor on one, or say: with mesh:",
        )

    def _axes(self) -> tuple[str, ...]:
        if self.axes is not None:
            return self.axes
        return tuple(dict.fromkeys(p.axis for p in self.plan.parts)) if self.plan else ()

    def _view(self, mesh: Mesh) -> View:
        axes = self._axes() or mesh.axes
        lost = [a for a in axes if a not in mesh]
        if lost:
            raise fail(
                MeshError,
                f"{self._name}: axis {lost[0]!r} is not an axis of the mesh",
                [("mesh", mesh.text())],
                fix="name axes of the mesh: mesh_axes=[...]",
            )
        parts = self.plan.parts if self.plan is not None else ()
        tensor_axes = {p.axis for p in parts if p.kind == "tensor_parallel"}
        batch = tuple(a for a in axes if parts and a not in tensor_axes)
        return View(
            mesh,
            tuple(a for a in mesh.axes if a in axes),
            batch,
            -1 if tensor_axes and not batch else 0,
        )

    # -- arguments and results --------------------------------------------------------------------
    def _enter(self, recorder: Recorder, x: Tensor, path: Path, view: View) -> Tensor:
        """This device's block of the argument `x`."""
        t = x.type.on(view.mesh) if x.type.mesh is None else x.type
        if t.mesh != view.mesh:
            raise fail(
                MeshError,
                f"{self._name}: argument {path_name(path)!r} lies on another mesh",
                [("argument", f"{t} on {t.mesh.text() if t.mesh else 'none'}"),
                 ("here", view.mesh.text())],
                fix="put all arguments on one mesh",
            )  # fmt: skip
        t = t.complete()
        want = self._wanted(t, x, path, view)
        node = recorder.builder.redistribute(recorder.node(x), want)
        local = as_local(want, view.axes)
        if local is not want:
            node = recorder.builder("recast", node, layout=local)
        block = symbolic(node, recorder)
        block.name = x.name
        if x.name:
            recorder.named.append(block)
        return block

    def _wanted(self, t: TensorType, x: Tensor, path: Path, view: View) -> TensorType:
        spec = self.layouts.get(str(path[0])) if path else None
        if spec is not None:
            bare = gathered(t, view.axes)
            return self._along(bare, spec, view)
        if self.plan is None:
            return t
        if not holds_weights(x.name, path):
            here = set(view.axes) & set(t.split_axes)
            return t if here else _batched(t, view)
        tp = [p for p in self.plan.parts if p.kind == "tensor_parallel" and p.axis in view.axes]
        t = gathered(t, [a for a in view.axes if a not in {p.axis for p in tp}])
        return Plan(tuple(tp)).weight(path_name(path), t) if tp else t

    def _along(self, t: TensorType, spec: ShardSpec, view: View) -> TensorType:
        cut = spec.type(t.shape, t.dtype, view.mesh)
        for d, dim in enumerate(cut.dims):
            axes = [a for f in dim for a in f.axes if a not in t.split_axes]
            if axes:
                t = split_over(t, d, axes)
        return t

    def _leave(
        self, recorder: Recorder, x: Tensor, path: Path, view: View, like: Tensor | None
    ) -> Tensor:
        """The global value of the result `x`."""
        node = recorder.node(x)
        t = node.type
        own = [a for a in view.axes if a in t.per]
        home = like.type if like is not None and like.shape else None
        if home is not None and home.mesh is not None and t.shape == home.shape and not own:
            return symbolic(recorder.builder.redistribute(node, home.complete()), recorder)
        if home is not None and own and as_local(home, view.axes) is t:
            return symbolic(recorder.builder("recast", node, layout=home), recorder)
        if not own:
            return symbolic(node, recorder)
        spec = self.layouts.get("return") if not path else None
        if spec is not None:
            return self._returned(recorder, node, spec, view)
        means = [a for a in own if a in view.batch]
        if not t.rank and means and t.dtype.is_float:
            out = _mean(recorder, node, means)
            own = [a for a in own if a not in means]
            node, t = out, out.type
        if own and not t.rank:
            raise fail(
                ShapeError,
                f"{self._name}: it returns a number that differs between devices",
                [("result", t), *([("made at", node.loc)] if node.loc else [])],
                fix="combine it first: dist.all_reduce(x, axis), or reshape it to (1,)",
            )
        first = [a for a in own if a in view.batch or view.dim == 0]
        for axes, dim in ((first, 0), ([a for a in own if a not in first], t.rank - 1)):
            if axes:
                t = joined(t, axes, dim)
        return symbolic(recorder.builder("recast", node, layout=t) if own else node, recorder)

    def _returned(self, recorder: Recorder, node: Node, spec: ShardSpec, view: View) -> Tensor:
        t = node.type
        cut = spec.type(t.shape, t.dtype, view.mesh)
        for d, dim in enumerate(cut.dims):
            axes = [a for f in dim for a in f.axes if a in t.per]
            if axes:
                t = joined(t, axes, d)
        left = [a for a in t.per if a in view.axes]
        if left:
            raise fail(
                LayoutError,
                f"{self._name}: the layout of its result does not say where {left[0]!r} goes",
                [("result", node.type)],
                fix=f"name {left[0]!r} in the ShardSpec, or combine the value over it first",
            )
        return symbolic(recorder.builder("recast", node, layout=t), recorder)


def _batched(t: TensorType, view: View) -> TensorType:
    axes = [a for a in view.batch if a not in t.split_axes]
    return split_over(t, 0, axes) if axes and t.rank else t


def _mean(recorder: Recorder, node: Node, axes: Sequence[str]) -> Node:
    t = node.type
    n = 1
    for a in axes:
        n *= t.sizes[a]
    scaled = recorder.node(symbolic(node, recorder) * (1.0 / n))
    partial = (*t.partial, *((a, "sum") for a in axes))
    to = TensorType(t.dtype, t.dims, partial, t.mesh, (a for a in t.per if a not in axes))
    made = recorder.builder("recast", scaled, layout=to)
    done = to.with_partial(t.partial)
    return recorder.builder.redistribute(made, done, "the mean of the devices' results")


def _full_paths(args: Any, kwargs: Any) -> list[Path]:
    return list(snapshot((args, kwargs)))


def _split(writes: Sequence[tuple[Path, Any]]) -> tuple[list[Path], list[Any]]:
    return [p for p, _ in writes], [v for _, v in writes]


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a._node is b._node


def _forget(recorder: Recorder, mark: tuple[int, int]) -> None:
    """Takes back what was recorded since `mark`, but for inputs."""
    b, (at, taps) = recorder.builder, mark
    del recorder.taps[taps:]
    kept = b.nodes[:at] + [n for n in b.nodes[at:] if n.op == "input"]
    here = set(kept)
    b.nodes = kept
    b._moved = {k: v for k, v in b._moved.items() if k[0] in here and v in here}


# -- the decorators -------------------------------------------------------------------------------
def _plan(name: str, strategy: Any, axes: tuple[str, ...] | None) -> Plan | None:
    if strategy is None:
        return None
    if isinstance(strategy, (Plan, Strategy)):
        return strategy if isinstance(strategy, Plan) else Plan((strategy,))
    if not axes:
        return strategy_named(strategy)
    parts = [p for a in axes for p in strategy_named(strategy, a).parts]
    return Plan(tuple(parts))


def distribute(
    fn: Any = None,
    /,
    *,
    strategy: str | Plan | Strategy | None = None,
    mesh_axes: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
    layouts: Mapping[str, ShardSpec] | None = None,
) -> Any:
    """A function whose body is what one device does: tensors are its blocks, collectives literal.

    `strategy` is "data_parallel", "tensor_parallel", "zero_redundancy_optimizer" or a plan. It cuts
    the arguments: batches along dim 0 over its data axes, weights (arguments called weights, bias,
    w_..., and tensors with names) as tensor parallelism says. What lies split over the axes
    already, stays so. `layouts` says it by argument, and for the result as "return". `mesh_axes`
    are the axes that are local (default: those of the strategy, or all).

    A loss means its mean over the data axes: `ts.grad` inside the body gives gradients averaged
    over them. Results: what all devices hold alike is one value, a number is averaged over data
    axes, blocks are joined along dim 0 (in a body that is tensor parallel along the last dim).
    Raises MeshError, LayoutError, ShapeError, UsageError.

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
    plan = _plan("distribute", strategy, axes)
    where = mesh_or_none("distribute", mesh)
    if layouts is not None and (
        not isinstance(layouts, Mapping)
        or not all(isinstance(v, ShardSpec) for v in layouts.values())
    ):
        raise fail(
            LayoutError,
            f"distribute: layouts cannot be {shown(layouts)}",
            fix='give {"x": dist.ShardSpec(("row",), ("dp",))}',
        )

    def wrap(f: Callable[P, R]) -> Local[P, R]:
        function_of("distribute", "what is distributed", f)
        return Local(f, plan, axes, where, layouts or {}, "distribute")

    return wrap if fn is None else wrap(fn)


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
    """A function whose body sees one device's blocks of tensors as they lie (guide 3, 4.3).

    No strategy: arguments keep their layout, what is replicated is whole in the body. Blocks that
    it returns are joined along dim 0. Raises as `distribute`.

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
