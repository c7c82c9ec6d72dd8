"""Models of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .model import ROWS, Model, add, both, floats


def diffusers(
    name: str, inputs: Callable[[], dict[str, Any]], result: str = "sample",
    mode: str = "train", **keys: Any,
) -> None:  # fmt: skip
    def make() -> Any:
        import diffusers

        return getattr(diffusers, name)(**keys)

    add(Model(name, "diffusers", make, inputs, lambda out: getattr(out, result), mode))


def times(largest: float = 100.0) -> Callable[[], dict[str, Any]]:
    return lambda: {"timestep": torch.rand(ROWS) * largest}


def labels() -> dict[str, Any]:
    return {"class_labels": torch.randint(0, 8, (ROWS,))}


UNET = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1,
        "norm_num_groups": 4}  # fmt: skip
CODES = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
         "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
HEADS = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8}
LATENT = {"sample_size": 8, "patch_size": 2, "in_channels": 4}

diffusers(
    "UNet2DModel", both(floats(sample=(3, 8, 8)), times()), **UNET, attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
diffusers(
    "UNet2DConditionModel",
    both(floats(sample=(4, 8, 8), encoder_hidden_states=(6, 16)), times()),
    **UNET, attention_head_dim=2, cross_attention_dim=16,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
diffusers(
    "UNet1DModel", both(floats(sample=(14, 16)), times()), block_out_channels=(8, 16),
    in_channels=14, out_channels=14, time_embedding_type="positional", use_timestep_embedding=True,
    down_block_types=("DownResnetBlock1D",) * 2, up_block_types=("UpResnetBlock1D",),
    mid_block_type="MidResTemporalBlock1D", out_block_type="OutConv1DBlock", norm_num_groups=8,
    act_fn="swish", layers_per_block=1, flip_sin_to_cos=False, freq_shift=1.0,
    downsample_each_block=False,
)  # fmt: skip
diffusers("AutoencoderKL", floats(sample=(3, 16, 16)), **CODES)
diffusers("VQModel", floats(sample=(3, 16, 16)), **CODES, num_vq_embeddings=16)
diffusers(
    "DiTTransformer2DModel", both(floats(hidden_states=(4, 8, 8)), times(), labels),
    mode="eval", **HEADS, **LATENT, num_embeds_ada_norm=8,  # in training it drops random labels
)  # fmt: skip
diffusers(
    "PixArtTransformer2DModel",
    both(floats(hidden_states=(4, 8, 8), encoder_hidden_states=(6, 16)), times()),
    **HEADS, **LATENT, cross_attention_dim=32, caption_channels=16, use_additional_conditions=False,
)  # fmt: skip
diffusers(
    "Transformer2DModel",
    floats(hidden_states=(8, 8, 8), encoder_hidden_states=(6, 16)),
    **HEADS, in_channels=8, norm_num_groups=4, cross_attention_dim=16,
)  # fmt: skip
diffusers(
    "SD3Transformer2DModel",
    both(floats(hidden_states=(4, 8, 8), encoder_hidden_states=(6, 16), pooled_projections=(16,)),
         times()),
    **HEADS, **LATENT, joint_attention_dim=16, caption_projection_dim=32, out_channels=4,
    pooled_projection_dim=16, pos_embed_max_size=8,
)  # fmt: skip


def places() -> dict[str, Any]:
    return {"img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(6, 3)}


diffusers(
    "FluxTransformer2DModel",
    both(floats(hidden_states=(16, 16), encoder_hidden_states=(6, 16), pooled_projections=(16,)),
         times(1.0), places),  # it counts them in thousands
    patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8,
    num_attention_heads=4, joint_attention_dim=16, pooled_projection_dim=16,
    axes_dims_rope=(2, 2, 4),
)  # fmt: skip
diffusers(
    "PriorTransformer",
    both(floats(hidden_states=(16,), proj_embedding=(16,), encoder_hidden_states=(6, 16)), times()),
    "predicted_image_embedding", **HEADS, embedding_dim=16, num_embeddings=6,
    additional_embeddings=4,
)  # fmt: skip
