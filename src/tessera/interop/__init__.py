"""Models of other libraries: HuggingFace's files, PyTorch's modules, JAX's models and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.public import public

if TYPE_CHECKING:
    from .aten import rule
    from .hf import load_hf, save_hf
    from .jax_models import from_jax_model, jax_rule
    from .peft_files import load_peft, save_peft
    from .torch_module import from_torch, to_torch

__all__ = [
    "from_jax_model", "from_torch", "jax_rule", "load_hf", "load_peft", "rule", "save_hf",
    "save_peft", "to_torch",
]  # fmt: skip

_LATE = (
    "aten:rule", "hf:load_hf", "hf:save_hf", "jax_models:from_jax_model", "jax_models:jax_rule",
    "peft_files:load_peft", "peft_files:save_peft", "torch_module:from_torch",
    "torch_module:to_torch",
)  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("ts.interop", globals(), late=_LATE)
