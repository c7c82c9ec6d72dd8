"""Models of other libraries: a row for each, by library."""

from . import torchvision_ops  # noqa: F401, I001  # first: others import torchvision
from . import diffusers, jax, text, timm, vision  # noqa: F401  # they fill the table
from .model import MODELS, ROWS, Model

__all__ = ["MODELS", "ROWS", "Model"]
