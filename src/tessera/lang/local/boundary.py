"""How does a value enter a local body, and how does it leave it? As blocks, cut and joined by a
strategy or by the layouts that were said."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ...core.errors import LayoutError, MeshError, ShapeError, StrategyWarning, fail, lines_up
from ...core.layout import TensorType
from ...core.reshard import gathered
from ...ir.graph.node import Node
from ...ops.local import as_local, axis_index, joined
from ..collectives import split_over
from ..create import ShardSpec
from ..parameter import Parameter
from ..record import Recorder, symbolic
from ..strategy import AxisStrategy, Combined, Strategy
from ..tensor import Tensor
from ..tree import Path, path_name
from .averages import check_mean
from .view import View, mean_of


@dataclass(frozen=True)
class Borders:
    """Of one call of the function `name`, seen as `view` says."""

    name: str
    strategy: Strategy | None
    layouts: Mapping[str, ShardSpec]
    batch: tuple[str, ...] | None  # the arguments that hold it, where that was said
    view: View

    @property
    def on_the_same_rows(self) -> list[AxisStrategy]:
        parts = self.strategy.parts if self.strategy is not None else ()
        return [p for p in parts if not p.splits_batch and p.axis in self.view.axes]

    def check_reach(self, blocks: Iterable[Node], made: Iterable[Node]) -> None:
        """One StrategyWarning where along an axis that splits no batch nothing is cut that the body
        is given or takes from outside, and nothing in it, `made` there, asks for the rank."""
        every = {a for n in blocks for a in n.type.varying}
        for n in made:
            every.update(n.types[0].varying if n.op == axis_index.name else ())
            every.update(a for arg in n.args for t in arg.types for a in t.split_axes)
        idle = {*self.view.axes} - {*self.view.batch} - every if self.strategy is not None else ()
        for axis in sorted(a for a in idle if self.view.mesh.sizes[a] > 1):
            warnings.warn(
                f"{self.name}: {axis!r} cuts none of the arguments, so all devices along it do the"
                ' same\n  say what it cuts: layouts={"w": dist.ShardSpec(("col",),'
                f" ({axis!r},))}}, rules= of tensor parallelism for the names of weights, or a"
                " strategy that splits the batch over it",
                StrategyWarning,
                stacklevel=lines_up(),
            )

    def on(self, x: Tensor, path: Path) -> TensorType:
        """The type of the argument `x` on the mesh."""
        t = x.type.on(self.view.mesh) if x.type.mesh is None else x.type
        if t.mesh != self.view.mesh:
            raise fail(
                MeshError,
                f"{self.name}: argument {path_name(path)!r} lies on another mesh",
                [("argument", f"{t} on {t.mesh.text() if t.mesh else 'none'}"),
                 ("here", self.view.mesh.text())],
                fix="put all arguments on one mesh",
            )  # fmt: skip
        return t.complete()

    def enter(self, recorder: Recorder, x: Tensor, want: TensorType) -> Tensor:
        """This device's block of the argument `x`, which is laid as `want` first."""
        came = recorder.node(x)
        node = recorder.builder.redistribute(came, want)
        if node is not came:
            self.view.came[node] = came
        local = as_local(want, self.view.axes)
        if local is not want:
            node = recorder.builder("reinterpret", node, layout=local)
        block = symbolic(node, recorder)
        block.name = x.name
        if x.name:
            recorder.named.append(block)
        return block

    def wanted(self, t: TensorType, path: Path, batch: bool) -> TensorType:
        """How an argument of type `t` is laid, a `batch` or a weight."""
        spec = self.layouts.get(str(path[0])) if path else None
        if spec is not None:
            bare = gathered(t, self.view.axes)
            return self._along(bare, spec)
        if self.strategy is None:
            return t
        if batch:
            here = set(self.view.axes) & set(t.split_axes)
            return t if here else _batched(t, self.view)
        tp = self.on_the_same_rows
        t = gathered(t, [a for a in self.view.axes if a not in {p.axis for p in tp}])
        return Combined(tuple(tp)).weight(path_name(path), t) if tp else t

    def _along(self, t: TensorType, spec: ShardSpec) -> TensorType:
        cut = spec.type(t.shape, t.dtype, self.view.mesh)
        for d, dim in enumerate(cut.dims):
            axes = [a for f in dim for a in f.axes if a not in t.split_axes]
            if axes:
                t = split_over(t, d, axes)
        return t

    def leave(
        self,
        recorder: Recorder,
        x: Tensor,
        path: Path,
        like: Tensor | None,
        laid: TensorType | None = None,
    ) -> Tensor:
        """The global value of the result `x`; `laid` is how that is laid whose blocks have its
        name, such as a weight for its gradient."""
        node = recorder.node(x)
        t = node.type
        own = [a for a in self.view.axes if a in t.varying]
        home = like.type if like is not None and like.shape else None
        if t.rest and not (home is not None and home.split_axes):
            return symbolic(node, recorder)  # state that one rank alone works on (owned.py)
        if home is not None and home.mesh is not None and t.shape == home.shape and not own:
            return symbolic(recorder.builder.redistribute(node, home.complete()), recorder)
        if home is not None and own and as_local(home, self.view.axes) is t:
            return symbolic(recorder.builder("reinterpret", node, layout=home), recorder)
        if not own:
            return symbolic(node, recorder)
        state = like is not None and not isinstance(like, Parameter) and not like.name
        if state and home is not None and home.shape == t.shape and self.view.averages(t):
            return symbolic(mean_of(recorder, node, own), recorder)  # such as running statistics
        spec = self.layouts.get("return") if not path else None
        if spec is not None:
            return self._returned(recorder, node, spec)
        if laid is not None and as_local(laid, self.view.axes) is t:
            return symbolic(recorder.builder("reinterpret", node, layout=laid), recorder)
        means = [a for a in own if a in self.view.batch]
        if not t.rank and means and t.dtype.is_float:
            check_mean(node, means, self.view.told)
            out = mean_of(recorder, node, means)
            own = [a for a in own if a not in means]
            node, t = out, out.type
        if own and not t.rank:
            raise fail(
                ShapeError,
                f"{self.name}: it returns a number that differs between devices",
                [("result", t), *([("made at", node.loc)] if node.loc else [])],
                fix="combine it first: dist.all_reduce(x, axis), or reshape it to (1,)",
            )
        if own:
            node = recorder.builder("reinterpret", node, layout=self._whole(node, own))
        return symbolic(node, recorder)

    def _whole(self, block: Node, own: Sequence[str]) -> TensorType:
        """The type of the whole of which each device along the axes `own` has a `block`. Raises
        LayoutError if the arguments' blocks lie in an order of their own that says nothing of it.
        """
        whole, odd = self.view.joined(block.type, own)
        if odd is None:
            return whole
        raise fail(
            LayoutError,
            f"{self.name}: in which order do the devices' blocks of a result follow each other?",
            [("result", block.type), *([("made at", block.loc)] if block.loc else []),
             ("an argument", f"{odd}, which is not in the order of the devices")],
            fix='say it: layouts={"return": dist.ShardSpec(...)}; or lay the argument so that'
            f" {', '.join(own)} split it in this order, before all others",
        )  # fmt: skip

    def weight(
        self, recorder: Recorder, x: Tensor, path: Path, box: Tensor, laid: TensorType
    ) -> Tensor:
        """The global value of what a body puts into the weight `box`. Raises ShapeError if it
        would be another weight: one with a block from each device."""
        new = self.leave(recorder, x, path, box, laid)
        if new.shape != box.shape:
            raise fail(
                ShapeError,
                f"{self.name}: a weight is set to what differs between devices",
                [("weight", f"{path_name(path)} {box.type}"), ("each device has", x.type),
                 *([("made at", loc)] if (loc := recorder.node(x).loc) else [])],
                fix="combine it first: dist.all_reduce(x, axis), or dist.broadcast(x, axis, root)",
            )  # fmt: skip
        return new

    def _returned(self, recorder: Recorder, node: Node, spec: ShardSpec) -> Tensor:
        """The result `node` as `spec` lays it out. Raises LayoutError if an axis is left along
        which the devices' values differ."""
        t = node.type
        cut = spec.type(t.shape, t.dtype, self.view.mesh)
        for d, dim in enumerate(cut.dims):
            axes = [a for f in dim for a in f.axes if a in t.varying]
            if axes:
                t = joined(t, axes, d)
        left = [a for a in t.varying if a in self.view.axes]
        if left:
            raise fail(
                LayoutError,
                f"{self.name}: the layout of its result does not say where {left[0]!r} goes",
                [("result", node.type)],
                fix=f"name {left[0]!r} in the ShardSpec, or combine the value over it first",
            )
        return symbolic(recorder.builder("reinterpret", node, layout=t), recorder)


def by_name(
    path: Path, block: TensorType, laid: Mapping[Path, TensorType], axes: Sequence[str]
) -> TensorType | None:
    """How the argument is laid whose blocks along `axes` are cut and have the type `block`, and
    whose path ends as `path` does for the longest; None where there is no such one, or several."""
    found: dict[int, set[TensorType]] = defaultdict(set)
    for other, t in laid.items():
        if t is not block and as_local(t, axes) is block:
            pairs = zip(reversed(path), reversed(other), strict=False)
            same = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            if any(isinstance(a, str) for a in same):
                found[len(same)].add(t)
    best = found[max(found)] if found else set()
    return next(iter(best)) if len(best) == 1 else None


def _batched(t: TensorType, view: View) -> TensorType:
    axes = [a for a in view.batch if a not in t.split_axes]
    return split_over(t, 0, axes) if axes and t.rank else t
