"""torchvision without CUDA's libraries.

timm imports it for its transforms, and transformers where it is installed. PyPI's is linked with
CUDA's libraries; without them it has no ops of its own, and its import fails where it describes the
results of these two. So they get a declaration without a function: no model here calls them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

if find_spec("torchvision"):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for op in ("nms", "qnms"):
            signature = "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{op}", signature)
