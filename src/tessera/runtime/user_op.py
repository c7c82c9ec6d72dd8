"""A user's JAX function and its gradients on one device's blocks, with a check of the results."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.dtypes import DType
from ..core.errors import PACKAGE, TesseraError, UsageError
from ..core.layout import TensorType
from ..ops.user import UserFunction

Array = Any
Many = Callable[..., tuple[Array, ...]]


def user(
    f: UserFunction,
    below: tuple[int, ...],
    args: Sequence[Array],
    want: Sequence[tuple[tuple[int, ...], DType]],
    ins: Sequence[TensorType],
) -> Any:
    """Returns the results of `f`, or of its gradient of order `len(below)`; `below` has the number
    of arguments of each lower order. Raises UsageError if the function fails or its results differ
    from `want`."""
    name = f.name + "".join(" (gradient)" for _ in below)
    rows = [(f"arg {i}", t) for i, t in enumerate(ins)]
    try:
        results = _order(f, below)(*args)
    except TesseraError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name}: the function raised {type(error).__name__}: {_first_line(error)}",
            rows=rows,
            fix="it gets one device's blocks, as jax arrays: mend it, or its index string",
            at=_line(error) or f.at,
        ) from error
    if len(results) != len(want):
        raise UsageError(
            f"{name}: the function gave {len(results)} results where its index has {len(want)}",
            rows=rows,
            fix="return an array per result of the index string, several as a tuple",
            at=f.at,
        )
    types = []
    for i, (x, (shape, dtype)) in enumerate(zip(results, want, strict=True)):
        try:
            x = jnp.asarray(x)
        except (TypeError, ValueError):
            actual = f"a {type(x).__name__}"
        else:
            actual = f"{x.dtype.name}{list(x.shape)}"
            if x.shape == shape and x.dtype == dtype.numpy:
                types.append(x)
                continue
        raise UsageError(
            f"{name}: result {i} of the function is not what its index string says",
            rows=[
                *rows,
                ("expected", f"{dtype.numpy.name}{list(shape)} on each device"),
                ("found", actual),
            ],
            fix="return that, or say dtype=, sizes=, whole= or another index",
            at=f.at,
        )
    return types[0] if len(types) == 1 else tuple(types)


def _order(f: UserFunction, below: tuple[int, ...]) -> Many:
    """Returns the function (`below` empty), its gradient (one number), the gradient of that, …"""
    if not below:
        return lambda *args: _several(f.fn(*args))
    count = below[-1]
    lower = _order(f, below[:-1])

    def gradient(*args: Array) -> tuple[Array, ...]:
        xs, gs = args[:count], args[count:]
        smooth = [i for i, x in enumerate(xs) if _is_float(x)]
        if len(below) == 1 and f.grad is not None:
            parts = _several(f.grad(gs[0] if len(gs) == 1 else gs, *xs))
            if len(parts) != count:
                raise UsageError(
                    f"{f.name}: grad= gave {len(parts)} gradients for {count} arguments",
                    fix="return one per argument; None stands for zero",
                    at=f.at,
                )
            return tuple(jnp.zeros_like(xs[i]) if parts[i] is None else parts[i] for i in smooth)

        def of_floats(*values: Array) -> tuple[Array, ...]:
            now = list(xs)
            for i, v in zip(smooth, values, strict=True):
                now[i] = v
            return tuple(y for y in lower(*now) if _is_float(y))

        _, pull = jax.vjp(of_floats, *(xs[i] for i in smooth))
        return tuple(pull(tuple(gs)))

    return gradient


def _several(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _line(error: Exception) -> str:
    """Returns the innermost line of user code in `error`: not of this package, not of JAX."""
    jax_home = jax.__file__.rpartition("/")[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((PACKAGE, jax_home, "<")):
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return ""
