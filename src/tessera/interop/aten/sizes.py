"""Rules for Python numbers: sizes of shapes that are not fixed, and what is computed of them."""

from __future__ import annotations

import math
import operator
from typing import Any

from ...lang.value.tensor import Tensor
from .table import aten, rule

for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "neg", "pow", "lt", "le", "gt",
              "ge", "eq", "ne", "and_", "or_", "not_"):  # fmt: skip
    rule(f"_operator.{_name}")(getattr(operator, _name))
for _name in ("trunc", "ceil", "floor", "sqrt"):
    rule(f"math.{_name}")(getattr(math, _name))
rule("torch.sym_max")(max)
rule("torch.sym_min")(min)
rule("torch.sym_float")(float)
rule("torch.sym_int")(int)
rule("torch.sym_not")(operator.not_)
rule("torch.sym_ite")(lambda b, t, f: t if b else f)
rule("torch.sym_sum")(sum)


@aten("sym_size.int")
def _size(x: Tensor, dim: int) -> int:
    return x.shape[dim]


@aten("sym_numel")
def _numel(x: Tensor) -> int:
    return x.size


@aten("sym_stride.int")
def _stride(x: Tensor, dim: int) -> int:
    return math.prod(x.shape[dim % x.ndim + 1 :])


@aten("sym_storage_offset")
def _offset(x: Tensor) -> int:
    return 0


@aten("sym_is_contiguous")
def _contiguous(x: Tensor, *memory_format: Any) -> bool:
    return True


# -- checks that PyTorch made when it exported ----------------------------------------------------
def _nothing(*args: Any, **kwargs: Any) -> None:
    """A check, which has no result."""


aten(
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "_assert_async.msg",
    "sym_constrain_range", "sym_constrain_range_for_size",
)(_nothing)  # fmt: skip


@aten("_local_scalar_dense")
def _item(x: Tensor) -> Tensor:
    """The scalar stays on its device: a recorded function does not read it."""
    return x.reshape(())
