"""State on disk: models of others come in and go out."""

from ..core.peers import public
from .hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
__getattr__ = public("checkpoint", globals())
