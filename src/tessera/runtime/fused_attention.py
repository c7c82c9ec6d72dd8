"""Attention and its gradient: by the cuDNN kernel of `jax.nn`, which stores no scores; with all
scores where that is not available."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from ..core.devices import planned_kind
from ..core.dtypes import DType
from .devices import DESCRIBED, platform, start

Array = Any
Shape = tuple[int, ...]


def attention(q: Array, k: Array, v: Array, causal: bool, scale: float) -> Array:
    # The same forward pass as in the gradient, so that the compiler merges the two.
    return _pulled(q, k, v, causal, scale)[0]


def attention_grad(
    q: Array, k: Array, v: Array, g: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    return tuple(_pulled(q, k, v, causal, scale)[1](g))


def why_not(causal: bool, dtype: DType, *shapes: Shape) -> str:
    """Returns why the kernel cannot take q, k and v of these shapes; "" if it can."""
    if planned_kind() == "gpu":  # no library is here to ask; its documented limits
        fits = dtype.bytes == 2 and all(s[-1] <= 128 and s[-1] % 8 == 0 for s in shapes)
        return "" if fits else "it takes 16-bit floats and heads of up to 128"
    kind = platform()
    if kind != "gpu":
        return f"it runs on a GPU, not on a {kind}"
    if DESCRIBED:
        return "it is compiled on a GPU only, not ahead of time"
    return _refused(causal, dtype.numpy, *(shape[-2:] for shape in shapes))


@cache
def _refused(causal: bool, dtype: Any, *sizes: Shape) -> str:
    start()
    q, k, v = (jax.ShapeDtypeStruct((1, 1, *s), dtype) for s in sizes)
    q = q.update(shape=(1, 1, 1, *sizes[0]))
    try:
        jax.eval_shape(lambda *xs: jax.vjp(partial(_by_cudnn, causal, 1.0), *xs)[1](xs[0]), q, k, v)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def _pulled(q: Array, k: Array, v: Array, causal: bool, scale: float) -> Any:
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    refused = (
        platform() != "gpu"
        or DESCRIBED
        or _refused(causal, q.dtype, *(x.shape[-2:] for x in (q, k, v)))
    )
    return jax.vjp(partial(_plain if refused else _by_cudnn, causal, scale), q, k, v)


def _by_cudnn(causal: bool, scale: float, q: Array, k: Array, v: Array) -> Array:
    *lead, groups, shared, seq, d = q.shape
    flat = (math.prod(lead), groups)
    rows = q.reshape(*flat, shared, seq, d).transpose(0, 3, 1, 2, 4)
    rows = rows.reshape(flat[0], seq, groups * shared, d)
    keys, values = (x.reshape(*flat, *x.shape[-2:]).transpose(0, 2, 1, 3) for x in (k, v))
    out = jax.nn.dot_product_attention(
        rows, keys, values, scale=scale, is_causal=causal, implementation="cudnn"
    )
    out = out.reshape(flat[0], seq, groups, shared, -1).transpose(0, 2, 3, 1, 4)
    return out.reshape(*lead, *out.shape[1:])


def _plain(causal: bool, scale: float, q: Array, k: Array, v: Array) -> Array:
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = wide("...rsd,...td->...rst", q, k) * scale
    if causal:
        seq, keys = scores.shape[-2:]
        seen = jnp.tril(jnp.ones((seq, keys), bool), keys - seq)
        scores = jnp.where(seen, scores, -jnp.inf)
    shares = jax.nn.softmax(scores, -1).astype(v.dtype)
    return wide("...rst,...te->...rse", shares, v).astype(v.dtype)
