"""A strategy is a choice of layouts: for weights, gradients, optimizer state and batches.

Strategies compose by mesh axis: `dist.strategy("data_parallel") + dist.strategy("tensor_parallel")`
gives each name the splits of both. None has an execution path of its own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.checks import axes_of, one_of, shown, unfit
from ..core.context import settings
from ..core.errors import MeshError, StrategyError, StrategyWarning, fail, lines_up
from ..core.kinds import is_whole
from ..core.layout import Factor, TensorType, dim_axes, ways
from ..core.mesh import Mesh
from ..core.renamed import renamed_arguments
from ..core.wording import nearest
from . import functions
from .checks import mesh_or_none
from .collectives import split_over
from .create import tensor
from .parameter import Parameter
from .tensor import Tensor
from .tree import Path, path_name, tree_update

# A transformer's weights by name: which dim tensor parallelism splits. Column: the outputs (heads,
# hidden, vocabulary) of [in, out]; row: the inputs. The names of Tessera's own modules come first,
# then the customary ones of checkpoints stored as [in, out].
# A third number says of how many equal parts the dim is made (q, k and v side by side): each is
# split. A weight or a bias by itself, as in a linear layer, is column parallel.
Rule = tuple[str, int] | tuple[str, int, int]
TRANSFORMER: tuple[Rule, ...] = (
    (r"(^|\.)attention\.(qkv|q|kv)(_bias)?$", -2),  # [d, (3,) heads, size]: heads
    (r"(^|\.)attention\.out$", -3),  # [heads, size, d]: heads
    (r"(^|\.)(up|gate|w_up|w_gate|up_proj|gate_proj|fc1|c_fc|w1|w3)(\.weight|\.bias|_bias)?$", -1),
    (r"(^|\.)(down|w_down|down_proj|fc2|w2)(\.weight)?$", -2),
    (r"(^|\.)(wq|wk|wv|q_proj|k_proj|v_proj)(\.weight|\.bias)?$", -1),
    (r"(^|\.)(w_qkv|c_attn|qkv_proj)(\.weight|\.bias)?$", -1, 3),
    (r"(^|\.)(wo|w_out|o_proj|out_proj)(\.weight)?$", -2),
    (r"(^|\.)(embed|wte|embed_tokens|tok_embeddings)(\.weight)?$", -2),
    (r"(^|\.)(head|lm_head)(\.weight)?$", -1),
    (r"^(weight|bias)$", -1),
)
# The weights of stacked experts [experts, in, out]: the experts.
EXPERTS: tuple[Rule, ...] = ((r"(^|\.)(moe|experts)\.(up|gate|down)$", -3),)


@dataclass(frozen=True)
class AxisStrategy:
    """Layouts over one mesh axis: `stage` is ZeRO's, `rules` say what else splits which weight."""

    kind: str
    axis: str
    stage: int = 0
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Strategy:
    """How a model lies on a mesh: a strategy for each of some mesh axes, applied in order.

    They add splits to the layout they are given: what an axis splits already, stays.
    """

    parts: tuple[AxisStrategy, ...]

    def __add__(self, other: Strategy) -> Strategy:
        return Strategy((*self.parts, *other.parts))

    def weight(self, name: str, t: TensorType) -> TensorType:
        """The layout in which the weight `name` is kept."""
        return self._stored(name, t, 3)

    def gradient(self, name: str, t: TensorType) -> TensorType:
        """The layout in which its finished gradient is kept."""
        return self._stored(name, t, 2)

    def optimizer(self, name: str, t: TensorType) -> TensorType:
        """The layout of optimizer state of its shape."""
        return self._stored(name, t, 1)

    def batch(self, t: TensorType) -> TensorType:
        """The layout of a batch [B, ...]: split over every data-parallel axis."""
        axes = [p.axis for p in self.parts if p.kind != "tensor_parallel" and p.axis in t.sizes]
        axes = list(dict.fromkeys(axes))
        return split_over(t, 0, axes) if axes else t

    def _stored(self, name: str, t: TensorType, stage: int) -> TensorType:
        """The layout at rest: each strategy's rules split first, then ZeRO of at least `stage`
        splits what is left."""
        for p in self.parts:
            if p.axis not in t.sizes:
                raise fail(
                    StrategyError,
                    f"strategy {p.kind!r}: axis {p.axis!r} is not an axis of the mesh",
                    [("mesh", t.mesh.text() if t.mesh else "none")],
                    fix=f'say dist.strategy({p.kind!r}, axis="...") with an axis of the mesh',
                )
            if p.rules and p.axis not in t.split_axes:
                t = _by_rule(p, name, t)
        for p in self.parts:
            zero = p.kind == "zero_redundancy_optimizer" and p.stage >= stage
            if zero and t.rank and p.axis not in t.split_axes:
                t = split_over(t, _zero_dim(t, p.axis), (p.axis,))
                t = t.with_rest((*t.rest, p.axis))
        return t


def _by_rule(p: AxisStrategy, name: str, t: TensorType) -> TensorType:
    """`t` as the first of its rules that fits the name `name` splits it."""
    for rule, dim, *parts in p.rules:
        if not _fits((rule, dim), name, t):
            continue
        d = dim % t.rank
        n = parts[0] if parts else 1
        if n > 1 and t.shape[d] % (n * t.sizes[p.axis]) == 0 and len(t.dims[d]) == 1:
            split = (Factor(n), Factor(t.shape[d] // n, (p.axis, *t.dims[d][0].axes)))
            return t.with_dims((*t.dims[:d], split, *t.dims[d + 1 :]))
        return split_over(t, d, (p.axis,))
    return t


def finest(t: TensorType) -> TensorType:
    """`t` split over the axes of its mesh that do not split it yet too, where ZeRO would; the same
    for all layouts at rest of one layout."""
    t = t.in_use
    if not t.rank:
        return t
    for axis in t.sizes:
        if axis not in (*t.split_axes, *t.partial_axes, *t.varying) and t.sizes[axis] > 1:
            t = split_over(t, _zero_dim(t, axis), (axis,))
    return t


def _zero_dim(t: TensorType, axis: str) -> int:
    """The dim ZeRO splits: the largest that divides, else the largest."""
    n = t.sizes[axis]

    def rank(i: int) -> tuple[bool, int, int]:
        here = t.shape[i] // ways(dim_axes(t.dims[i]), t.sizes)
        return (here > 0 and t.shape[i] % (n * ways(dim_axes(t.dims[i]), t.sizes)) == 0, here, -i)

    return max(range(t.rank), key=rank)


def check_reach(strategy: Strategy | None, types: Mapping[str, TensorType]) -> None:
    """Holds the weights of a whole model, as `strategy` laid them, against what its rules are for.

    Raises StrategyError if none of a user's own rules fits a name. One StrategyWarning tells
    which of them fit none, or which of the largest weights tensor parallelism leaves whole.
    """
    for p in strategy.parts if strategy is not None else ():
        if not p.rules or not types or next(iter(types.values())).sizes.get(p.axis, 1) == 1:
            continue
        title = f"strategy {p.kind!r} over {p.axis!r}"
        lost = [r for r in p.rules if not any(_fits(r, n, t) for n, t in types.items())]
        own = p.rules != RULES[p.kind]
        if own and len(lost) == len(p.rules):
            raise fail(
                StrategyError,
                f"{title}: no rule fits the name of a weight, so nothing is split",
                [(repr(r[0]), f"the nearest names are {nearest(r[0], types)}") for r in lost],
                fix="write what the names contain; a weight needs the dim that the rule splits",
            )
        rows = [f"{r[0]!r} fits none of {nearest(r[0], types)}" for r in lost if own]
        whole = {n: t.nbytes for n, t in types.items() if t.rank > 1 and p.axis not in t.split_axes}
        every = sum(t.nbytes for t in types.values() if t.rank > 1)
        if (
            (2 * sum(whole.values()) > every)
            if p.kind == "tensor_parallel"
            else sum(whole.values()) == every
        ):
            first = sorted(whole, key=lambda n: -whole[n])[:4]
            rows += [f"{n} : {types[n]}, {whole[n]:,} bytes on each device" for n in first]
        if rows:
            warnings.warn(
                f"{title} leaves {sum(whole.values()):,} of {every:,} bytes of weights whole\n  "
                + "\n  ".join(rows)
                + '\n  give it rules for their names: rules=[(r"wide$", -1), ...]',
                StrategyWarning,
                stacklevel=lines_up(),
            )


def _fits(rule: Rule, name: str, t: TensorType) -> bool:
    return bool(re.search(rule[0], name)) and t.rank >= -rule[1]


KINDS = {
    "data_parallel": "dp", "tensor_parallel": "tp", "zero_redundancy_optimizer": "dp",
    "expert_parallel": "ep",
}  # fmt: skip
RULES = {"tensor_parallel": TRANSFORMER, "expert_parallel": EXPERTS}


def strategy(
    kind: str,
    axis: str | None = None,
    *,
    stage: int | None = None,
    rules: Sequence[Rule] | None = None,
) -> Strategy:
    """The strategy named `kind` over a mesh axis.

    `axis` is by default "dp", for tensor_parallel "tp", for expert_parallel "ep" (which also splits
    the batch). `stage` is that of ZeRO (Rajbhandari et al. 2020): 1 splits optimizer state, 2
    gradients too (default), 3 weights too. `rules` are for tensor or expert parallelism: pairs
    (regular expression for a weight's name, dim to split); a third number says of how many equal
    parts the dim consists, each of which is split. Strategies are combined by `+`. Raises
    StrategyError if `kind`, `stage` or a rule is unknown or not allowed for `kind`.
    """
    one_of("strategy", "the kind", kind, KINDS, StrategyError)
    if stage is not None and (kind != "zero_redundancy_optimizer" or stage not in (1, 2, 3)):
        raise fail(
            StrategyError,
            f"strategy {kind!r}: stage {stage!r} does not exist",
            fix="zero_redundancy_optimizer takes stage 1, 2 or 3",
        )
    if rules is not None and kind not in RULES:
        raise fail(
            StrategyError,
            f"strategy {kind!r}: it goes by no rules for names",
            fix="give rules to " + " or ".join(RULES),
        )
    zero = kind == "zero_redundancy_optimizer"
    axes = axes_of(f"strategy {kind!r}", axis or KINDS[kind])
    table = _checked_rules(rules) if rules is not None else RULES.get(kind, ())
    return Strategy((
        AxisStrategy(
            kind,
            axes[0],
            (stage or 2) if zero else 0,
            table if kind in RULES else (),
        ),
    ))  # fmt: skip


def _checked_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules as a tuple. Raises StrategyError if one is not a regular expression with a dim."""
    for rule in rules if isinstance(rules, (list, tuple)) else [rules]:
        pattern, *numbers = (
            rule if isinstance(rule, tuple) and len(rule) in (2, 3) else (None, None)
        )
        try:
            if not isinstance(pattern, str) or not all(map(is_whole, numbers)):
                raise TypeError
            re.compile(pattern)
        except (TypeError, re.error):
            raise fail(
                StrategyError,
                f"strategy 'tensor_parallel': {shown(rule)} is no rule",
                fix=r'give pairs of a regular expression and a dim, e.g. (r"\.up$", -1)',
            ) from None
    return tuple(rules)


def strategy_or_none(
    name: str, what: str, given: object, such_as: str = "data_parallel"
) -> Strategy | None:
    """A strategy or None. Raises StrategyError."""
    if given is None or isinstance(given, Strategy):
        return given
    fix = f'give dist.strategy("{such_as}") or a sum of strategies'
    raise unfit(name, what, given, fix, StrategyError)


@renamed_arguments("dist.place", plan="strategy")
def place(
    tree: Any, strategy: Strategy | None = None, mesh: Mesh | None = None, kind: str = "weight"
) -> Any:
    """The tensors of `tree` (a module or a nested dict) laid out on `mesh` as `strategy` says.

    A module is changed in place; other containers are returned as new ones. A weight that has no
    values yet is made in its layout later; others are moved. `kind` is "weight", "gradient",
    "optimizer" or "batch" (whose leaves may be NumPy arrays). Raises MeshError if there is no mesh,
    StrategyError if `strategy` or `kind` is unknown or the rules fit no weight.
    """
    mesh = mesh_or_none("place", mesh) or settings().mesh
    layout_rule(Strategy(()), kind)  # is there such a kind?
    strategy_or_none("place", "the strategy", strategy)
    if mesh is None:
        raise fail(MeshError, "place: there is no mesh", fix="pass mesh=..., or say: with mesh:")
    done: set[int] = set()  # a weight that has two names is laid out by the first
    have: dict[str, TensorType] = {}

    def placed(path: Path, x: Any) -> Any:
        if kind == "batch" and isinstance(x, np.ndarray):
            x = tensor(x)
        if not isinstance(x, Tensor) or id(x) in done:
            return x
        base, name = _plain_on(x, mesh), path_name(path)
        want = layout_rule(strategy, kind)(name, base) if strategy is not None else base
        if type(x) is Parameter:
            done.add(id(x))
        if x._data is None and x._pending is not None:
            x.type = want
        elif type(x) is Parameter:
            x.put(functions.relayout(_on(x, mesh), want))
        else:
            x = functions.relayout(_on(x, mesh), want)
        have[name] = x.type
        return x

    out = tree_update(placed, tree)
    if kind == "weight":
        check_reach(strategy, have)
    return out


def layout_rule(strategy: Strategy, kind: str) -> Callable[[str, TensorType], TensorType]:
    """How `strategy` lays out tensors of one kind: a function of a name and its layout so far, to
    the new layout. Raises StrategyError for an unknown kind."""
    one_of("place", "the kind", kind, ("weight", "gradient", "optimizer", "batch"), StrategyError)
    if kind == "batch":
        return lambda name, t: strategy.batch(t)
    found: Callable[[str, TensorType], TensorType] = getattr(strategy, kind)
    return found


def _plain_on(x: Tensor, mesh: Mesh) -> TensorType:
    """The replicated type of `x` on `mesh`."""
    return x.type.complete().replicated().on(mesh)


def _on(x: Tensor, mesh: Mesh) -> Tensor:
    if x.type.mesh is None:
        return functions.relayout(x, x.type.on(mesh))
    return x
