"""Import and export of HuggingFace models."""

from .hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
