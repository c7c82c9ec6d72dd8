"""Models of other libraries: HuggingFace's files, PyTorch's modules, JAX's models and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.public import public

if TYPE_CHECKING:
    from .aten import rule
    from .hf import load_hf, save_hf
    from .jax_models import from_jax_model, jax_rule
    from .torch_module import from_torch, to_torch

__all__ = [
    "from_jax_model", "from_torch", "jax_rule", "load_hf", "rule", "save_hf", "to_torch",
]  # fmt: skip

_LATE = (
    "aten:rule", "hf:load_hf", "hf:save_hf", "jax_models:from_jax_model", "jax_models:jax_rule",
    "torch_module:from_torch", "torch_module:to_torch",
)  # fmt: skip
__getattr__ = public("ts.interop", globals(), late=_LATE)
