"""Attention as one op, for kernels that do not store scores (Dao et al. 2022), and its gradient.

q is [..., R, S, D], k [..., T, D], v [..., T, E]: R query heads share one key head. The leading
dims may be split, all other dims are whole. With `causal` the last query attends to all keys, each
query before it to one key less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.errors import GraphError, ShapeError
from ..core.layout import TensorType
from ..core.tensor_checks import one_dtype
from .batch import last_dims
from .elementwise import need
from .op import Array, Attrs, Build, Call, Inferred, Op, define
from .trailing_dims import leading, propagate_heads

TAILS = (3, 2, 2, 3)  # how many dims of q, k, v and the result's gradient are whole


def _inferred(name: str, ins: tuple[TensorType, ...]) -> Inferred:
    """The type of the result [..., R, S, E] for q, k, v; with a fourth argument, the result's
    gradient, the types of the gradients of q, k and v."""
    need(name, ins, ("float",))
    one_dtype(name, ins)
    q, k, v = ins[:3]
    lead = q.shape[:-3]
    shape = (*lead, *q.shape[-3:-1], *v.shape[-1:])
    fits = q.rank > 3 and (k.shape, v.shape) == (
        (*lead, *k.shape[-2:-1], *q.shape[-1:]),
        (*lead, *k.shape[-2:-1], *v.shape[-1:]),
    )
    if not fits or any(t.shape != shape for t in ins[3:]):
        raise ShapeError(
            f"{name}: the shapes do not fit",
            rows=[(f"arg {i}", t) for i, t in enumerate(ins)],
            fix="give q [..., R, S, D], k [..., T, D], v [..., T, E]",
        )
    operands = list(zip(ins, TAILS, strict=False))
    tails = [t.shape[-n:] for t, n in operands[:3]] if len(ins) > 3 else [shape[-3:]]
    heads = leading([t.rank - n for t, n in operands])
    outs = [(q.dtype, tail) for tail in tails]
    return propagate_heads(name, heads, tuple(t.complete() for t in ins), outs)


def _flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    """FLOPs of two products, for scores and for results; with `causal` over half of the scores."""
    q, v = ins[0].shape, ins[2].shape
    scores = math.prod(q[:-1]) * v[-2]
    return scores * (q[-1] + v[-1]) * (1 if attrs["causal"] else 2)


def _local(c: Call, q: Array, k: Array, v: Array) -> Array:
    return c.xp.attention(q, k, v, **c.attrs)


def _grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    made = b("attention_grad", *n.args, g, **n.attrs)
    return [b("item", made, index=i) for i in range(3)]


define(
    Op(
        "attention",
        lambda ins, attrs: _inferred("attention", ins),
        _local,
        _grad,
        flops=_flops,
        attrs="causal scale",
        memory="product",
        batch=last_dims,
    )
)


def _grad_local(c: Call, *args: Array) -> Any:
    return c.xp.attention_grad(*args, **c.attrs)


def _no_second(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    raise GraphError(
        "attention: the gradient of a kernel has no gradient itself",
        gradient=", ".join(map(str, n.types)),
        fix='give nn.flash_attention implementation="tiles", a GPTConfig'
        ' attention_implementation="tiles"',
    )


# The gradients of q, k and v. Five products, because the scores are recomputed.
define(
    Op(
        "attention_grad",
        lambda ins, attrs: _inferred("attention_grad", ins),
        _grad_local,
        _no_second,
        flops=lambda ins, outs, attrs: 5 * _flops(ins, outs, attrs) // 2,
        attrs="causal scale",
        batch=last_dims,
    )
)
