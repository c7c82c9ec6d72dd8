"""State on disk: models of others come in and go out."""

from .hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
