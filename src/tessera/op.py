"""The ops as functions: `from tessera import op`."""

from functools import partial

from .lang.functions import (
    concat,
    einsum,
    gather,
    matmul,
    mean,
    reshape,
    scatter_add,
    split,
    sum,
    take,
    topk,
    where,
)
from .lang.grad import grad
from .nn.functional import (
    cross_entropy,
    dropout,
    embedding,
    flash_attention,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    rotary,
    silu,
    softmax,
    swiglu,
)

# The same function as `ts.grad`, whose results stay partial for a collective written by hand.
autodiff = partial(grad, finish=False)
__all__ = [
    "autodiff", "concat", "cross_entropy", "dropout", "einsum", "embedding", "flash_attention",
    "gather", "gelu", "grad", "layer_norm", "linear", "matmul", "mean", "reshape", "rms_norm",
    "rotary", "scatter_add", "silu", "softmax", "split", "sum", "swiglu", "take", "topk", "where",
]  # fmt: skip
