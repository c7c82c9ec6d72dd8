"""`cond` and `switch`: one of several functions runs, chosen by a value on the devices.

Both functions are recorded. Tensors that they read become arguments of one op, whose gradient
chooses between the gradients of the two (passes/branches.py). Devices that choose together may have
collectives in a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core.checks import unfit
from ...core.dtypes import bool_, int32
from ...core.errors import DTypeError, ShapeError, UsageError
from ...core.layout import TensorType, shard_count
from ...ir.graph.node import Graph, Node, input_node
from ..math.functions import clip, relayout, reshape
from ..record.operands import as_tensor, emit_many
from ..record.recorder import Recorder, current, recording
from ..record.tree import Spec, fitted, flatten, tree_map, unflatten
from ..value.checks import asked_function
from ..value.host_data import is_array
from ..value.tensor import Tensor
from .iteration import iteration_keys

Branch = Callable[..., Any]


def cond(pred: Any, true_fn: Branch, false_fn: Branch, *operands: Any) -> Any:
    """`true_fn(*operands)` if `pred` is true, else `false_fn(*operands)`, as `jax.lax.cond`.

    `pred` is one bool. Both functions return trees of tensors of one structure, with the same
    shapes and dtypes; they may use tensors from outside. Only one of them runs, on all devices; its
    gradient is that of the function that ran, and the gradients of the other are zeros. If devices
    have bools of their own (in a local body), each runs its own function, without collectives. A
    Python bool chooses at once. Inside of `ts.vmap` a `pred` of each row selects from both results.

    Raises DTypeError or ShapeError if `pred` is not one bool, or if the functions return different
    shapes, dtypes or structures; LayoutError if devices choose by their own bools and a function
    has a collective; UsageError if a function shows a value.

    >>> import tessera as ts
    >>> half = lambda x: ts.cond(ts.sum(x) > 1.0, lambda x: x / 2, lambda x: x, x)
    >>> half(ts.tensor([3.0, 1.0])).numpy().tolist(), half(ts.tensor([0.5])).item()
    ([1.5, 0.5], 0.5)
    """
    branches = [
        asked_function("cond", w, f) for w, f in (("true_fn", true_fn), ("false_fn", false_fn))
    ]
    operands = _operands(operands)
    if isinstance(pred, (bool, np.bool_)):
        return branches[not pred](*operands)
    pick = as_tensor(pred)
    if pick.dtype is not bool_ or pick.shape:
        raise (ShapeError if pick.shape else DTypeError)(
            "cond: `pred` is not one bool",
            pred=pick.type,
            fix="compare, and join several with ts.all or ts.any; ts.where chooses by element",
        )
    return chosen("cond", pick, [partial(f, *operands) for f in branches])


def switch(index: Any, branches: Sequence[Branch], *operands: Any) -> Any:
    """`branches[index](*operands)`, as `jax.lax.switch`: one of several functions runs.

    `index` is one integer; a value outside of 0 to n - 1 counts as the nearest of these. The
    branches, and errors, are as in `cond`. Raises UsageError if there is no branch.

    >>> import tessera as ts
    >>> powers = [lambda x: x, lambda x: x * x, lambda x: x * x * x]
    >>> [ts.switch(ts.tensor(i), powers, ts.tensor(3.0)).item() for i in range(3)]
    [3.0, 9.0, 27.0]
    """
    if not isinstance(branches, (list, tuple)) or not branches:
        raise unfit("switch", "the branches", branches, "give a list of functions")
    functions = [asked_function("switch", f"branch {i}", f) for i, f in enumerate(branches)]
    calls = [partial(f, *_operands(operands)) for f in functions]
    at = as_tensor(index)
    if not at.dtype.is_int or at.shape:
        raise (ShapeError if at.shape else DTypeError)(
            "switch: `index` is not one integer",
            index=at.type,
            fix="give one number, such as ts.argmax(x); ts.vmap(f) for several",
        )
    if isinstance(index, int):
        return calls[min(max(index, 0), len(calls) - 1)]()
    at = at if at.dtype.bytes > 1 else at.to(int32)  # i8 holds no number of a 200th branch
    return _halved(clip(at, 0, len(calls) - 1).to(int32), calls, 0)


def _halved(index: Tensor, calls: Sequence[Callable[[], Any]], first: int) -> Any:
    """The call number `index`, counted from `first`: by halves, so that a gradient computes few
    branches again."""
    if len(calls) == 1:
        return calls[0]()
    half = len(calls) // 2
    sides = [
        partial(_halved, index, calls[:half], first),
        partial(_halved, index, calls[half:], first + half),
    ]
    return chosen("switch", index < first + half, sides)


def _operands(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """`operands` with arrays and numbers as tensors."""

    def one(x: Any) -> Any:
        number = isinstance(x, (int, float, bool))
        return as_tensor(x) if number or is_array(x) else x

    return tuple(tree_map(one, x) for x in operands)


def chosen(name: str, pick: Tensor, calls: Sequence[Callable[[], Any]]) -> Any:
    """The results of the first call if `pick` is true, else of the second."""
    pick = relayout(pick, pick.type.complete())
    sides = [_Recorded(name, call) for call in calls]
    yes, no = sides
    no.outs = fitted(
        f"{name}: the branches return other shapes, dtypes or structures",
        ("one", "another"), yes.spec, yes.outs, no.spec, no.outs,
        "return values of one shape and dtype from each, e.g. x.to(ts.f32)",
    )  # fmt: skip
    types = [_common(a.type, b.type) for a, b in zip(yes.outs, no.outs, strict=True)]
    outer = list({id(t): t for side in sides for t, _ in side.recorder.captured}.values())
    keys = [reshape(k, k.shape[1:]) for k in iteration_keys(1, [*yes.draws, *no.draws])]
    args = (*outer, *keys)
    bodies = [side.graph(types, outer, sides) for side in sides]
    outs = emit_many("cond", pick, *args, yes=bodies[0], no=bodies[1])
    return unflatten(yes.spec, outs)


class _Recorded:
    """A recorded branch: its results, their structure, and the random keys that it draws with."""

    spec: Spec

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.recorder = r = Recorder(name, current())
        r.draws = []
        with recording(r):
            leaves, self.spec = flatten(call())
            self.outs = [as_tensor(x) for x in leaves]
            self.spec = flatten(unflatten(self.spec, self.outs))[1]
            for t in self.outs:
                r.node(t)
        if r.host_outputs:
            raise UsageError(
                f"{name}: a branch shows or records a value",
                fix="return the value, and show it after the branches",
            )
        self.draws = r.draws or []

    def graph(
        self, types: Sequence[TensorType], outer: Sequence[Tensor], sides: Sequence[_Recorded]
    ) -> Graph:
        """The branch with results of these types, as a function of the tensors `outer` and of the
        keys of all `sides`."""
        r = self.recorder
        with recording(r):
            outs = [r.node(relayout(t, to)) for t, to in zip(self.outs, types, strict=True)]
        mine = {id(t): node for t, node in r.captured}
        inputs: list[Node] = [
            mine.get(id(t)) or input_node(t.type, f"x{i}") for i, t in enumerate(outer)
        ]
        for side in sides:
            keys = [side.recorder.node(k) for k in side.draws]
            inputs += keys if side is self else [input_node(k.type, "random_key") for k in keys]
        whole = r.builder.graph(outs)
        return whole.part(inputs, whole.outputs)


def _common(a: TensorType, b: TensorType) -> TensorType:
    """The type of a result that two branches give in the types `a` and `b`: the more split one."""
    if a is not b:
        a, b = a.complete(), b.complete()
    parts = [shard_count(t.split_axes, t.sizes) if t.mesh is not None else 0 for t in (a, b)]
    t = b if parts[1] > parts[0] else a
    varying = {*a.varying, *b.varying}
    return t.with_varying(varying) if varying != {*t.varying} else t
