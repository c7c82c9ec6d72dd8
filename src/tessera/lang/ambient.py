"""Ambient choices as context managers: `ts.autocast`, `ts.strict`, `ts.no_grad`."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

from ..core.context import Settings, replaced
from ..core.dtypes import bf16, dtype_of
from ..core.errors import DTypeError, fail


def autocast(dtype: object = bf16, enabled: bool = True) -> AbstractContextManager[Settings]:
    """Inside, products of f32 tensors are computed in `dtype`; sums, statistics and losses in f32.

    Products (`matmul`, `einsum`, convolutions, attention and what is made of them) take their f32
    operands in `dtype` and give it. Sums, means, variances, `exp`, `log` and `rsqrt` take narrow
    operands in f32 and give f32. Norms and softmax compute in f32 and give the dtype of their
    input, losses give f32. All other ops go by the dtypes of their operands. Gradients come back
    in the dtype of what they belong to, so an f32 weight has an f32 gradient. `enabled=False` and
    f32 switch it off inside. Raises DTypeError unless `dtype` is bf16, f16 or f32.

    >>> import tessera as ts
    >>> x, w = ts.ones((2, 4)), ts.ones((4, 8))
    >>> with ts.autocast(ts.bf16):
    ...     y = x @ w
    ...     y.dtype, y.mean().dtype, ts.nn.softmax(y).dtype
    (bf16, f32, bf16)
    """
    want = dtype_of(dtype)
    if want.name not in ("bf16", "f16", "f32"):
        raise fail(DTypeError, f"autocast: cannot compute in {want}", fix="use ts.bf16 or ts.f16")
    return replaced(autocast=want.name if enabled and want.name != "f32" else None)


def strict(enabled: bool = True) -> AbstractContextManager[Settings]:
    """Inside, a collective that is not written by hand is an error that shows both layouts."""
    return replaced(strict=enabled)


class no_grad(ContextDecorator):
    """Inside, what is computed is a constant to gradients, and does not remember how it was made.

    A context manager and a decorator. In a recorded function each float result inside is taken
    through `ts.stop_gradient`. A gradient by what the loss reaches only through such a constant is
    a GraphError where it is asked for outside of recorded functions, and zeros in one.

    >>> import tessera as ts
    >>> w = ts.tensor([2.0])
    >>> with ts.no_grad():
    ...     constant = w * w
    >>> ts.grad((constant * w).sum(), w).numpy().tolist()
    [4.0]
    """

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[Settings]] = []

    def __enter__(self) -> None:
        inside = replaced(no_grad=True)
        inside.__enter__()
        self._open.append(inside)

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
