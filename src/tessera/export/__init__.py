"""Programs in files: `ts.export.save(f, path, *args)`, and `load` where the code of `f` is not."""

from ..core.public import public
from .file import load, save
from .program import Exported

__all__ = ["Exported", "load", "save"]
__getattr__ = public("export", globals())
