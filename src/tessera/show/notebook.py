"""HTML of values, for the cells of a notebook: text and pictures without links, scripts or styles
of their own.

>>> text_html("a < b")
'<pre style="max-height:40em;overflow:auto;line-height:1.2">a &lt; b</pre>'
"""

from __future__ import annotations

import html as escaping
import io
from typing import Any

from ..core.brief import brief
from ..core.mesh import Mesh
from ..lang.value.tensor import Tensor

MOST_LETTERS = 100_000  # of a text; a notebook keeps all of it in its file
MOST_DRAWN = 64  # devices
WIDTH = 100  # columns
STYLE = "max-height:40em;overflow:auto;line-height:1.2"


def html(value: Any) -> str:
    """Returns a tensor as its values and a picture of the devices' blocks, a mesh as a picture, and
    any other value as its text."""
    if isinstance(value, Mesh):
        from .mesh_picture import render_mesh

        return picture_html(render_mesh(value))
    if isinstance(value, Tensor):
        return text_html(repr(value)) + _blocks_html(value)
    with brief():
        return text_html(str(value))


def text_html(text: str) -> str:
    """Returns `text` as HTML; of a very long text the beginning."""
    rest = len(text) - MOST_LETTERS
    more = f"\n… and {rest:,} letters" if rest > 0 else ""
    return f'<pre style="{STYLE}">{escaping.escape(text[:MOST_LETTERS] + more)}</pre>'


def picture_html(picture: Any) -> str:
    """Returns a rich picture as HTML with its colours."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=WIDTH, record=True, force_jupyter=False, legacy_windows=False
    )
    console.print(picture)
    return console.export_html(
        inline_styles=True, code_format=f'<pre style="{STYLE}">{{code}}</pre>'
    )


def _blocks_html(x: Tensor) -> str:
    """Returns the picture of the devices' blocks, "" without a mesh or with very many devices."""
    from ..observe.inspect import inspect
    from .layout_picture import who_holds_what

    if x.mesh is None or x.mesh.physical.size > MOST_DRAWN:
        return ""
    return picture_html(who_holds_what(x.shape, inspect(x).holds, x.mesh))
