"""Kernels as text, at small sizes; `with_sizes` gives them others, and functions other dtypes.

>>> from tessera.ir.tile.text import parse
>>> parse(MLP_UP).name, sorted(TEXTS)[:2]
('mlp_up', ['adamw', 'ag_matmul'])
"""

from __future__ import annotations

from .attention import flash, flash_dkv, flash_dq, flash_grads
from .experts import combine, dispatch, unpack
from .losses import cross_entropy, cross_entropy_dw, cross_entropy_dx
from .optimizers import ADAMW
from .products import MLP_UP, product
from .puts import AG_MATMUL, MATMUL_RS, all_gather, exchange, reduce_scatter
from .ring import ring_attention

DISPATCH = dispatch()
FLASH = flash()
FLASH_CAUSAL = flash(causal=True)
CROSS_ENTROPY = cross_entropy()

# One text for each kernel, by its name, and one for each option that changes what it does.
TEXTS = {
    text.split(maxsplit=2)[1]: text
    for text in (
        MLP_UP,
        product(activation="silu", to="f8e4m3"),
        product(activation="relu", to="i8"),
        *(
            f(causal, segments)
            for f in (flash, flash_dq, flash_dkv, flash_grads)
            for causal in (False, True)
            for segments in (False, True)
        ),
        ADAMW,
        CROSS_ENTROPY,
        cross_entropy_dx(),
        cross_entropy_dw(),
        DISPATCH,
        dispatch(pack=True),
        unpack(),
        combine(),
        AG_MATMUL,
        MATMUL_RS,
        all_gather(),
        reduce_scatter(),
        exchange(),
        ring_attention(),
        ring_attention(causal=True),
    )
}

__all__ = [
    "ADAMW",
    "AG_MATMUL",
    "CROSS_ENTROPY",
    "DISPATCH",
    "FLASH",
    "FLASH_CAUSAL",
    "MATMUL_RS",
    "MLP_UP",
    "TEXTS",
    "all_gather",
    "combine",
    "cross_entropy",
    "cross_entropy_dw",
    "cross_entropy_dx",
    "dispatch",
    "exchange",
    "flash",
    "flash_dkv",
    "flash_dq",
    "flash_grads",
    "product",
    "reduce_scatter",
    "ring_attention",
    "unpack",
]
