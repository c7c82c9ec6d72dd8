"""Models of other libraries: HuggingFace's files, JAX's models and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.public import public

if TYPE_CHECKING:
    from .hf import load_hf as load_hf
    from .hf import save_hf as save_hf
    from .jax_models import from_jax_model, jax_rule

__all__ = ["from_jax_model", "jax_rule"]  # users know the others from ts.checkpoint

_LATE = ("hf:load_hf", "hf:save_hf", "jax_models:from_jax_model", "jax_models:jax_rule")
__getattr__ = public("ts.interop", globals(), late=_LATE)
