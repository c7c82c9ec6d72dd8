"""optax optimizers on a mesh: their updates traced by JAX and added as ops.

>>> import optax, tessera as ts
>>> opt = ts.optim.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.5)))
>>> params = {"w": ts.tensor([1.0, 2.0])}
>>> params, state = opt.update(params, {"w": ts.tensor([3.0, -4.0])}, opt.init(params))
>>> params["w"].numpy().round(3).tolist(), list(opt.state_dict(state))
([0.5, 2.5], ['1.0.0', '1.0.1.w', '1.0.2.w'])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from ..core.checks import unfit
from ..core.errors import UsageError
from ..core.layout import TensorType
from ..core.locks import RECORDING_LOCK
from ..lang.autodiff.tape import mark_as_updates
from ..lang.foreign.jax_program import as_ops
from ..lang.jit.jit import Jit
from ..lang.jit.trace import trace
from ..lang.math import functions as F
from ..lang.parallel.flat_state import FlatState, by_name
from ..lang.parallel.strategy import Strategy, layout_rule
from ..lang.record.operands import as_tensor
from ..lang.record.parameter import trained
from ..lang.record.recorder import current
from ..lang.record.tree import Path, Spec, aligned, flatten, path_name, paths, spec_paths, unflatten
from ..lang.value.eager import redistribute_now
from ..lang.value.tensor import Tensor
from .base import loaded
from .trees import named, need_same_names, need_same_shapes, one_line

CALLER = "from_optax"


def from_optax(tx: Any) -> FromOptax:
    """The optax optimizer `tx` with the `init` and `update` of Tessera's optimizers.

    Its updates become ops of the program, so they run inside `ts.jit` on any mesh, in the layout of
    the state: state of a weight's shape has the layout that the strategy gives optimizer state, all
    other state is replicated. Weight decay, masks and dtypes are those of `tx`, which sees a module
    as the dict of its trained parameters by name. `update` raises UsageError if `tx` uses JAX
    operations without a counterpart here, such as random keys or `while` loops, or needs further
    arguments, such as the loss. Raises UsageError if `tx` has no `init` and `update`.
    """
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise unfit(CALLER, "tx", tx, "give a GradientTransformation, such as optax.adamw(1e-3)")
    return FromOptax(tx)


@final
@dataclass(frozen=True, slots=True)
class FromOptax:
    """An optax optimizer, as made by `from_optax`."""

    tx: Any

    def init(self, params: Any, strategy: Strategy | None = None) -> Any:
        """The state before the first update: a tree of tensors with the structure of `tx.init`.

        State of a weight's shape has the layout that `strategy.optimizer` gives, or without a
        strategy that of its weight. Raises UsageError if `params` holds anything but float tensors,
        StrategyError if `strategy` does not fit.
        """
        weights = named(f"{CALLER}.init", params)
        rule = None if strategy is None else layout_rule(strategy, "optimizer")
        spec, specs = flatten(trained(params))[1], list[Spec]()

        def start(*xs: Any) -> list[Any]:
            leaves, found = flatten(self.tx.init(unflatten(spec, xs)))
            specs[:] = [found]
            return leaves

        def run(*xs: Tensor) -> list[Tensor]:
            out = as_ops(f"{CALLER}.init", start, xs)
            of = _weights_of(spec_paths(specs[0]), out, trained(params))
            return [_laid(t, name, weights, rule) for t, name in zip(out, of, strict=True)]

        begin, now = Jit(run, (), True).at_once, [w.now() for w in weights.values()]
        if current() is not None or all(w._pending is None for w in now):
            leaves = begin(*now)
        else:
            types = [n.type for n in trace(run, *now).outputs]
            leaves = _later(types, lambda: begin(*now))
        return unflatten(specs[0], leaves)

    def update(self, params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        """Returns (new weights, new state) after one step along `grads`, like `Optimizer.update`.

        New weights and state keep the layouts of the old ones. Raises UsageError or ShapeError if
        the trees do not match.
        """
        call = f"{CALLER}.update"
        ws, gs = named(f"{call} (params)", params), named(f"{call} (grads)", grads)
        fix = "the order is update(params, grads, state), with grads of ts.grad(loss, params)"
        need_same_names(f"{call}: params and grads", ws, gs, fix)
        need_same_shapes(f"{call}: params and grads", ws, gs, fix)
        tree = trained(params)
        spec = flatten(tree)[1]
        leaves, state_spec = flatten(state)
        held = [as_tensor(x) for x in leaves]
        homes = {n: (w.type if gs[n].mesh is None else gs[n].type) for n, w in ws.items()}
        for name, t in zip(_weights_of(spec_paths(state_spec), held, tree), held, strict=True):
            if name is not None:
                homes[name] = t.type
        count = len(ws)

        def step(*xs: Any) -> list[Any]:
            ps, ds = (unflatten(spec, xs[i : i + count]) for i in (0, count))
            try:
                moves, new = self.tx.update(ds, unflatten(state_spec, xs[2 * count :]), ps)
            except TypeError as error:
                raise UsageError(
                    f"{call}: tx cannot be called with gradients, state and weights alone",
                    optax=str(error).splitlines()[0],
                    fix="give an optimizer that needs no more: one that asks for the loss, such as"
                    " lbfgs or reduce_on_plateau, does not go with a compiled step",
                ) from None
            pairs = zip(xs, aligned(spec, moves), strict=False)
            return [*((p + u).astype(p.dtype) for p, u in pairs), *aligned(state_spec, new)]

        with one_line("optimizer"):
            moved = [
                F.relayout(x, homes[n].complete().with_dtype(x.dtype))
                for tensors in (ws, {n: gs[n] for n in ws})
                for n, x in tensors.items()
            ]
            out = as_ops(call, step, [*moved, *held])
            kept = [
                F.relayout(t, old.type.complete().with_dtype(t.dtype))
                for t, old in zip(out, (*ws.values(), *held), strict=True)
            ]
        mark_as_updates(kept[:count])
        return unflatten(spec, kept[:count]), unflatten(state_spec, kept[count:])

    # -- on disk ----------------------------------------------------------------------------------
    def state_dict(self, state: Any) -> dict[str, Tensor]:
        """The state as one flat dict, by the dotted path of each tensor."""
        return FlatState(zip(map(path_name, paths(state)), flatten(state)[0], strict=True))

    def load_state_dict(self, state: Any, values: Mapping[str, Any]) -> Any:
        """A state from `values`, named as in `state_dict`, in the layouts of `state`.

        Raises UsageError if names are missing or unknown, ShapeError or DTypeError if a value does
        not fit.
        """
        call, have = f"{CALLER}.load_state_dict", self.state_dict(state)
        given = by_name(values)
        fix = "give what state_dict named, of the same weights and optimizer"
        need_same_names(call, have, given, fix)
        need_same_shapes(call, have, given, fix)
        return unflatten(flatten(state)[1], [loaded(call, n, t, given[n]) for n, t in have.items()])


def _weights_of(
    state_paths: Sequence[Path], state: Sequence[Tensor], tree: Any
) -> list[str | None]:
    """For each piece of state the name of its weight: the weight of its shape with the longest path
    that is the end of its own path. None if there is no such weight."""
    weights = sorted(zip(paths(tree), flatten(tree)[0], strict=True), key=lambda w: -len(w[0]))
    return [
        next(
            (path_name(p) for p, w in weights
             if at[len(at) - len(p) :] == p and t.shape == w.shape), None,
        )
        for at, t in zip(state_paths, state, strict=True)
    ]  # fmt: skip


def _laid(t: Tensor, name: str | None, weights: Mapping[str, Tensor], rule: Any) -> Tensor:
    """State in the layout that `rule` gives for the weight `name`; replicated if `name` is None."""
    if name is not None:
        like = weights[name].type.complete().with_dtype(t.dtype)
        return F.relayout(t, like if rule is None else rule(name, like))
    mesh = next((w.mesh for w in weights.values() if w.mesh is not None), None)
    whole: TensorType = t.type.complete().replicated()
    return F.relayout(t, whole if mesh is None else whole.on(mesh))


def _later(types: Sequence[TensorType], begin: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """Tensors of these types, which `begin` makes together when the first of them is used."""
    out = [Tensor(None, t) for t in types]
    made: dict[int, Tensor] = {}

    def take(i: int) -> Any:
        with RECORDING_LOCK:
            if out[i]._data is None:  # or else another thread was here first
                if i not in made:
                    made.update(enumerate(begin()))
                z, to = made.pop(i), out[i].type  # `dist.place` may have chosen another type
                out[i]._data = z.stored if z.type is to else redistribute_now(z, to).stored
            return out[i]._data

    for i, z in enumerate(out):
        z._pending = partial(take, i)
    return out
