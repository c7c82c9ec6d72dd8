"""Context managers for ambient settings: `ts.autocast`, `ts.strict`, `ts.no_grad`."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from inspect import isfunction
from typing import Any

from ...core.context import Settings, replaced
from ...core.contexts import Under, within
from ...core.declared import Flag
from ...core.dtypes import bf16, dtype_of, f32, fp8_e4m3, fp8_e5m2
from ...core.errors import DTypeError


@within("ts.autocast")
def autocast(
    dtype: object = bf16, enabled: bool = True, embeddings: Flag = False
) -> AbstractContextManager[Settings]:
    """A context in which products of f32 tensors are computed in `dtype`, and sums in f32.

    - Products (`matmul`, `einsum`, convolutions, attention and layers made of them) convert f32
      operands to `dtype` and return `dtype`.
    - Sums, means, variances, `exp`, `log` and `rsqrt` compute narrow operands in f32 and return
      f32.
    - Norms and softmax compute in f32 and return the dtype of their input. Losses return f32.
    - All other ops follow the dtypes of their operands. With `embeddings` the rows of an f32 table
      are rounded to `dtype` before they are looked up and sent, as by PyTorch's `param_dtype`.

    A gradient has the dtype of its tensor, so an f32 weight has an f32 gradient. `enabled=False` or
    `dtype=ts.f32` turns autocast off inside.

    "fp8" is bf16, except that products with a matrix [k, n], such as those of linear layers, round
    their factors to fp8: e4m3, and e5m2 for gradients, each tensor with a scale from its largest
    current value. Raises DTypeError if `dtype` is not "fp8", bf16, f16 or f32.

    >>> import tessera as ts
    >>> x, w = ts.ones((2, 4)), ts.ones((4, 8))
    >>> with ts.autocast(ts.bf16):
    ...     y = x @ w
    ...     y.dtype, y.mean().dtype, ts.nn.softmax(y).dtype
    (bf16, f32, bf16)
    """
    fp8 = isinstance(dtype, str) and dtype == "fp8"
    want = bf16 if fp8 else dtype_of(dtype)
    if want.name not in ("bf16", "f16", "f32"):
        is_fp8 = want in (fp8_e4m3, fp8_e5m2)
        fix = 'write ts.autocast("fp8")' if is_fp8 else "use ts.bf16 or ts.f16"
        raise DTypeError(f"autocast: cannot compute in {want}", fix=fix)
    on = enabled and want is not f32
    return replaced(
        autocast=want.name if on else None,
        autocast_embeddings=embeddings and on,
        autocast_fp8=fp8 and on,
    )


@within("ts.strict")
def strict(enabled: bool = True) -> AbstractContextManager[Settings]:
    """A context in which each collective must be written by the user.

    Where Tessera would insert a collective, it raises LayoutError and shows both layouts.
    """
    return replaced(strict=enabled)


class no_grad(ContextDecorator):
    """A context in which every result is a constant for gradients, as in `torch.no_grad`.

    It is also a decorator. No history is stored, so no memory is kept for a backward pass. In a
    recorded function each float result passes through `ts.stop_gradient`. If a loss reaches a
    weight only through such constants, its gradient is zero inside a recorded function; outside of
    one `ts.grad` raises GraphError.

    >>> import tessera as ts
    >>> w = ts.tensor([2.0])
    >>> with ts.no_grad():
    ...     constant = w * w
    >>> ts.grad((constant * w).sum(), w).numpy().tolist()
    [4.0]
    """

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[Settings]] = []

    def __call__(self, fn: Any) -> Any:
        return super().__call__(fn) if isfunction(fn) else Under(self, fn)

    def __enter__(self) -> None:
        inside = replaced(no_grad=True)
        inside.__enter__()
        self._open.append(inside)

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
