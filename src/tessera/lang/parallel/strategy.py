"""Strategies: choices of layouts for weights, gradients, optimizer state and batches.

Strategies compose by mesh axis: `dist.strategy("data_parallel") + dist.strategy("tensor_parallel")`
gives each name the splits of both. None has an execution path of its own, so users can write their
own: an `AxisStrategy` with methods that choose layouts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...core import flags
from ...core.checks import instance, one_of, shown, unfit
from ...core.context import settings
from ...core.devices import device_count
from ...core.errors import StrategyError, StrategyWarning, UsageError, lines_up
from ...core.layout import TensorType, dim_axes, shard_count
from ...core.mesh import Mesh
from ...core.public import checked
from ..math import functions
from ..math.create import tensor
from ..record.box import Box
from ..record.mesh_transfer import moved
from ..record.parameter import Parameter
from ..record.recorder import current
from ..record.tree import Path, path_name, tree_update
from ..value.checks import mesh_or_none, needed_mesh
from ..value.host_data import is_array, is_host_array
from ..value.tensor import Tensor
from .collectives import split_over

STAGES = {"optimizer": 1, "gradient": 2, "weight": 3}
"""The first stage of ZeRO that splits each kind of stored tensor."""


class Strategy:
    """The layouts of a model on a mesh: strategies for some mesh axes, applied in order.

    Each adds splits to the layout so far; a tensor that an axis splits already is not changed.
    """

    parts: tuple[AxisStrategy, ...]

    def __add__(self, other: Strategy) -> Strategy:
        if not isinstance(other, Strategy):
            return NotImplemented
        return Combined((*self.parts, *other.parts))

    @property
    def for_out_in(self) -> Strategy:
        """The strategy for weights [out, in], such as PyTorch's linear layers have; rules of a
        user's own count the dims of such a weight as they are."""
        return Combined(tuple([p.for_out_in for p in self.parts]))

    def weight(self, name: str, t: TensorType) -> TensorType:
        """The layout in which the weight `name` is kept."""
        return self._stored("weight", name, t)

    def gradient(self, name: str, t: TensorType) -> TensorType:
        """The layout in which the finished gradient of the weight `name` is kept."""
        return self._stored("gradient", name, t)

    def optimizer(self, name: str, t: TensorType) -> TensorType:
        """The layout of optimizer state of the shape of the weight `name`."""
        return self._stored("optimizer", name, t)

    def batch(self, t: TensorType) -> TensorType:
        """The layout of a batch [B, ...]: split over every data-parallel axis."""
        for p in self.parts:
            p._check_axis(t)
            if p.axis not in t.split_axes:
                t = p._checked(t, p.lay_batch(t))
        return t

    def _stored(self, kind: str, name: str, t: TensorType) -> TensorType:
        """The layout between uses: all parts first choose the layout in use, then the splits
        between uses."""
        for p in self.parts:
            if t.mesh is None:
                raise StrategyError(
                    f"strategy {p.kind!r}: the weight {name!r} lies on no mesh",
                    weight=t,
                    fix="lay the model out first: dist.place(model, strategy, mesh); what a step"
                    " makes itself lies on the mesh in force: with mesh:",
                )
            p._check_axis(t)
            if p.axis not in t.split_axes:
                t = p._checked(t, p.lay_weight(name, t))
        for p in self.parts:
            if p.axis not in t.split_axes:
                t = p._checked(t, p.lay_at_rest(kind, name, t))
        return t


@checked
@dataclass(frozen=True)
class Combined(Strategy):
    """A sum of strategies, one for each of several mesh axes."""

    parts: tuple[AxisStrategy, ...]


class AxisStrategy(Strategy):
    """A strategy for one mesh axis, the base class of a user's own strategies. A subclass chooses
    in `lay_weight`, `lay_at_rest` or `lay_batch` which dims are split over `self.axis`.

    Each method takes a type, of the global shape, and returns it in the new layout; `self.split(t,
    dim)` splits a dim over the axis. The default of each method is to change nothing, except for
    the batch, whose rows are split over the axis unless `splits_batch` is False. Raises UsageError
    if `axis` is not a name.

    >>> from tessera import dist
    >>> class Columns(dist.AxisStrategy):
    ...     splits_batch = False
    ...     def lay_weight(self, name, t):
    ...         return self.split(t, -1) if t.rank == 2 else t
    >>> mesh = dist.Mesh.parse("dp=2 tp=4")
    >>> weights = dist.place({"w": dist.tensor((8, 16))}, Columns("tp"), mesh)
    >>> weights["w"].layout
    '[8, 16@tp]'
    """

    kind: ClassVar[str] = "AxisStrategy"
    """The name in errors: the name of the class."""

    splits_batch: bool = True
    """True if devices along the axis have different rows of a batch: it is a data axis, global in
    the body of a `ts.distribute`. False, as for tensor parallelism: they work on the same rows."""

    def __init__(self, axis: str) -> None:
        self.axis = one_axis(self.kind, axis)

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__dict__.get("kind", cls.__name__)

    @property
    def parts(self) -> tuple[AxisStrategy, ...]:  # type: ignore[override]
        """A tuple of this strategy alone."""
        return (self,)

    @property
    def for_out_in(self) -> AxisStrategy:
        """The strategy for weights [out, in]."""
        return self

    @property
    def _call(self) -> str:
        """The call that makes the strategy, with an axis left open, for errors."""
        return f'{self.kind}(axis="...")'

    def lay_weight(self, name: str, t: TensorType) -> TensorType:
        """The layout in which the weight `name` is used."""
        return t

    def lay_at_rest(self, kind: str, name: str, t: TensorType) -> TensorType:
        """The layout in which a "weight", its finished "gradient" or "optimizer" state of its shape
        is kept between its uses; `t` is the layout in use."""
        return t

    def lay_batch(self, t: TensorType) -> TensorType:
        """The layout of a batch."""
        return self.split(t, 0) if self.splits_batch and t.rank else t

    def split(self, t: TensorType, dim: int) -> TensorType:
        """Returns `t` with `dim` split over the axis. Raises StrategyError if it has no such
        dim."""
        if not -t.rank <= dim < t.rank:
            raise StrategyError(
                f"strategy {self.kind!r}: there is no dim {dim} to split over {self.axis!r}",
                tensor=t,
                fix="leave what has no such dim as it is",
            )
        return split_over(t, dim % t.rank, (self.axis,))

    def split_at_rest(self, t: TensorType, dim: int) -> TensorType:
        """Returns `t` with `dim` split over the axis between uses, and gathered for each use."""
        t = self.split(t, dim)
        return t.with_rest_axes((*t.rest_axes, self.axis))

    def _check_axis(self, t: TensorType) -> None:
        """Raises StrategyError unless the mesh of `t` has the axis."""
        if t.mesh is not None and self.axis not in t.sizes:
            raise StrategyError(
                f"strategy {self.kind!r}: axis {self.axis!r} is not an axis of the mesh",
                mesh=t.mesh.text(),
                fix=f"say {self._call} with an axis of the mesh",
            )

    def _checked(self, t: TensorType, new: TensorType) -> TensorType:
        """Returns `new`, the strategy's result for `t`. Raises StrategyError if it is not a layout
        of the same tensor."""
        if new is t or (isinstance(new, TensorType) and _of_one_tensor(t, new)):
            return new
        raise StrategyError(
            f"strategy {self.kind!r}: it gives no layout of the tensor that it is asked for",
            tensor=t,
            gives=new,
            fix="return the type that it gets, or self.split of it",
        )

    def check_reach(self, types: Mapping[str, TensorType]) -> None:
        """Gives one StrategyWarning if the strategy splits nothing over the axis: neither batches,
        nor stored tensors, nor a weight of a model with the layouts `types`."""
        mine, base = type(self), AxisStrategy
        other = mine.lay_batch is not base.lay_batch or mine.lay_at_rest is not base.lay_at_rest
        whole, every = whole_over(self.axis, types), [t for t in types.values() if t.rank > 1]
        if not (self.splits_batch or other) and whole and len(whole) == len(every):
            warn_whole(self, types, largest(whole), f"split some of them in {self.kind}.lay_weight")


def one_axis(kind: str, axis: object) -> str:
    """Returns the axis of a strategy. Raises UsageError if it is not a name."""
    fix = 'name one mesh axis, e.g. "dp"; strategies for several are added: a + b'
    return instance(f"strategy {kind!r}", "axis", axis, str, fix)


def _of_one_tensor(a: TensorType, b: TensorType) -> bool:
    """Returns whether both types have one shape and dtype, on one mesh."""
    one, other = [(t.shape, t.dtype, t.mesh, t.partial, t.varying) for t in (a, b)]
    return one == other


def whole_over(axis: str, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """The matrices among `types` that are not split over `axis`."""
    return {n: t for n, t in types.items() if t.rank > 1 and axis not in t.split_axes}


def warn_whole(
    p: AxisStrategy, types: Mapping[str, TensorType], rows: Sequence[str], fix: str
) -> None:
    """Gives a StrategyWarning with `rows` and the bytes of the weights `types` that are not
    split."""
    left = sum(t.nbytes for t in whole_over(p.axis, types).values())
    every = sum(t.nbytes for t in types.values() if t.rank > 1)
    told = f"leaves {left:,} of {every:,} bytes of weights whole"
    told = told if left else "does not follow each of its rules"
    warnings.warn(
        f"strategy {p.kind!r} over {p.axis!r} {told}\n  " + "\n  ".join([*rows, fix]),
        StrategyWarning,
        stacklevel=lines_up(),
    )


def largest(types: Mapping[str, TensorType]) -> list[str]:
    """Returns a line for each of the four largest of `types`."""
    first = sorted(types, key=lambda n: -types[n].nbytes)[:4]
    return [f"{n} : {types[n]}, {types[n].nbytes:,} bytes on each device" for n in first]


def check_reach(strategy: Strategy | None, types: Mapping[str, TensorType]) -> None:
    """Warns of each part of `strategy` that splits none of the weights of a whole model with the
    layouts `types`."""
    for p in strategy.parts if strategy is not None else ():
        if types and next(iter(types.values())).sizes.get(p.axis, 1) > 1:
            p.check_reach(types)


def finest(t: TensorType) -> TensorType:
    """Returns `t` also split over the other axes of its mesh, by the rule of ZeRO; equal for all
    layouts at rest of one layout in use."""
    t = t.in_use
    if not t.rank:
        return t
    for axis in t.sizes:
        if axis not in (*t.split_axes, *t.partial_axes, *t.varying) and t.sizes[axis] > 1:
            t = split_over(t, zero_dim(t, axis), (axis,))
    return t


def zero_dim(t: TensorType, axis: str) -> int:
    """Returns the dim that ZeRO splits: the largest that `axis` divides evenly; else the largest
    that its own axes divide evenly, as `axis` can then be gathered without them; else the
    largest."""
    n = t.sizes[axis]

    def rank(i: int) -> tuple[bool, bool, int, int]:
        above = shard_count(dim_axes(t.dims[i]), t.sizes)
        here = t.shape[i] // above
        divides = here > 0 and t.shape[i] % (n * above) == 0
        return divides, t.shape[i] % above == 0, here, -i

    return max(range(t.rank), key=rank)


NAMED: dict[str, Callable[[], Strategy]] = {}
"""The strategies that can be given by name, over their default axes: builtin_strategies.py."""


def strategy_or_none(
    name: str, argument: str, value: object, example: str = "data_parallel"
) -> Strategy | None:
    """Returns the strategy given as an object or by name, or None. Raises StrategyError for
    anything else."""
    if value is None or isinstance(value, Strategy):
        return value
    if isinstance(value, str) and value in NAMED:
        return NAMED[value]()
    fix = f'give dist.strategy("{example}") or a sum of strategies'
    raise unfit(name, argument, value, fix, StrategyError)


def place(
    tree: Any,
    strategy: Strategy | str | None = None,
    mesh: Mesh | None = None,
    kind: str = "weight",
) -> Any:
    """The tensors of `tree` (a module or a nested dict) laid out on `mesh` by `strategy`;
    "data_parallel" stands for `dist.strategy("data_parallel")`.

    A module is changed in place; other containers are returned as new ones. Tensors without data
    yet are made in their layout when they are read; other tensors are moved, also from another
    mesh. `kind` is "weight", "gradient", "optimizer" or "batch" (whose leaves may be NumPy arrays).
    Raises MeshError if there is no mesh, StrategyError if `strategy` or `kind` is unknown or the
    rules fit no weight, UsageError if there are arrays that are no batch, and no tensors, or if a
    batch has nothing that can be laid out.
    """
    mesh = mesh_or_none("place", mesh) or settings().mesh
    layout_rule(Combined(()), kind)  # raises StrategyError for an unknown kind
    laid_by = strategy_or_none("place", "the strategy", strategy)
    mesh = needed_mesh("place", mesh)
    # (old, new) by id: a weight or buffer with two names is laid out once, by the first name.
    done: dict[int, tuple[Tensor, Tensor]] = {}
    have: dict[str, TensorType] = {}
    arrays: list[Path] = []
    rest: list[tuple[Path, Any]] = []

    def placed(path: Path, x: Any) -> Any:
        if kind == "batch" and is_array(x):
            x = tensor(x)
        elif is_host_array(x):
            arrays.append(path)
            return x
        if not isinstance(x, Tensor):
            rest.append((path, x))
            return x
        if id(x) in done:
            return done[id(x)][1]
        base, name = _plain_on(x, mesh), path_name(path)
        by = laid_by.for_out_in if laid_by is not None and x.out_in else laid_by
        want = layout_rule(by, kind)(name, base) if by is not None else base
        given = x
        if x.drawn and x._data is None and x._pending is not None:
            x.type, x.drawn = want, kind != "batch"
        elif type(x) is Parameter:
            x.put(_laid(x, want))
        else:
            x = _laid(x, want)
            x = Box.holding(x) if isinstance(given, Box) else x
        of_host = x._recipe is not None and x._recipe.of_host
        if (
            settings().called is None
            and kind == "batch"
            and of_host
            and current() is None
            and _is_here(mesh)
        ):
            x.stored  # noqa: B018  # starts the transfer while the devices compute
        if type(x) is Parameter or given.home is not None:
            done[id(given)] = given, x
        have[name] = x.type
        return x

    out = tree_update(placed, tree)
    if arrays and not have:
        raise UsageError(
            "place: nothing in it is a tensor, and NumPy arrays stay as they are",
            arrays=", ".join(path_name(p) or "the tree" for p in arrays[:5]),
            fix='of a batch: dist.place(batch, strategy, mesh, kind="batch"); of weights: make'
            " tensors first, by nn.Parameter(x) or ts.tensor(x)",
        )
    if kind != "batch" and any(not path for path, _ in rest):
        raise UsageError(
            f"place: {shown(tree)} holds no tensors that can be laid out",
            fix="give the module itself, its parameters(), or a dict or list of tensors",
        )
    if kind == "batch":
        # Numbers beside arrays are allowed; a table of another library is probably a mistake.
        left = [(p, x) for p, x in rest if not have or getattr(x, "shape", None)]
        if left:
            raise UsageError(
                "place: a batch is laid out as tensors or arrays, and "
                + ("some of it is neither" if have else "it has none"),
                rows=[(path_name(p) or "the batch", shown(x)) for p, x in left[:5]],
                fix="make arrays of it, such as np.asarray(x)",
            )
    if kind == "weight":
        check_reach(laid_by, have)
    return out


def layout_rule(strategy: Strategy, kind: str) -> Callable[[str, TensorType], TensorType]:
    """Returns the rule of `strategy` for tensors of one kind: a function from a name and a layout
    to the new layout. Raises StrategyError for an unknown kind."""
    one_of("place", "the kind", kind, ("weight", "gradient", "optimizer", "batch"), StrategyError)
    if kind == "batch":
        return lambda name, t: strategy.batch(t)
    found: Callable[[str, TensorType], TensorType] = getattr(strategy, kind)
    return found


def _plain_on(x: Tensor, mesh: Mesh) -> TensorType:
    """The replicated type of `x` on `mesh`."""
    return x.type.complete().replicated().on(mesh)


def _is_here(mesh: Mesh) -> bool:
    """Returns whether the engine runs and has the devices of `mesh`: else it may be a plan's."""
    return flags.engine_runs() and max(mesh.physical.ids) < device_count()


def _laid(x: Tensor, want: TensorType) -> Tensor:
    if x.mesh is None:
        x = functions.relayout(x, x.type.on(want.mesh))
    elif x.mesh != want.mesh and current() is None:
        return moved(x, want)
    return functions.relayout(x, want)
