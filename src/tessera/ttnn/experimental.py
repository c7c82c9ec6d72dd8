"""TT-NN's ops that live under `ttnn.experimental`; all collectives do too."""

from typing import Any

from .arithmetic import where
from .caches import paged_fill_cache, paged_fused_update_cache, paged_update_cache
from .ccl import (
    all_broadcast,
    all_gather,
    all_gather_async_reversed,
    all_reduce,
    all_to_all_async_generic,
    broadcast,
    point_to_point,
    reduce_scatter,
)
from .experts import all_to_all_combine, all_to_all_dispatch
from .movement import view
from .names import no_name
from .picking import plus_one
from .products import linear
from .tensor import Tensor
from .transfer import typecast
from .transformer import (
    nlp_concat_heads,
    nlp_concat_heads_decode,
    nlp_create_qkv_heads,
    nlp_create_qkv_heads_decode,
    rotary_embedding,
    rotary_embedding_llama,
)

all_gather_command_processor_async = all_gather_async = all_gather


def all_to_all_async(
    input_tensor: Tensor, intermediate: Any = None, output: Any = None, **options: Any
) -> Tensor:
    """`all_to_all_async_generic`, with the buffers of before: the result is written into the
    second one."""
    given = options.pop("persistent_output_buffer", output)
    return all_to_all_async_generic(input_tensor, persistent_output_buffer=given, **options)


def all_gather_matmul_async(
    input_tensor: Tensor, weight_tensor: Tensor, *, dim: int, bias: Tensor | None = None,
    memory_config_ag: Any = None, memory_config_mm: Any = None, transpose_a: bool = False,
    transpose_b: bool = False, dtype: Any = None, program_config: Any = None,
    activation: Any = None, compute_kernel_config: Any = None, core_grid: Any = None,
    all_gather_core_grid_offset: Any = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`all_gather` along `dim`, and the product of what it gives with a weight: both."""
    whole = all_gather(input_tensor, dim, memory_config=memory_config_ag, **options)
    return whole, linear(
        whole, weight_tensor, bias=bias, transpose_a=transpose_a, transpose_b=transpose_b,
        dtype=dtype, activation=activation, memory_config=memory_config_mm,
    )  # fmt: skip


def all_reduce_async(
    input_tensor: Tensor, *older: Any, buffer_tensor: Tensor | None = None, **options: Any
) -> Tensor:
    """`all_reduce`; a buffer for what is on the way is the second argument, and has no effect."""
    rest = older[1:] if older and isinstance(older[0], Tensor) else older
    return all_reduce(input_tensor, *rest, **options)


reduce_scatter_minimal_async = reduce_scatter_async = reduce_scatter
__all__ = [
    "all_broadcast",
    "all_gather",
    "all_gather_async",
    "all_gather_async_reversed",
    "all_gather_command_processor_async",
    "all_gather_matmul_async",
    "all_reduce",
    "all_reduce_async",
    "all_to_all_async",
    "all_to_all_async_generic",
    "all_to_all_combine",
    "all_to_all_dispatch",
    "broadcast",
    "nlp_concat_heads",
    "nlp_concat_heads_decode",
    "nlp_create_qkv_heads",
    "nlp_create_qkv_heads_decode",
    "paged_fill_cache",
    "paged_fused_update_cache",
    "paged_update_cache",
    "plus_one",
    "point_to_point",
    "reduce_scatter",
    "reduce_scatter_async",
    "reduce_scatter_minimal_async",
    "rotary_embedding",
    "rotary_embedding_llama",
    "typecast",
    "view",
    "where",
]  # fmt: skip


def __getattr__(name: str) -> object:
    raise no_name(name, __all__, __name__)
