"""Programs in files: `ts.export.save(f, path, *args)`, and `load` where the code of `f` is not."""

from typing import TYPE_CHECKING

from ..core.public import public
from .file import load, save
from .program import Exported

__all__ = ["Exported", "load", "save"]
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("export", globals())
