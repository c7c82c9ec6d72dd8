"""Models of others: read onto a mesh, and written as their programs read them."""

from .hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
