"""Recipes of deferred values: they make the data in the layout of the first use.

A new weight has a recipe and no data. So have zeros, placed tensors, and casts, products by a
number, slices and transposes of such tensors: all are made when a value is read.

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

from ...core.layout import TensorType
from ...ir.graph.build import spread_to
from ...ops.cast import cast
from ...ops.movement import broadcast_to, transpose
from ...ops.op import Attrs, Op

MOST_STEPS = 16  # the most deferred ops in one recipe; a further op makes the data first


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function from a type, of the value's shape and dtype, to the data; each call makes it anew.

    `steps` counts the ops that it runs, without first values. `of_host` is True if it holds host
    values. The recipe is dropped once the value is made, unless it is `permanent`, for recipes that
    hold nothing large: then processes that have read the value, and others that have not, run the
    same ops on it.
    """

    make: Callable[[TensorType], Any]
    steps: int = 0
    of_host: bool = False
    permanent: bool = False

    def __call__(self, to: TensorType) -> Any:
        return self.make(to)


def can_wait(op: Op, recipes: list[Recipe]) -> bool:
    """Returns whether `op` on the results of `recipes` may be deferred: it is elementwise or moves
    elements, without effects or sums, and it does not keep a host value alive in place of a smaller
    result."""
    if 1 + sum(r.steps for r in recipes) > MOST_STEPS or op.many or op.bodies or op.varying:
        return False
    if any(r.of_host for r in recipes) and op is not cast:
        return False
    return bool(op.elements) and op.pure


def wanted(op: Op, ins: tuple[TensorType, ...], attrs: Attrs, to: TensorType) -> list[TensorType]:
    """Returns the layouts of the arguments, of types `ins`, from which each device makes its block
    of the result `to` without communication; replicated if no rule is known."""
    if op is transpose:
        dims = [to.dims[attrs["perm"].index(d)] for d in range(to.rank)]
        return [to.with_dims(dims).with_dtype(ins[0].dtype)]
    if op is broadcast_to or op.elements in ("computed", "same"):
        return [spread_to(to, t) for t in ins]
    return [t.replicated().on(to.mesh) for t in ins]


__all__ = ["Recipe", "can_wait", "wanted"]
