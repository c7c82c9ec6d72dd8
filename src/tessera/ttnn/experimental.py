"""TT-NN's ops that live under `ttnn.experimental`; all collectives do too."""

# Rows of the table are made at run time, so their types are not seen.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

from ..lang.math import functions as F
from ..lang.parallel.local import collectives as local
from ..lang.value.tensor import Tensor as Value
from . import products
from .ccl import (  # noqa: F401
    Axes,
    all_broadcast,
    all_gather,
    all_reduce,
    all_to_all_combine,
    all_to_all_dispatch,
    as_varying,
    broadcast,
    collective,
    point_to_point,
    reduce_scatter,
)
from .elementwise import where  # noqa: F401
from .errors import public, publics
from .indexing import plus_one  # noqa: F401
from .movement import view  # noqa: F401
from .names import no_name
from .tensor import Tensor
from .transfer import typecast  # noqa: F401
from .transformer import (  # noqa: F401
    nlp_concat_heads,
    nlp_concat_heads_decode,
    nlp_create_qkv_heads,
    nlp_create_qkv_heads_decode,
    paged_fill_cache,
    paged_fused_update_cache,
    paged_update_cache,
    rotary_embedding,
    rotary_embedding_llama,
)

all_gather_command_processor_async = all_gather_async = all_gather
reduce_scatter_minimal_async = reduce_scatter_async = reduce_scatter


@collective(moves=True, gathers=True)
def all_gather_async_reversed(input_tensor: Value, dim: int, *, axes: Axes) -> Value:
    """`all_gather` with the part of the last device first."""
    x = input_tensor
    if not axes:
        return x
    every = local.collected(F.unsqueeze(x, dim), axes, dim)
    return as_varying(F.flip(every, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


@collective(moves=True, shards="out_dim")
def all_to_all_async_generic(
    input_tensor: Value, in_dim: int, out_dim: int, *, axes: Axes
) -> Value:
    """On each device its part of `out_dim` of the whole, whose parts of `in_dim` the devices have.
    Raises ShapeError if `out_dim` is not divided by as many devices."""
    x = input_tensor
    return as_varying(local.exchanged(x, axes, split=out_dim, concat=in_dim)) if axes else x


@public
def all_to_all_async(
    input_tensor: Tensor, intermediate: Any = None, output: Any = None, **options: Any
) -> Tensor:
    """`all_to_all_async_generic`, with the buffers of before: the result is written into the
    second one."""
    given = {"persistent_output_buffer": output} | options
    return all_to_all_async_generic(input_tensor, **given)


@public
def all_gather_matmul_async(
    input_tensor: Tensor, weight_tensor: Tensor, *, dim: int, bias: Tensor | None = None,
    memory_config_ag: Any = None, memory_config_mm: Any = None, transpose_a: bool = False,
    transpose_b: bool = False, dtype: Any = None, activation: Any = None,
    all_gather_core_grid_offset: Any = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`all_gather` along `dim`, and the product of its result with a weight: both."""
    whole = all_gather(input_tensor, dim, memory_config=memory_config_ag, **options)
    return whole, products.linear(
        whole, weight_tensor, bias=bias, transpose_a=transpose_a, transpose_b=transpose_b,
        dtype=dtype, activation=activation, memory_config=memory_config_mm,
    )  # fmt: skip


@public
def all_reduce_async(
    input_tensor: Tensor, *older: Any, buffer_tensor: Tensor | None = None, **options: Any
) -> Tensor:
    """`all_reduce`; the second argument may be a buffer for data in transit, without effect."""
    rest = older[1:] if older and isinstance(older[0], Tensor) else older
    return all_reduce(input_tensor, *rest, **options)


__all__ = [*publics(vars())]


def __getattr__(name: str) -> Any:
    raise no_name(name, __all__, __name__)
