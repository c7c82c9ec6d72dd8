"""TT-NN's ops that live under `ttnn.experimental`; all collectives do too."""

from typing import Any

from .ccl import (
    all_broadcast,
    all_gather,
    all_gather_async_reversed,
    all_reduce,
    all_to_all_async_generic,
    all_to_all_combine,
    all_to_all_dispatch,
    broadcast,
    point_to_point,
    reduce_scatter,
)
from .names import no_name
from .tensor import Tensor
from .transformer import (
    nlp_concat_heads,
    nlp_create_qkv_heads,
    paged_update_cache,
    rotary_embedding,
    rotary_embedding_llama,
)

all_gather_async = all_gather


def all_to_all_async(
    input_tensor: Tensor, intermediate: Any = None, output: Any = None, **options: Any
) -> Tensor:
    """`all_to_all_async_generic`, with the buffers of before: the result is written into the
    second one."""
    given = options.pop("persistent_output_buffer", output)
    return all_to_all_async_generic(input_tensor, persistent_output_buffer=given, **options)


all_reduce_async = all_reduce
reduce_scatter_minimal_async = reduce_scatter_async = reduce_scatter
__all__ = [
    "all_broadcast", "all_gather", "all_gather_async",
    "all_gather_async_reversed", "all_reduce", "all_reduce_async",
    "all_to_all_async", "all_to_all_async_generic", "all_to_all_combine", "all_to_all_dispatch",
    "broadcast", "nlp_concat_heads",
    "nlp_create_qkv_heads", "paged_update_cache", "point_to_point", "reduce_scatter",
    "reduce_scatter_async", "reduce_scatter_minimal_async", "rotary_embedding",
    "rotary_embedding_llama",
]  # fmt: skip


def __getattr__(name: str) -> object:
    raise no_name(name, __all__, __name__)
