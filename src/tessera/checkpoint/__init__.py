"""State on disk: checkpoints that survive, and models of others that come in and go out."""

from ..core.public import public
from ..interop import load_hf, save_hf
from .export import export
from .listing import Keep, latest, prune, verify
from .loading import Checkpoint, load
from .saving import save, wait

__all__ = [
    "Checkpoint", "Keep", "export", "latest", "load", "load_hf", "prune", "save", "save_hf",
    "verify", "wait",
]  # fmt: skip
__getattr__ = public("checkpoint", globals())
