"""Layouts of values that enter and leave a local body, by a strategy or by `layouts=`."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ....core.errors import LayoutError, MeshError, ShapeError, StrategyWarning, lines_up
from ....core.layout import TensorType
from ....core.reshard import gathered
from ....ir.graph.node import Node
from ....ops.local import as_local, axis_index, joined
from ...math.create import ShardSpec
from ...record.local_view import View
from ...record.parameter import Parameter
from ...record.recorder import Recorder, symbolic
from ...record.tree import Path, path_name
from ...value.tensor import Tensor
from ..collectives import split_over
from ..strategy import Combined, Strategy


@dataclass(frozen=True)
class Borders:
    """The arguments and results of one call of the function `name`, whose local body has the
    `view`."""

    name: str
    strategy: Strategy | None
    layouts: Mapping[str, ShardSpec]
    batch: tuple[str, ...] | None  # the arguments of `batch=`, or None
    data: Strategy  # the part of `strategy` over the data axes
    view: View

    def of_batch(
        self, leaves: Sequence[Any], paths: Sequence[Path], types: Mapping[int, TensorType]
    ) -> frozenset[int]:
        """The indices of the tensors whose rows are split over the data axes: those of `batch=`;
        else the tensors without a layout that have as many rows as the first of them. In a body
        that is local along the data axes only `batch=` counts."""
        if not self.data.parts:
            return frozenset()
        if self.batch is not None:
            return frozenset(i for i in types if str(paths[i][0]) in self.batch)
        rows = {
            i: t.shape[0] for i, t in types.items()
            if self.view.data and t.rank and t.shape[0] > 1
            and not _placed(leaves[i]) and str(paths[i][0]) not in self.layouts
        }  # fmt: skip
        first = next(iter(rows.values()), 0)
        return frozenset(i for i, n in rows.items() if n == first)

    def check_reach(self, blocks: Iterable[Node], nodes: Iterable[Node]) -> None:
        """Gives one StrategyWarning for each axis along which no argument or outer tensor
        (`blocks`) is split, and no node of the body (`nodes`) reads the rank."""
        every = {a for n in blocks for a in (*n.type.varying, *n.type.split_axes)}
        for n in nodes:
            every.update(n.types[0].varying if n.op == axis_index.name else ())
            every.update(a for arg in n.args for t in arg.types for a in t.split_axes)
        data = {p.axis for p in self.data.parts}
        axes = {*self.view.axes, *self.view.data} - (set() if self.batch is None else data)
        idle = axes - every if self.strategy is not None else ()
        for axis in sorted(a for a in idle if self.view.mesh.sizes[a] > 1):
            say = 'name the batch: batch="x"; batch=() for none'
            if axis not in data:
                say = (
                    f'say what it cuts: layouts={{"w": dist.ShardSpec(("col",), ({axis!r},))}},'
                    " rules= of tensor parallelism for the names of weights, or a strategy that"
                    " splits the batch over it"
                )
            warnings.warn(
                f"{self.name}: {axis!r} cuts none of the arguments, so all devices along it do the"
                f" same\n  {say}",
                StrategyWarning,
                stacklevel=lines_up(),
            )

    def on(self, x: Tensor, path: Path) -> TensorType:
        """Returns the type of the argument `x` on the mesh. Raises MeshError if it lies on another
        mesh."""
        t = x.type.on(self.view.mesh) if x.type.mesh is None else x.type
        if t.mesh != self.view.mesh:
            raise MeshError(
                f"{self.name}: argument {path_name(path)!r} lies on another mesh",
                argument=f"{t} on {t.mesh.text() if t.mesh else 'none'}",
                here=self.view.mesh.text(),
                fix="put all arguments on one mesh",
            )
        return t.complete()

    def enter(self, recorder: Recorder, x: Tensor, want: TensorType) -> Tensor:
        """Returns this device's block of the argument `x`, laid out as `want` first."""
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
            recorder.named_inputs.append(block)
        return block

    def wanted(self, t: TensorType, path: Path, batch: bool) -> TensorType:
        """Returns the layout of an argument of type `t`: a `batch` or a weight."""
        spec = self.layouts.get(str(path[0])) if path else None
        axes = (*self.view.axes, *self.view.data)
        if spec is not None:
            return self._along(gathered(t, axes), spec)
        if self.strategy is None:
            return t
        if batch:
            return self.data.batch(t)
        tensor = tuple(p for p in self.strategy.parts if not p.splits_batch and p.axis in axes)
        t = gathered(t, [a for a in self.view.axes if a not in {p.axis for p in tensor}])
        return Combined(tensor).weight(path_name(path), t) if tensor else t

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
        """Returns the global value of the result `x`. `like` is the tensor from outside in whose
        place it is put. `laid` is the layout of the argument of the same name with equal blocks,
        such as a weight for its gradient. Raises ShapeError for a number that differs between
        devices."""
        node = recorder.node(x)
        t = node.type
        varying_axes = [a for a in self.view.axes if a in t.varying]
        home = like.type if like is not None and like.shape else None
        if t.rest_axes and not (home is not None and home.split_axes):
            return symbolic(node, recorder)  # optimizer state that one rank updates (owned.py)
        if (
            home is not None
            and home.mesh is not None
            and t.shape == home.shape
            and not varying_axes
        ):
            return symbolic(recorder.builder.redistribute(node, home.complete()), recorder)
        if home is not None and varying_axes and as_local(home, self.view.axes) is t:
            return symbolic(recorder.builder("reinterpret", node, layout=home), recorder)
        spec = self.layouts.get("return") if not path else None
        if spec is not None and (varying_axes or (self.view.data and t.rank)):
            return self._returned(recorder, node, spec)
        if not varying_axes:
            return symbolic(node, recorder)
        if laid is not None and as_local(laid, self.view.axes) is t:
            return symbolic(recorder.builder("reinterpret", node, layout=laid), recorder)
        if not t.rank:
            raise ShapeError(
                f"{self.name}: it returns a number that differs between devices",
                result=t,
                made_at=node.loc,
                fix="combine it first: dist.all_reduce(x, axis), or reshape it to (1,)",
            )
        whole = self._whole(node, varying_axes)
        return symbolic(recorder.builder("reinterpret", node, layout=whole), recorder)

    def _whole(self, block: Node, axes: Sequence[str]) -> TensorType:
        """Returns the type of the whole tensor whose `block` each device along the axes `axes` has.
        Raises LayoutError if blocks of the arguments are not in the order of the devices, so that
        the order of the result's blocks is ambiguous."""
        whole, odd = self.view.joined(block.type, axes)
        if odd is None:
            return whole
        raise LayoutError(
            f"{self.name}: in which order do the devices' blocks of a result follow each other?",
            result=block.type,
            made_at=block.loc,
            argument=f"{odd}, which is not in the order of the devices",
            fix='say it: layouts={"return": dist.ShardSpec(...)}; or lay the argument so that'
            f" {', '.join(axes)} split it in this order, before all others",
        )

    def weight(
        self, recorder: Recorder, x: Tensor, path: Path, box: Tensor, laid: TensorType
    ) -> Tensor:
        """Returns the global value that a body puts into the weight `box`. Raises ShapeError if it
        has another shape, as with a block from each device."""
        new = self.leave(recorder, x, path, box, laid)
        if new.shape != box.shape:
            raise ShapeError(
                f"{self.name}: a weight is set to what differs between devices",
                weight=f"{path_name(path)} {box.type}",
                each_device=x.type,
                made_at=recorder.node(x).loc,
                fix="combine it first: dist.all_reduce(x, axis), or dist.broadcast(x, axis, root)",
            )
        return new

    def _returned(self, recorder: Recorder, node: Node, spec: ShardSpec) -> Tensor:
        """Returns the result `node` laid out by `spec`. Raises LayoutError if the devices' values
        differ along an axis that is not in `spec`."""
        t = node.type
        cut = spec.type(t.shape, t.dtype, self.view.mesh)
        for d, dim in enumerate(cut.dims):
            axes = [a for f in dim for a in f.axes if a in t.varying]
            if axes:
                t = joined(t, axes, d)
        varying_axes = [a for a in t.varying if a in self.view.axes]
        if varying_axes:
            raise LayoutError(
                f"{self.name}: the layout of its result does not say where {varying_axes[0]!r} "
                "goes",
                result=node.type,
                fix=f"name {varying_axes[0]!r} in the ShardSpec, or combine the value over it "
                "first",
            )
        if t is not node.type:
            node = recorder.builder("reinterpret", node, layout=t)
        to = self._along(gathered(t.complete(), self.view.data), spec)
        return symbolic(recorder.builder.redistribute(node, to), recorder)


def by_name(
    path: Path, block: TensorType, laid: Mapping[Path, TensorType], axes: Sequence[str]
) -> TensorType | None:
    """Returns the layout of the argument whose blocks along `axes` have the type `block` and whose
    path shares the longest end with `path`; None if there is none, or several."""
    found: dict[int, set[TensorType]] = defaultdict(set)
    for other, t in laid.items():
        if t is not block and as_local(t, axes) is block:
            pairs = zip(reversed(path), reversed(other), strict=False)
            same = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            if any(isinstance(a, str) for a in same):
                found[len(same)].add(t)
    best = found[max(found)] if found else set()
    return next(iter(best)) if len(best) == 1 else None


def _placed(x: Tensor) -> bool:
    """Returns whether `x` has a layout, or is a weight by its origin."""
    made = isinstance(x, Parameter) or bool(x.name) or x.drawn
    return made or x.mesh is not None
