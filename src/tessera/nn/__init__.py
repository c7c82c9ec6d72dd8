"""Layers and functions of neural networks, composed of ops; sharding and gradients follow from the
ops."""

from typing import TYPE_CHECKING

from ..core.public import public
from ..lang.record.parameter import Parameter
from .activations import (
    elu,
    glu,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    logsigmoid,
    mish,
    relu6,
    selu,
    softplus,
)
from .adapters import lora, merge_lora
from .context_parallel import all_to_all_attention, unzigzag, zigzag
from .conv import (
    batch_norm,
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    group_norm,
    interpolate,
)
from .conv_layers import (
    BatchNorm,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    GroupNorm,
)
from .distances import cosine_similarity, huber_loss, l1_loss, normalize, smooth_l1_loss
from .dot_product_attention import attention
from .experts.layer import MoE, moe, moe_inspection
from .experts.placement import Placement, balance_experts, place_experts, rehash_experts
from .experts.routing import updated_expert_bias
from .flash import flash_attention
from .functional import (
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    log_softmax,
    mlp,
    relu,
    rms_norm,
    rotary,
    silu,
    softmax,
    swiglu,
)
from .gpt_config import GPTConfig
from .layers import Dropout, Embedding, LayerNorm, Linear, RMSNorm
from .losses import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    linear_cross_entropy,
    mse_loss,
    nll_loss,
)
from .module import Module
from .pool import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    avg_pool1d,
    avg_pool2d,
    max_pool1d,
    max_pool2d,
)
from .positions import Rope
from .ring import ring_attention
from .sequential import Sequential, functional_call
from .transformer import GPT, TransformerBlock

__all__ = [
    "GPT",
    "BatchNorm",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "GPTConfig",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "MoE",
    "Module",
    "Parameter",
    "Placement",
    "RMSNorm",
    "Rope",
    "Sequential",
    "TransformerBlock",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "all_to_all_attention",
    "attention",
    "avg_pool1d",
    "avg_pool2d",
    "balance_experts",
    "batch_norm",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "cosine_similarity",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "flash_attention",
    "functional_call",
    "gelu",
    "glu",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "huber_loss",
    "interpolate",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "logsigmoid",
    "lora",
    "max_pool1d",
    "max_pool2d",
    "merge_lora",
    "mish",
    "mlp",
    "moe",
    "moe_inspection",
    "mse_loss",
    "nll_loss",
    "normalize",
    "place_experts",
    "rehash_experts",
    "relu",
    "relu6",
    "ring_attention",
    "rms_norm",
    "rotary",
    "selu",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "swiglu",
    "unzigzag",
    "updated_expert_bias",
    "zigzag",
]  # fmt: skip
_LATE = ("tessera.interop.hf:load_hf",)
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("nn", globals(), late=_LATE)
