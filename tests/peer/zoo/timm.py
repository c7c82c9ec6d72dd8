"""Models of timm."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .model import Model, add, floats

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 16, "patch_size": 4}


def timm_model(file: str, name: str, size: int = 16, **keys: Any) -> None:
    """A row for the class `name` of `timm.models.<file>`."""

    def make() -> Any:
        module = import_module(f"timm.models.{file}")
        kinds = {k: getattr(module, v) for k, v in keys.items() if k == "block"}
        return getattr(module, name)(num_classes=10, **keys | kinds)

    add(Model(name, "timm", make, floats(x=(3, size, size))))


timm_model("vision_transformer", "VisionTransformer", **TINY)
timm_model("deit", "VisionTransformerDistilled", **TINY)
timm_model("eva", "Eva", **TINY, use_rot_pos_emb=True, ref_feat_shape=4)
timm_model("cait", "Cait", **TINY)
timm_model("mlp_mixer", "MlpMixer", embed_dim=32, num_blocks=2, img_size=16, patch_size=4)
timm_model("convmixer", "ConvMixer", dim=16, depth=2, kernel_size=3, patch_size=4)
timm_model("convnext", "ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), size=64)
timm_model("resnet", "ResNet", block="BasicBlock", layers=(1, 1, 1, 1), stem_width=8,
           channels=(8, 8, 16, 16), size=64)  # fmt: skip
