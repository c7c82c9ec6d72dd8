"""Layers and the functions behind them, as composites of ops: sharding, gradients follow."""

from .functional import (
    attention,
    cross_entropy,
    dropout,
    embedding,
    flash_attention,
    gelu,
    layer_norm,
    linear,
    linear_cross_entropy,
    log_softmax,
    mlp,
    relu,
    rms_norm,
    rotary,
    silu,
    softmax,
    swiglu,
)
from .layers import Dropout, Embedding, LayerNorm, Linear, RMSNorm
from .module import Module, Parameter
from .transformer import GPT, GPTConfig, TransformerBlock

__all__ = [
    "GPT", "Dropout", "Embedding", "GPTConfig", "LayerNorm", "Linear", "Module", "Parameter",
    "RMSNorm", "TransformerBlock", "attention", "cross_entropy", "dropout", "embedding",
    "flash_attention", "gelu", "layer_norm", "linear", "linear_cross_entropy", "log_softmax", "mlp",
    "relu", "rms_norm", "rotary", "silu", "softmax", "swiglu",
]  # fmt: skip
