"""Random keys of JAX as their data: u32 arrays with one more dim.

Each primitive of keys is the function of data that implements it, traced; a primitive that moves
elements gets the last dim of the data as one more whole dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import UsageError
from .jax_private import key_functions


def is_key(x: Any) -> bool:
    """Returns whether an array or a type is one of keys."""
    return bool(jnp.issubdtype(getattr(x, "dtype", np.dtype(bool)), jax.dtypes.prng_key))


def key_data(x: Any) -> tuple[Any, str]:
    """Returns (data of `x`, name of its implementation), of keys; else (`x`, "")."""
    return (jax.random.key_data(x), str(jax.random.key_impl(x))) if is_key(x) else (x, "")


def wrapped(x: Any, impl: str) -> Any:
    """The inverse of `key_data`."""
    return jax.random.wrap_key_data(x, impl=impl) if impl else x


def primitive_of_keys(e: Any) -> Any:
    """Returns the traced function of data for an equation that draws, splits, folds or makes keys;
    None for other equations."""
    if not e.primitive.name.startswith("random_") or e.primitive.name == "random_gamma":
        return None
    ins, outs = [v.aval for v in e.invars], [v.aval for v in e.outvars]
    impl = key_functions(next(a.dtype for a in (*ins, *outs) if is_key(a)))
    rank, shape = len(ins[0].shape), e.params.get("shape", ())
    each: Callable[..., Any]
    match e.primitive.name:
        case "random_bits":
            each = _each(lambda k: impl.random_bits(k, e.params["bit_width"], shape), rank)
        case "random_split":
            each = _each(lambda k: impl.split(k, shape), rank)
        case "random_seed":
            each = _each(impl.seed, rank)
        case "random_fold_in":
            each = partial(_folded, impl, jnp.broadcast_shapes(ins[0].shape, ins[1].shape))
        case _:  # wrap, unwrap, clone
            each = jnp.asarray
    data = [(*a.shape, *impl.key_shape) if is_key(a) else a.shape for a in ins]
    dtypes = ["uint32" if is_key(a) else a.dtype for a in ins]
    return jax.make_jaxpr(each)(*map(jax.ShapeDtypeStruct, data, dtypes))


def _folded(impl: Any, lead: tuple[int, ...], keys: Any, numbers: Any) -> Any:
    keys = jnp.broadcast_to(keys, (*lead, *impl.key_shape))
    numbers = jnp.broadcast_to(numbers, lead).astype("uint32")
    return _each(impl.fold_in, len(lead))(keys, numbers)


def _each(f: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Returns `f` over `rank` leading dims."""
    for _ in range(rank):
        f = jax.vmap(f)
    return f


_SAME = (
    "squeeze", "concatenate", "scan", "while", "cond", "copy", "optimization_barrier", "stack",
    "split", "unstack", "device_put", "rev",
)  # fmt: skip


def on_data(e: Any, ins: list[Any], params: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the operands and the params of an equation for the data of its keys. Raises
    UsageError for a primitive that is not known to move whole keys."""
    keys = next((v.aval for v in (*e.invars, *e.outvars) if is_key(v.aval)), None)
    if keys is None:
        return ins, params
    n, p = key_functions(keys.dtype).key_shape[0], params
    rank, name = len(keys.shape), e.primitive.name
    match name:
        case "slice":
            steps = (*(p["strides"] or (1,) * rank), 1)
            limits = (*p["limit_indices"], n)
            starts = (*p["start_indices"], 0)
            return ins, {"start_indices": starts, "limit_indices": limits, "strides": steps}
        case "dynamic_slice":
            zero = np.zeros((), np.int32)
            return [*ins, zero], {**p, "slice_sizes": (*p["slice_sizes"], n)}
        case "reshape":
            return ins, {**p, "new_sizes": (*p["new_sizes"], n)}
        case "broadcast_in_dim":
            shape = (*p["shape"], n)
            dims = (*p["broadcast_dimensions"], len(shape) - 1)
            return ins, {**p, "shape": shape, "broadcast_dimensions": dims}
        case "transpose":
            return ins, {**p, "permutation": (*p["permutation"], rank)}
        case "gather":
            d, last = p["dimension_numbers"], len(e.outvars[0].aval.shape)
            d = d._replace(offset_dims=(*d.offset_dims, last))
            return ins, {**p, "slice_sizes": (*p["slice_sizes"], n), "dimension_numbers": d}
        case _ if name in _SAME:
            return ins, p
    raise UsageError(
        f"{name} of JAX has no rule for random keys",
        fix="select with jax.random.key_data(keys), and jax.random.wrap_key_data of the result",
    )
