"""Repeated layers: one block's code, its weights stacked along a leading dim.

The layers are written out one by one or run as a loop, by cost: written out they run faster (each
layer is scheduled and fused on its own), as a loop they compile in the time of one.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import UsageError, fail
from ..cost.loops import write_out
from ..lang.checks import whole
from ..lang.loop import scan
from ..lang.tensor import Tensor, emit_many
from ..lang.tree import flatten, unflatten
from .module import Module


class Stack(Module):
    """`depth` blocks like `block`, applied one after the other.

    `loop` None chooses by cost, True loops, False writes out. `remat` computes each layer again in
    the backward pass instead of keeping its insides: True (or "recompute") all of them, "products"
    all but the results of products and loops. It makes `loop` None a loop.
    """

    def __init__(
        self, block: Module, depth: int, loop: bool | None = None, remat: bool | str = False
    ):
        depth = whole("Stack", "depth", depth, 1)
        self.depth, self.loop, self.remat = depth, loop, remat
        leaves, spec = flatten(block)
        self.block = unflatten(spec, [self._stacked(x) for x in leaves])
        self.scope_name = "layers"

    def _stacked(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.remake is None:
            raise fail(
                UsageError,
                "Stack: a tensor of the block is not a Parameter, so it cannot be stacked",
                [("tensor", x.type)],
                fix="make the block's weights with nn.Parameter(...)",
            )
        return x.remake((self.depth, *x.shape))

    def __call__(self, x: Tensor) -> Tensor:
        leaves, spec = flatten(self.block)
        at = [i for i, v in enumerate(leaves) if isinstance(v, Tensor)]
        weights = tuple(leaves[i] for i in at)

        def layer(h: Tensor, parts: Any) -> Tensor:
            now = list(leaves)
            for i, w in zip(at, parts, strict=True):
                now[i] = w
            out: Tensor = unflatten(spec, now)(h)
            return out

        # A layer that is written out twice is merged into one by the compiler: only in a loop is
        # it computed again.
        again = self._policy != "save"
        looped = again or not write_out(self.depth) if self.loop is None else self.loop
        if looped:
            return scan(lambda h, p: (layer(h, p), ()), x, weights, policy=self._policy)[0]  # type: ignore[no-any-return]
        layers = list(zip(*(emit_many("unstack", w) for w in weights), strict=True))
        for parts in layers:
            x = self._once(layer, x, parts) if again else layer(x, parts)
        return x

    @property
    def _policy(self) -> str:
        if isinstance(self.remat, str):
            return self.remat
        return "recompute" if self.remat else "save"

    def _once(self, layer: Any, x: Tensor, parts: Any) -> Tensor:
        """One layer as a loop of one turn, whose insides are computed again backwards."""
        one = tuple(w.reshape(1, *w.shape) for w in parts)
        return scan(lambda h, p: (layer(h, p), ()), x, one, policy=self._policy)[0]  # type: ignore[no-any-return]
