"""Recipes of values that are not made yet, in whatever layout they are wanted then.

A new weight has a recipe and no data. So do zeros, what is converted, scaled, cut or turned of
such tensors, and what is placed: it is all made when a value is read.

>>> import tessera as ts
>>> from tessera import dist
>>> far = dist.Mesh(("dp", "tp"), shape=(128, 8))  # of devices that are not here
>>> w = ts.nn.Parameter(65536, 16384).to(ts.bf16).T * 2
>>> dist.place({"w": w}, dist.strategy("tensor_parallel", rules=[("w", 0)]), far)["w"].type
bf16[16384@tp, 65536]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.layout import TensorType
from ..ir.graph.build import spread_to
from ..ops.cast import cast
from ..ops.movement import broadcast_to, transpose
from ..ops.op import Attrs, Op

MOST_STEPS = 16  # ops that wait in one recipe; a longer one is run up to there


@dataclass(frozen=True, slots=True)
class Recipe:
    """A call with a type of the value's shape and dtype makes the data, each time anew.

    `steps` are the ops that it runs, beyond first values. `of_host` if it holds values of the host.
    It is let go of once the value is there, unless it is `kept`, as one that holds nothing large:
    then processes that have read the value, and others that have not, do the same with it.
    """

    make: Callable[[TensorType], Any]
    steps: int = 0
    of_host: bool = False
    kept: bool = False

    def __call__(self, to: TensorType) -> Any:
        return self.make(to)


def can_wait(op: Op, recipes: list[Recipe]) -> bool:
    """Whether `op` on what `recipes` make may wait until its result is read: it adds nothing up,
    has no effect, and no value of the host is kept for it in place of a smaller result."""
    if 1 + sum(r.steps for r in recipes) > MOST_STEPS or op.many or op.bodies or op.own:
        return False
    if any(r.of_host for r in recipes) and op is not cast:
        return False
    return bool(op.elements) and op.pure


def wanted(op: Op, ins: tuple[TensorType, ...], attrs: Attrs, to: TensorType) -> list[TensorType]:
    """The layouts of arguments of types `ins` of which each device makes its block of the result
    `to` by itself; whole where nothing says better."""
    if op is transpose:
        dims = [to.dims[attrs["perm"].index(d)] for d in range(to.rank)]
        return [to.with_dims(dims).with_dtype(ins[0].dtype)]
    if op is broadcast_to or op.elements in ("computed", "same"):
        return [spread_to(to, t) for t in ins]
    return [t.replicated().on(to.mesh) for t in ins]


__all__ = ["Recipe", "can_wait", "wanted"]
