"""Text and pictures of meshes and tensors: grids of devices, with the part that each holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.align import Align
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..core.checks import file_access
from ..core.files import write_whole
from . import args
from .configs import StorageType
from .device import MeshDevice
from .dtypes import DataType
from .errors import wrong
from .mapping import Array, PlacementShard
from .shapes import MeshCoordinate, MeshShape
from .system import system
from .tensor import Tensor

CELL = 30  # letters of a cell
EDGE, MOST = 2, 4  # of a dim of more, as many from each end are printed
COLOURS = (
    "dark_green", "dark_blue", "dark_red", "purple4", "dark_cyan", "orange4", "grey37",
    "deep_pink4", "dark_olive_green3", "navy_blue", "dark_magenta", "steel_blue",
)  # fmt: skip


# -- printing -------------------------------------------------------------------------------------
def tensor_text(tensor: Tensor) -> str:
    """The tensor as `print` shows it: each part of this process, with its device."""
    if not tensor.is_allocated():
        return "ttnn.Tensor(deallocated)"
    facts = (
        f"shape={tensor.shape}, dtype=DataType::{tensor.dtype.name}, "
        f"layout=Layout::{tensor.layout.name}"
    )
    parts = tensor.local_parts()
    texts = [f"ttnn.Tensor({_rows(p, tensor.dtype)}, {facts})" for p in parts.values()]
    device = tensor.device_
    if device is None or len(tensor.topology.mesh_coords()) == 1:
        return "\n".join(texts)
    ids = [device.get_device_id(c) for c in parts]
    return "\n".join(f"device_id:{i}\n{text}" for i, text in zip(ids, texts))


def _rows(x: Array, dtype: DataType, indent: int = len("ttnn.Tensor(")) -> str:
    if x.ndim == 0:
        return _number(x, dtype)
    shown: list[str] = []
    for i in _shown_indices(x.shape[0]):
        shown.append(
            (" ..." if x.ndim == 1 else "...") if i is None else _rows(x[i], dtype, indent + 1)
        )
    between = ", " if x.ndim == 1 else ",\n" + " " * (indent + 1)
    return f"[{between.join(shown)}]"


def _shown_indices(n: int) -> list[int | None]:
    return [*range(n)] if n <= MOST else [*range(EDGE), None, *range(n - EDGE, n)]


def _number(x: Any, dtype: DataType) -> str:
    return f"{float(x):8.5f}" if dtype.is_float else f"{int(x):4d}"


# -- pictures -------------------------------------------------------------------------------------
def _grid(
    title: str, shape: Sequence[int], cell: Callable[[MeshCoordinate], tuple[str, str]]
) -> Table:
    rows, cols = ([1] * (2 - len(shape)) + list(shape))[-2:]
    table = Table(
        title=title, box=box.SQUARE, show_header=False, show_lines=True, padding=0, title_style=""
    )
    for _ in range(cols):
        table.add_column(justify="center", width=CELL, no_wrap=True)
    for r in range(rows):
        line: list[RenderableType] = []
        for c in range(cols):
            text, style = cell(MeshCoordinate([r, c][-len(shape) :]))
            line.append(Align(Text(text, style, justify="center"), "center"))
        table.add_row(*line)
    return table


def mesh_picture(device: MeshDevice, tensor: Tensor | None = None) -> RenderableType:
    """The devices of a mesh; with a tensor, the part that each of them holds."""
    if len(device.shape) > 2:
        raise wrong(
            f"a mesh of {len(device.shape)} dims has no picture",
            fix="look at a part of two dims: device.create_submesh(...)",
        )

    here = device.all_local()

    def cell(at: MeshCoordinate) -> tuple[str, str]:
        where = "" if here else "Local" if device.is_local(at) else "Remote"
        return f"Dev. ID: {device.get_device_id(at)}\n{tuple(at)}\n{where}", ""

    rows, cols = ([1] * (2 - len(device.shape)) + list(device.shape))[-2:]
    return _grid(f"MeshDevice(rows={rows}, cols={cols}):", device.shape, cell)


def tensor_picture(tensor: Tensor) -> RenderableType:
    """The part of a tensor that each device holds; equal parts have a colour."""
    if tensor.device_ is not None:
        _ = tensor.value  # it is there, or an error says so
    topology = tensor.topology
    grid = topology.distribution_shape()
    shape = tensor.grid_ if tensor.device_ is not None else grid
    if shape is None or len(shape) > 2:
        raise wrong("a tensor over more than two dims has no picture", fix="use fewer dims")
    places = topology.mesh_coords()
    order = [MeshCoordinate(at) for at in np.ndindex(*grid)]
    if len(order) == len(places):
        by_place = dict(zip(places if tensor.device_ is not None else order, order))
    else:
        by_place = {c: c for c in places}
    slices = {at: _slice(tensor, grid, where) for at, where in by_place.items()}
    colours = {
        text: COLOURS[i % len(COLOURS)] for i, text in enumerate(dict.fromkeys(slices.values()))
    }

    def cell(at: MeshCoordinate) -> tuple[str, str]:
        head = f"{tuple(at)}"
        if tensor.device_ is not None:
            head = f"Dev. ID: {tensor.device_.get_device_id(at)}\n{tuple(at)}"
        if at not in slices:
            return f"{head}\n", ""
        text = (
            f"{head}\n{slices[at]}\nShape: {list(tensor.shape)}\n"
            f"Dtype: DataType.{tensor.dtype.name}\nLayout: Layout.{tensor.layout.name}"
        )
        return text, f"white on {colours[slices[at]]}"

    storage = "HOST" if tensor.storage_type() is StorageType.HOST else "DEVICE"
    placements = Panel(str(topology.placements()), title="Placement Configuration", expand=False)
    return Group(placements, _grid(f"Tensor(storage: {storage})", shape, cell))


def _slice(tensor: Tensor, grid: MeshShape, at: Sequence[int]) -> str:
    """The elements of the whole that a part has."""
    sizes = tensor.shape
    parts = [":"] * len(sizes)
    for i, p in enumerate(tensor.topology.placements()):
        if isinstance(p, PlacementShard) and len(grid) == len(tensor.topology.placements()):
            n = sizes[p.dim]
            parts[p.dim] = f"{at[i] * n}:{(at[i] + 1) * n}"
    return f"[{', '.join(parts)}]"


def system_picture() -> RenderableType:
    """The devices of the system."""
    found = system()
    shape = tuple(found.shape)

    def cell(at: MeshCoordinate) -> tuple[str, str]:
        return f"Dev. ID: {found.ids[tuple(at)]}\n{tuple(at)}", ""

    title = f"SystemMesh Global Shape: {shape} | Local Shape: {shape}"
    lines = [f"SystemMesh {word} Shape: {found.shape}" for word in ("Global", "Local")]
    return Group(Text(f"{lines[0]}\n\n{lines[1]}\n"), _grid(title, found.shape, cell))


def _show(picture: RenderableType, shape: Sequence[int], svg: str | Path | None) -> None:
    width = (CELL + 1) * shape[-1] + 1
    console = Console(width=max(width, 80), record=svg is not None, highlight=False)
    console.print(picture)
    if svg is not None:
        with file_access("visualize", svg, "written", "name a file in a folder of your own"):
            write_whole(Path(svg), console.export_svg(title="ttnn").encode())


def visualize_mesh_device(
    mesh_device: MeshDevice, tensor: Tensor | None = None, *, svg: str | Path | None = None
) -> None:
    """Prints the devices of a mesh; with a tensor, the part of each. `svg` names a file that
    gets the picture too."""
    mesh_device = args.mesh_device("visualize_mesh_device", mesh_device)
    picture = mesh_picture(mesh_device) if tensor is None else tensor_picture(tensor)
    _show(picture, mesh_device.shape, svg)


def visualize_tensor(tensor: Tensor, *, svg: str | Path | None = None) -> None:
    """Prints which part of a tensor each device holds, equal parts in one colour. `svg` names a
    file that gets the picture too."""
    shape = tensor.grid_ or tensor.topology.distribution_shape()
    _show(tensor_picture(tensor), shape, svg)


def visualize_system_mesh(*, svg: str | Path | None = None) -> None:
    """Prints the devices of the system. `svg` names a file that gets the picture too."""
    _show(system_picture(), system().shape, svg)


__all__ = [
    "visualize_mesh_device", "visualize_system_mesh", "visualize_tensor",
]  # fmt: skip
