"""Layers as functions with weights of their own: `op.transformer_block(x, depth=12)`."""

from __future__ import annotations

from typing import Any

from ..core.checks import one_of
from ..core.declared import Count
from ..core.tensor_checks import floats, ranked
from ..lang.jit.weight_store import weights
from ..lang.record.operands import as_tensor
from ..lang.record.recorder import named_scope
from ..lang.value.tensor import Tensor
from .gpt_config import GPTConfig
from .module import Module
from .stack import Stack
from .transformer import TransformerBlock

HEAD = 64  # the head size if no number of heads is given


def default_heads(d: int) -> int:
    """Heads of size 64; if 64 does not divide `d`, the largest of 8, 4, 2, 1 heads that divides it.

    >>> default_heads(768), default_heads(48), default_heads(30)
    (12, 8, 2)
    """
    return d // HEAD if d % HEAD == 0 else next(n for n in (8, 4, 2, 1) if d % n == 0)


def transformer_block(
    x: Tensor,
    depth: Count = 1,
    heads: int | None = None,
    hidden: int | None = None,
    *,
    name: str = "",
    **options: Any,
) -> Tensor:
    """`depth` causal transformer blocks on x [B, S, d], with weights of their own (guide 3, 4.4).

    `heads` defaults to heads of size 64 (or 8, 4, 2 or 1 heads if 64 does not divide d), `hidden`
    to 4 d. `options` are the fields of `nn.GPTConfig` that concern a block: kv_heads, norm,
    activation, positions, dropout, loop, remat, … The weights belong to the enclosing stage,
    training step or recorded function: its first call here is `block0`, the next `block1`. Calls
    with the same `name` share weights. Outside of all of these, each call without a name makes new
    weights. With `depth` above 1 the weights of the layers are stacked along dim 0.

    With `context="ring"` x must be in zig-zag order, which is not checked: over n devices pass
    `nn.zigzag(x, n)`; `nn.unzigzag(y, n)` is the result in the order of x. Raises ShapeError if x
    is not [B, S, d], DTypeError if it is not of floats, UsageError if an option is unknown.
    """
    t = as_tensor(x)
    ranked("transformer_block", "x", t.type, 3, "give [batch, sequence, d]; embed token ids first")
    floats("transformer_block", "x", t.type, "embed token ids first, or cast with .to(ts.f32)")
    d = t.shape[-1]
    if heads is None:
        heads = default_heads(d)
    config = _config(d, depth, heads, hidden, options)

    def make() -> Module:
        block = TransformerBlock(config)
        return block if depth == 1 else Stack(block, depth, config.loop, config.remat)

    label, block = weights(
        "block", make, config, t.mesh, name, lambda path: path.removeprefix("block.")
    )
    with named_scope(label):
        out: Tensor = block(t)
    return out


# The fields of GPTConfig that belong to the model, not to a block.
_MODEL = (
    "vocab", "seq", "d", "layers", "heads", "hidden", "tied", "windows", "local_rope",
    "embed_scale", "logit_cap",
)  # fmt: skip


def _config(
    d: int, depth: int, heads: int, hidden: int | None, options: dict[str, Any]
) -> GPTConfig:
    known = [k for k in GPTConfig.__dataclass_fields__ if k not in _MODEL]
    for option in options:
        one_of("transformer_block", "an option", option, known)
    return GPTConfig(d=d, layers=depth, heads=heads, hidden=hidden, **options)
