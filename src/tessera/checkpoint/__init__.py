"""Checkpoints, and import and export of HuggingFace models."""

from typing import TYPE_CHECKING

from ..core.public import public
from ..interop import load_hf, load_peft, save_hf, save_peft
from .export import export
from .listing import Keep, latest, prune, verify
from .loading import Checkpoint, load
from .saving import save, wait

__all__ = [
    "Checkpoint", "Keep", "export", "latest", "load", "load_hf", "load_peft", "prune", "save",
    "save_hf", "save_peft", "verify", "wait",
]  # fmt: skip
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("checkpoint", globals())
