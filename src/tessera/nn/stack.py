"""Repeated layers: one block's code, with separate weights for each layer.

The layers are unrolled or run as a loop, by cost: unrolled they run faster (each layer is scheduled
and fused separately), as a loop they compile in the time of one layer. A pipeline needs them
unrolled: each stage then holds the weights of its own layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..core.declared import Count, Flag
from ..core.errors import UsageError
from ..core.public import checked
from ..cost.loops import write_out
from ..lang.autodiff.regions import region
from ..lang.autodiff.scan import scan
from ..lang.math import functions as F
from ..lang.record.operands import emit_many
from ..lang.record.parameter import Parameter
from ..lang.record.recorder import choose
from ..lang.record.tree import Path, flatten, unflatten
from ..lang.value.tensor import Tensor
from .module import Module
from .module_scopes import name_part
from .module_state import changed_tensors, set_tensors, values_of


@checked
class Stack(Module):
    """`depth` blocks like `block`, applied one after the other.

    `loop` None chooses by cost, True loops, False unrolls. `remat` recomputes each layer in the
    backward pass instead of keeping its intermediates: True (or "recompute") all of them,
    "products" all except results of products and loops, "offload" as well, but keeps these results
    in the host's memory. A number recomputes so many of the first layers. With True or "products",
    `loop` None is a loop; with the others layers are unrolled.

    The weights of all layers are stacked along a leading dim; with `stacked=False` each layer has
    separate tensors, and the layers are unrolled. A call may give `each`: a dict of tensors [depth,
    ...], one row for each layer, and `shared`, a dict of tensors for all layers. If a block returns
    (x, more), the stack returns (x, the tensors of `more` stacked, [depth, ...]). Tensors that a
    layer sets are kept.
    """

    def __init__(
        self,
        block: Module,
        depth: Count,
        loop: bool | None = None,
        remat: bool | str | int = False,
        stacked: Flag = True,
    ):
        self.depth, self.loop, self.remat = depth, loop, remat
        if loop and not self._in_loops:
            raise UsageError(
                f"Stack: a loop over layers cannot have remat={remat!r}",
                fix="leave loop=None: the layers are unrolled",
            )
        leaves, spec = flatten(block)
        if stacked:
            self.block = unflatten(spec, [self._stacked_parameter(x, (depth,)) for x in leaves])
        elif loop:
            raise UsageError(
                "Stack: a loop needs the weights of all layers in one tensor",
                fix="leave loop=None, or stacked=True",
            )
        else:
            self.layers = [
                unflatten(spec, [self._stacked_parameter(x, ()) for x in leaves])
                for _ in range(depth)
            ]
        self.scope_name = "layers"

    @staticmethod
    def _stacked_parameter(x: Any, lead: tuple[int, ...]) -> Any:
        """A parameter of the block for all layers, created anew with `lead` dims in front. A buffer
        is repeated."""
        if not isinstance(x, Tensor):
            return x
        if x.remake is not None:
            return x.remake((*lead, *x.shape))
        if isinstance(x, Parameter):
            raise UsageError(
                "Stack: a parameter of the block has values already, so it cannot be made for every"
                " layer",
                parameter=x.type,
                fix="make it of sizes: nn.Parameter(4, 8, init=...)",
            )
        return F.broadcast_to(x, (*lead, *x.shape)) if lead else x

    def __call__(
        self, x: Tensor, each: Any = None, shared: dict[str, Tensor] | None = None, **options: Any
    ) -> Any:
        blocks = self.__dict__.get("layers") or [self.block]
        opened = [flatten(block) for block in blocks]
        inside = [[i for i, v in enumerate(x) if isinstance(v, Tensor)] for x, _ in opened]
        changed: dict[Path, Tensor] = {}  # tensors that the last layer set

        def layer(h: Tensor, slices: Any, of: int = 0, name: str = "layers") -> tuple[Tensor, Any]:
            parts, own = slices if own_tensors else (slices, ())
            (leaves, spec), at = opened[of], inside[of]
            now = list(leaves)
            for i, w in zip(at, parts, strict=True):
                now[i] = w
            block = unflatten(spec, now)
            before = values_of(block)
            name_part(block, name)
            told = {**(unflatten(own_spec, own) or {}), **(shared or {})}
            out = block(h, told, **options) if told else block(h)
            x, more = out if isinstance(out, tuple) else (out, ())
            changed.clear()
            changed.update(changed_tensors("Stack", block, before))
            return x, (more, tuple(changed.values()))

        again = self._policy != "save"
        own_tensors, own_spec = flatten(each)
        weights = [tuple(x[i] for i in at) for (x, _), at in zip(opened, inside, strict=True)]
        if "layers" not in self.__dict__:
            looped = self.loop
            if looped is None and again:
                looped = self._in_loops
            elif looped is None:
                usual, other = "unrolled", "loop"
                if not write_out(self.depth):
                    usual, other = other, usual
                looped = choose("layers", usual, (other,)) == "loop"
            if looped:
                xs = (weights[0], own_tensors) if own_tensors else weights[0]
                x, (more, new) = scan(layer, x, xs, policy=self._policy)
                set_tensors(blocks[0], zip(changed, new, strict=True))
                return x if _nothing(more) else (x, more)
            weights = list(zip(*(emit_many("unstack", w) for w in weights[0]), strict=True))
        owned = zip(*(emit_many("unstack", t) for t in own_tensors), strict=True)
        slices = list(zip(weights, owned, strict=True)) if own_tensors else weights
        found, news = [], []
        own = "layers" in self.__dict__
        for i, parts in enumerate(slices):
            run = partial(layer, of=i if own else 0, name=str(i))
            call = partial(run, x, parts)
            apart = again and i < self._recomputed
            x, (more, new) = region("layer", call, self._policy) if apart else call()
            found.append(more)
            news.append(new)
            if own:
                set_tensors(blocks[i], zip(changed, new, strict=True))
        if not own:
            set_tensors(blocks[0], zip(changed, map(F.stack, zip(*news, strict=True)), strict=True))
        if _nothing(found[0]):
            return x
        spec = flatten(found[0])[1]
        rows = zip(*(flatten(more)[0] for more in found), strict=True)
        return x, unflatten(spec, [F.stack(row) for row in rows])

    @property
    def _policy(self) -> str:
        if isinstance(self.remat, str):
            return self.remat
        return "recompute" if self.remat else "save"

    @property
    def _in_loops(self) -> bool:
        """Returns whether a loop over layers can recompute them so."""
        whole = self.remat is True or self.remat in ("save", "recompute", "products")
        return whole or not self.remat

    @property
    def _recomputed(self) -> int:
        """The number of layers, from the first on, that are recomputed."""
        whole = isinstance(self.remat, (bool, str))
        return self.depth if whole else int(self.remat)


def _nothing(more: Any) -> bool:
    return isinstance(more, tuple) and not more
