"""Kernels on tiles: `@ts.kernel(...)`, and the statements of their bodies."""

from typing import TYPE_CHECKING

from .core.callable_module import make_callable
from .core.public import asking, public
from .lang.program.tile_kernel import TileKernel, enter, loop, put, quiet, tile_kernel, wait, when

__all__ = ["TileKernel", "enter", "loop", "put", "quiet", "wait", "when"]
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("kernel", globals())
make_callable(__name__, asking(tile_kernel, "kernel"))  # the decorator `@ts.kernel(...)`
