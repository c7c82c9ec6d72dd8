"""`Optimizer`, the base class: its state, laid out by a strategy, and a pure `update`.

An optimizer is a frozen value. Its state is a dict of tensors: `step` (i32[], updates done), a dict
by weight name for each kind of state, and `master`, f32 copies of narrower weights. Arithmetic is
in f32, in the layout of the state: if that is split, each device updates its own block, and only
updated weights are sent.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import finfo

from ..core.checks import unfit
from ..core.context import settings
from ..core.declared import Flag, Real
from ..core.dtypes import DType, adds_up_in, f32, held_as, int32
from ..core.errors import DTypeError, UsageError
from ..core.layout import TensorType, plain
from ..core.locks import RECORDING_LOCK
from ..core.peers import no_attribute
from ..core.value_checks import is_number
from ..ir.graph.build import Builder
from ..lang.autodiff.tape import mark_as_updates
from ..lang.math import functions as F
from ..lang.math.create import tensor
from ..lang.parallel.flat_state import FlatState, by_name
from ..lang.parallel.strategy import Strategy, layout_rule, strategy_or_none
from ..lang.record.operands import emit, scalar
from ..lang.record.parameter import Parameter, trained
from ..lang.record.recorder import current
from ..lang.record.tree import flatten, unflatten
from ..lang.value.eager import redistribute_now, run_graph, run_now
from ..lang.value.host_data import is_array
from ..lang.value.tensor import Tensor
from .schedules import Schedule, scheduled
from .trees import named, need_same_names, need_same_shapes, one_line

Rate = float | Schedule | Callable[[Tensor], Tensor]
State = dict[str, Any]
Slots = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Optimizer(ABC):
    """The base class of all optimizers.

    `lr` is a number or a schedule. `weight_decay` applies to the weights that `mask` selects: a
    predicate on the name, or a regular expression that is searched in it; None selects every weight
    with 2 or more dims whose name is not that of a bias or a norm. `master` keeps an f32 copy of
    each weight that is narrower than f32. Raises UsageError if a setting is out of range or of the
    wrong kind.
    """

    lr: Rate
    _: KW_ONLY
    weight_decay: Real = 0.0
    mask: Mask = None
    master: Flag = True

    def __init_subclass__(cls) -> None:
        if "__setattr__" in vars(cls):  # a frozen dataclass raises another error
            cls.__setattr__ = _set  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        rate: Any = self.lr
        if (is_array(rate) or isinstance(rate, np.generic)) and rate.shape == ():
            object.__setattr__(self, "lr", rate.item())
        fits = callable(self.lr) and not hasattr(type(self.lr), "parameters")
        if not is_number(self.lr) and not fits:
            raise UsageError(
                f"{self._name}: lr is a {type(self.lr).__name__}",
                fix="give a number or a schedule: optim.warmup_cosine(...); weights go to"
                " optimizer.init",
            )
        mine = [("weight_decay", self.weight_decay, ">= 0"), *self._limits()]
        if isinstance(self.lr, (int, float)):
            mine.insert(0, ("lr", self.lr, ">= 0"))
        wrong = [(n, f"{v}, must be {rule}") for n, v, rule in mine if not _WITHIN[rule](v)]
        if wrong:
            raise UsageError(
                f"{self._name}: a setting is out of range", rows=wrong, fix="correct it"
            )
        check_mask(self._name, self.mask)

    @property
    def _name(self) -> str:
        return type(self).__name__

    # -- to be defined by each optimizer ----------------------------------------------------------
    @abstractmethod
    def _limits(self) -> list[tuple[str, float, str]]:
        """(name, value, rule) of the settings to check; rules are keys of `_WITHIN`."""

    @abstractmethod
    def _slots(self, t: TensorType) -> dict[str, TensorType]:
        """The types of the state of a weight, which starts as zeros; `t` is the weight's f32 layout
        in state."""

    @abstractmethod
    def _factors(self, lr: Tensor, count: Tensor) -> dict[str, Tensor]:
        """The scalars of a step, computed once for all weights; `count` f32[] is 1 at the first
        step."""

    @abstractmethod
    def _step(
        self, w: Tensor, g: Tensor, old: Slots, k: dict[str, Tensor], decays: bool
    ) -> tuple[Tensor, Slots]:
        """(new weight, new state of the weight); all f32 in one layout."""

    def _home(self, w: Tensor, g: Tensor, old: Slots) -> TensorType:
        """The layout in which a weight is updated: that of its state, or else of its gradient."""
        whole = next((t.type for t in old.values() if t.shape == w.shape), None)
        if whole is None:
            whole = w.type if g.mesh is None else g.type
        return whole.complete().with_dtype(adds_up_in(w.dtype))

    # -- the state --------------------------------------------------------------------------------
    def init(self, params: Any, strategy: Strategy | str | None = None) -> State:
        """The state before the first update. It is created on the devices at its first use.

        `params` is a module or a dict (or another tree) of float tensors. Each piece of state has
        the layout that `strategy.optimizer` gives, or without a strategy that of its weight. Raises
        UsageError if `params` holds anything else or `mask` matches no weight, StrategyError if
        `strategy` does not fit.
        """
        weights = named(f"{self._name}.init", params)
        if self.weight_decay and self.mask is not None:
            need_match(self._name, self.mask, weights)
        laid_by = strategy_or_none(f"{self._name}.init", "the strategy", strategy)
        layout = None if laid_by is None else layout_rule(laid_by, "optimizer")
        kinds: dict[str, dict[str, TensorType]] = {}
        masters: Slots = {}
        for name, w in weights.items():
            t = w.type.complete().with_dtype(adds_up_in(w.dtype))
            t = t if layout is None else layout(name, t)
            for kind, slot in self._slots(t).items():
                kinds.setdefault(kind, {})[name] = slot
            if self._has_master(w):
                masters[name] = _wide_copy(w, t)
        mesh = next((w.mesh for w in weights.values() if w.mesh is not None), None)
        zeros = iter(
            _zeros([plain(int32, (), mesh), *(t for d in kinds.values() for t in d.values())])
        )
        state: State = {"step": next(zeros)}
        state |= {kind: {name: next(zeros) for name in d} for kind, d in kinds.items()}
        return state | ({"master": masters} if masters else {})

    def _has_master(self, w: Tensor) -> bool:
        return self.master and w.dtype.bytes < f32.bytes

    def update(self, params: Any, grads: Any, state: State) -> tuple[Any, State]:
        """Returns (new weights, new state) after one step along `grads`.

        `grads` is a tree like `params`; for a module it is the dict that `ts.grad` returns, and the
        new weights are such a dict, for `load_parameters`. Gradients may have another layout, or be
        partial sums. New weights and state keep the layouts of the old ones. Raises UsageError or
        ShapeError if the trees do not match.
        """
        if any(isinstance(g, Parameter) for g in flatten(grads)[0]):
            raise UsageError(
                f"{self._name}.update: the gradients are parameters",
                fix="the order is update(params, grads, state)",
            )
        weights, slots = self._matched(params, grads, state)
        new: State = {kind: {} for kind in state if kind != "step"}
        out = []
        with one_line("optimizer"):
            step = F.relayout(state["step"] + 1, state["step"].type)
            factors = {
                dtype: self._factors(self._rate(state["step"], dtype), step.to(dtype))
                for dtype in {adds_up_in(w.dtype): None for w, _ in weights.values()}
            }
            for name, (w, g) in weights.items():
                old, k = dict(slots[name]), factors[adds_up_in(w.dtype)]
                home = self._home(w, g, old)
                master = old.pop("master", None)
                full = _at(w, home)
                if master is not None:
                    full = _unless_set(_at(master, home), full, w.dtype)
                moved, made = self._step(full, _at(g, home), old, k, self._decays(name, w))
                if master is not None:
                    made["master"] = moved
                for kind, t in made.items():
                    new[kind][name] = F.relayout(t, state[kind][name].type)
                out.append(F.relayout(moved.to(w.dtype), w.type.complete()))
        mark_as_updates(out)
        kept = {kind: {name: d[name] for name in state[kind]} for kind, d in new.items()}
        return unflatten(flatten(trained(params))[1], out), {"step": step, **kept}

    def _rate(self, step: Tensor, dtype: DType) -> Tensor:
        """The learning rate at `step`, of `dtype`. Raises UsageError if a schedule returns anything
        else."""
        lr = self.lr if isinstance(self.lr, (int, float)) else scheduled(self.lr, step)
        if isinstance(lr, (int, float)):
            return scalar(float(lr), dtype)
        if not isinstance(lr, Tensor) or lr.shape or not lr.dtype.is_float:
            what = lr.type if isinstance(lr, Tensor) else type(lr).__name__
            raise UsageError(
                f"{self._name}: the schedule does not give a float tensor of one number",
                schedule=self.lr,
                gives=what,
                fix="return f32[], such as optim.constant(lr)(step)",
            )
        return lr.to(dtype)

    def _matched(
        self, params: Any, grads: Any, state: State
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Slots]]:
        """(weight and gradient, state), each by name. Raises UsageError or ShapeError if they do
        not match."""
        call = f"{self._name}.update"
        ws, gs = named(f"{call} (params)", params), named(f"{call} (grads)", grads)
        fix = "take the gradients of the same tree: ts.grad(loss, params)"
        need_same_names(f"{call}: params and grads", ws, gs, fix)
        need_same_shapes(f"{call}: params and grads", ws, gs, fix)
        slots: dict[str, Slots] = {name: {} for name in ws}
        fix = f"start from {self._name}(...).init(params); after unfreezing see docs/training.md"
        _need_state(call, state)
        wanted: dict[str, Any] = {"step": state.get("step")}
        for name, w in ws.items():
            t = w.type.complete().with_dtype(adds_up_in(w.dtype))
            kinds = self._slots(t) | ({"master": t} if self._has_master(w) else {})
            wanted |= {f"{kind}.{name}": made for kind, made in kinds.items()}
        tensors = _flat(state)
        need_same_names(f"{call}: params and state", wanted, tensors, fix)
        need_same_shapes(f"{call}: params and state", wanted, tensors, fix)
        for kind, d in state.items():
            for name, t in d.items() if kind != "step" else ():
                slots[name][kind] = t
        return {name: (w, gs[name]) for name, w in ws.items()}, slots

    # -- on disk ----------------------------------------------------------------------------------
    def state_dict(self, state: State) -> dict[str, Tensor]:
        """The state as one flat dict: `step`, and `kind.name` for each weight's state."""
        _need_state(f"{self._name}.state_dict", state)
        return FlatState(_flat(state))

    def load_state_dict(self, state: State, values: Mapping[str, Any]) -> State:
        """A state from `values`, named as in `state_dict`, in the layouts of `state`.

        Raises UsageError if names are missing or unknown, ShapeError or DTypeError if a value does
        not fit.
        """
        call = f"{self._name}.load_state_dict"
        _need_state(call, state)
        if not isinstance(values, Mapping):
            raise unfit(call, "the values", values, "give the dict that state_dict made")
        current = _flat(state)
        values_by_name = by_name(values)
        fix = "give what state_dict named, of the same weights and optimizer"
        need_same_names(call, current, values_by_name, fix)
        need_same_shapes(call, current, values_by_name, fix)
        new = {name: loaded(call, name, t, values_by_name[name]) for name, t in current.items()}
        out: State = {"step": new["step"]}
        for kind in state:
            if kind != "step":
                out[kind] = {name: new[f"{kind}.{name}"] for name in state[kind]}
        return out

    # -- weight decay -----------------------------------------------------------------------------
    def _decays(self, name: str, w: Tensor) -> bool:
        return bool(self.weight_decay) and decays(self._name, self.mask, name, w.ndim)


def _set(self: Any, name: str, value: Any) -> None:
    fix = f"make another one: optimizer = dataclasses.replace(optimizer, {name}=...)"
    if name == "lr":
        fix += "; or give it a schedule once: lr=optim.warmup_cosine(...)"
    if name not in self.__dataclass_fields__:
        fix = "keep what belongs to a run beside it; its settings are given where it is made"
    raise UsageError(
        f"{type(self).__name__}: {name} cannot be set, an optimizer does not change",
        optimizer=self,
        fix=fix,
    )


Optimizer.__getattr__ = no_attribute("Optimizer")  # type: ignore[attr-defined]  # unseen
_WITHIN: dict[str, Callable[[float], bool]] = {
    ">= 0": lambda x: 0 <= x < float("inf"),
    "> 0": lambda x: 0 < x < float("inf"),
    ">= 0 and < 1": lambda x: 0 <= x < 1,
}


def _at(x: Tensor, home: TensorType) -> Tensor:
    """`x` in the layout and dtype of `home`; it is sent in its own dtype."""
    return F.relayout(x, home.with_dtype(x.dtype)).to(home.dtype)


def _unless_set(master: Tensor, w: Tensor, dtype: DType) -> Tensor:
    """`master`, except where the weight `w`, of `dtype`, is not its rounded value: there the weight
    was set since, by a checkpoint or a bound. A difference below half a unit of `dtype` is
    rounding."""
    info = finfo(dtype.numpy)  # type: ignore[no-untyped-call]
    near = F.abs(w - master) <= F.abs(master) * float(info.eps / 2) + float(info.smallest_subnormal)
    return F.where(near, master, F.where(F.isfinite(w), w, master))


def _need_state(call: str, state: object) -> None:
    """Raises UsageError if `state` does not have the structure of an optimizer's state."""
    parts = state.items() if isinstance(state, dict) else [("", None)]
    if not all(isinstance(x, Tensor if kind == "step" else dict) for kind, x in parts):
        raise unfit(
            call,
            "the state",
            state,
            "give what optimizer.init(params) made, or the last update:"
            " params, state = optimizer.update(params, grads, state)",
        )


def _flat(state: State) -> dict[str, Tensor]:
    flat = {}
    for kind, part in state.items():
        if isinstance(part, Tensor):
            flat[kind] = part
        else:
            flat.update({f"{kind}.{name}": t for name, t in part.items()})
    return flat


def loaded(call: str, name: str, like: Tensor, value: Any) -> Tensor:
    """`value` in the dtype and layout of `like`, the state that it replaces."""
    if isinstance(value, Tensor):
        if value.mesh == like.mesh:
            return F.relayout(value.to(like.dtype), like.type)
        value = value.numpy()
    found = held_as(value.dtype)
    if found.is_float is not like.dtype.is_float:
        raise DTypeError(
            f"{call}: {name!r} has another dtype",
            have=like.type,
            given=f"{found}{list(value.shape)}",
            fix="give what state_dict named, of the same weights and optimizer",
        )
    return tensor(value, mesh=like.mesh, layout=like.type, dtype=like.dtype)


def _zeros(types: Sequence[TensorType]) -> list[Tensor]:
    """Zeros of these types, created together by one program per mesh when the first of them is
    used."""
    if current() is not None:
        return [emit("full", dtype=t.dtype, shape=t.shape, value=0, layout=t) for t in types]
    out = [Tensor(None, t) for t in types]
    made: dict[int, Tensor] = {}

    def take(i: int) -> Any:
        with RECORDING_LOCK:
            if out[i]._data is None:  # or else another thread was here first
                out[i]._data = make(i)
            return out[i]._data

    def make(i: int) -> Any:
        if i not in made:
            b = Builder("optimizer_init", settings().program)
            # `dist.place` may have chosen other types meanwhile.
            now = {
                j: z.type for j, z in enumerate(out) if z._data is None and z.mesh == out[i].mesh
            }
            nodes = [b("full", dtype=t.dtype, shape=t.shape, value=0, layout=t)
                     for t in now.values()]  # fmt: skip
            made.update(zip(now, run_graph(b.graph(nodes), []), strict=True))
        z = made.pop(i)
        return z.stored if z.type is out[i].type else redistribute_now(z, out[i].type).stored

    for i, z in enumerate(out):
        z._pending = partial(take, i)
    return out


def _wide_copy(w: Tensor, t: TensorType) -> Tensor:
    """`w` in f32 in the layout `t`; created later if `w` is still pending."""
    if w._pending is None:
        return F.relayout(w.to(f32), t)
    out = Tensor(None, t)

    def make() -> Any:
        return redistribute_now(run_now("cast", [w], {"dtype": f32})[0], out.type).stored

    out._pending = make
    return out


__all__ = ["Mask", "Optimizer", "Rate", "Slots", "State"]


# Weight decay masks: a regular expression or a function of a weight's name. None decays matrices,
# except those of norms and biases.

Mask = str | Callable[[str], bool] | None

# In stacked layers the weights of norms and biases are matrices, so names exclude them from decay.
UNDECAYED = re.compile(r"(^|\.)(\w*norm\w*|ln_?\w*)(\.|$)|(^|\.)\w*bias$")


def decays(of: str, mask: Any, name: str, ndim: int) -> bool:
    """Returns whether the optimizer `of` decays the weight `name`."""
    return selects(of, mask, name) if mask is not None else ndim >= 2 and not UNDECAYED.search(name)


def selects(of: str, mask: Any, name: str) -> bool:
    """Returns whether `mask` is true of `name`. Raises UsageError if it fails, as an optax mask
    does, which is a function of the tree of weights."""
    if isinstance(mask, str):
        return bool(re.search(mask, name))
    fix = "give a function of one weight's name; a mask of optax goes with optim.from_optax"
    try:
        found = mask(name)
    except (AttributeError, LookupError, TypeError) as error:  # it takes the name for a tree
        what = f"{of}: the mask fails for the weight {name!r}"
        raise UsageError(what, says=error, fix=fix) from error
    if found is None or isinstance(found, (np.bool_, bool, re.Match)) or is_number(found):
        return bool(found)
    raise unfit(of, f"what the mask gives for the weight {name!r}", found, fix)


def check_mask(of: str, mask: Any) -> None:
    """Raises UsageError if `mask` is neither a function nor a regular expression."""
    if isinstance(mask, str):
        try:
            re.compile(mask)
        except re.error as error:
            raise UsageError(
                f"{of}: mask {mask!r} is no regular expression: {error}",
                fix='write one, such as "weight$", or give a function of the name',
            ) from None
    elif mask is not None and not callable(mask):
        raise UsageError(
            f"{of}: mask is a {type(mask).__name__}",
            fix="give a function from a weight's name to a bool, or a regular expression",
        )


def need_match(of: str, mask: Any, weights: Iterable[str]) -> None:
    """Raises UsageError if `mask` selects none of `weights`."""
    names = list(weights)
    if not any(selects(of, mask, name) for name in names):
        named = f" {mask!r} is in" if isinstance(mask, str) else " is true of"
        raise UsageError(
            f"{of}: mask{named} no weight's name, so nothing decays",
            weights=", ".join(names[:5]),
            fix="write what the names contain, or set weight_decay=0",
        )
