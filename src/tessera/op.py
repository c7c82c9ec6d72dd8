"""Ops as functions: `from tessera import op`; `ts.op(index=...)` makes an op of a JAX function."""

from typing import TYPE_CHECKING

from .core.callable_module import make_callable
from .core.public import public
from .lang.autodiff.grad import autodiff, grad
from .lang.math.functions import (
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
from .lang.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    reduce_scatter,
    scatter,
    shift,
)
from .lang.parallel.local.distribute import kernel
from .lang.program.user_op import user_op as from_jax
from .nn.blocks import transformer_block
from .nn.experts.layer import moe
from .nn.flash import flash_attention
from .nn.functional import (
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    rotary,
    silu,
    softmax,
    swiglu,
)
from .nn.losses import cross_entropy

allreduce = all_reduce

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "allreduce", "autodiff", "broadcast", "concat",
    "cross_entropy", "dropout", "einsum", "embedding", "flash_attention", "from_jax", "gather",
    "gelu", "grad", "kernel", "layer_norm", "linear", "matmul", "mean", "moe", "permute",
    "reduce_scatter", "reshape", "rms_norm", "rotary", "scatter", "scatter_add", "shift", "silu",
    "softmax", "split", "sum", "swiglu", "take", "topk", "transformer_block", "where",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("op", globals())
make_callable(__name__, from_jax)  # `ts.op(...)` is `ts.op.from_jax(...)`
