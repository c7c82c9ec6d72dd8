"""Data loading: loaders, token sources, corpora, tokenizers, and a bigram baseline."""

from ..core.public import public
from .create import create_dataloader, create_distributed_dataloader
from .loader import DataLoader, LoaderWarning
from .sources import TokenSource

__all__ = [
    "DataLoader",
    "LoaderWarning",
    "TokenSource",
    "create_dataloader",
    "create_distributed_dataloader",
]
__getattr__ = public("data", globals())
