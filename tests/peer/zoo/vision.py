"""Models of images, of images with text, and of sound, of transformers."""

from __future__ import annotations

from .hugging_face import IMAGES, SIZES, hugging_face
from .model import both, floats, ids, images

image = hugging_face("AutoModelForImageClassification", "logits", images(16), IMAGES)
encoder = hugging_face("AutoModelForImageClassification", "logits", images(16), IMAGES, True)
STAGES = {"hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None,
          "intermediate_size": None, "hidden_sizes": [16, 32], "depths": [1, 1]}  # fmt: skip
BLOCKS = {**STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [2, 2]}
HEADS = {"sr_ratios": [2, 1], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2]}
WINDOWS = {**STAGES, "hidden_sizes": None, "embed_dim": 16, "num_heads": [2, 4], "window_size": 2}

for _name in ("vit", "beit", "dinov2", "vit_msn", "ijepa", "dinov2_with_registers"):
    encoder(_name)
encoder("deit", architectures=["DeiTForImageClassification"])
image("swin", patch_size=2, **WINDOWS)
image("swinv2", patch_size=2, **WINDOWS)
image("convnext", num_stages=2, **STAGES)
image("convnextv2", num_stages=2, **STAGES)
image("resnet", embedding_size=16, layer_type="basic", **STAGES)
image("regnet", embedding_size=16, groups_width=8, layer_type="y", **STAGES)
# In training the batch statistics of 27 layers amplify a change of 1e-7 in the weights to 0.7
# in the second gradient, on one device.
image("mobilenet_v1", mode="eval", depth_multiplier=0.25, given=images(32))
image("mobilenet_v2", mode="eval", depth_multiplier=0.25, given=images(32))
image("segformer", **BLOCKS | HEADS, decoder_hidden_size=32)
image("pvt_v2", **BLOCKS | HEADS)
image("poolformer", **BLOCKS, padding=[2, 1])
image("levit", mode="eval", architectures=["LevitForImageClassification"], given=images(64),
      key_dim=[8, 8, 8], **STAGES | {"image_size": 64, "patch_size": 16,
      "num_attention_heads": [2, 2, 2], "hidden_sizes": [16, 24, 32],
      "depths": [1, 1, 1]})  # fmt: skip

_towers = {"text_config": {**SIZES, "projection_dim": 16}, "projection_dim": 16,
           "vision_config": {**IMAGES, "projection_dim": 16}}  # fmt: skip
for _name in ("clip", "siglip"):
    hugging_face("AutoModel", "logits_per_image", both(ids("input_ids"), images(16)), _towers)(
        _name
    )
speech = hugging_face(
    "AutoModelForCTC", "logits", floats(input_values=(400,)),
    {**SIZES, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8],
     "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
     "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "mask_feature_prob": 0.0},
)  # fmt: skip
for _name in ("wav2vec2", "hubert", "wavlm", "unispeech"):
    speech(_name)
hugging_face(
    "AutoModelForSpeechSeq2Seq", "logits",
    both(floats(input_features=(8, 32)), ids("decoder_input_ids")),
    {"d_model": 32, "vocab_size": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8,
     "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
     "decoder_ffn_dim": 64, "max_source_positions": 16, "max_target_positions": 16,
     "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
)("whisper")  # fmt: skip
