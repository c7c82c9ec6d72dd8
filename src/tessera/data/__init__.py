"""Data loading: loaders, token sources, corpora, tokenizers, and a bigram baseline."""

from typing import TYPE_CHECKING

from ..core.public import public
from .create import create_dataloader, create_distributed_dataloader
from .dataset_loader import DataLoader
from .loader import LoaderWarning
from .sources import TokenSource
from .token_loader import TokenLoader

__all__ = [
    "DataLoader",
    "LoaderWarning",
    "TokenLoader",
    "TokenSource",
    "create_dataloader",
    "create_distributed_dataloader",
]
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("data", globals())
