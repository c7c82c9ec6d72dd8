"""Loading of a machine from a file or a preset's name, and saving to a file.

>>> load("t3000").shape
(2, 4)
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MeshError
from ..files import write_whole
from . import cluster_yaml, mesh_graph, mesh_graph_text
from .machine import Machine
from .mesh_ids import ONLY
from .presets import PRESETS, preset
from .share import GRAPHS

CLUSTERS = (".yaml", ".yml")
MOST_BYTES = 2**24


def load(source: str | Path, mesh_id: int | None = None) -> Machine:
    """Returns the machine in the file `source` (.textproto, .yaml), or the preset of that name.

    `mesh_id` selects one mesh of a graph of meshes; ONLY selects the only mesh. Raises MeshError if
    there is neither file nor preset, or with every fault of the file.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise MeshError(
            f"descriptor: {type(source).__name__} is no file and no preset",
            fix="give the path of a .textproto or .yaml file, or the name of a preset",
        )
    path = Path(source)
    if path.suffix in GRAPHS:
        return mesh_graph.read(_text(path), path.name, mesh_id)
    elif path.suffix in CLUSTERS:
        machine = cluster_yaml.read(_text(path), path.name)
    elif path.suffix or os.sep in str(source):
        raise _kind(path)
    else:
        machine = preset(str(source))
    if mesh_id not in (None, ONLY):
        raise MeshError(
            f"{machine.name}: it is one mesh, without a mesh_id",
            fix="leave mesh_id out; mesh graph descriptors (.textproto) have several meshes",
        )
    return machine


def save(machine: Machine, path: str | Path) -> None:
    """Writes `machine` to a file that `load` reads: a descriptor (.textproto) or YAML (.yaml).

    Raises MeshError if that format cannot describe it, or if the file cannot be written.
    """
    to = Path(path)
    if to.suffix not in (*GRAPHS, *CLUSTERS):
        raise _kind(to)
    text = mesh_graph_text.write(machine) if to.suffix in GRAPHS else cluster_yaml.write(machine)
    try:
        write_whole(to, text.encode())
    except OSError as error:
        raise _os(to, error) from None


def _kind(path: Path) -> MeshError:
    return MeshError(
        f"descriptor: {path} is neither a mesh graph descriptor nor YAML, by its name",
        fix=f"a name ends in {', '.join((*GRAPHS, *CLUSTERS))}; presets: {', '.join(PRESETS)}",
    )


def _os(path: Path, error: OSError) -> MeshError:
    return MeshError(
        f"descriptor: {path}: {error.strerror or error}",
        fix="name a file that this process may read or write",
    )


def _text(path: Path) -> str:
    """Returns the text of the file. Raises MeshError if it cannot be read as text."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise OSError(0, f"the file is larger than {MOST_BYTES >> 20} MiB")
        return path.read_bytes().decode()
    except OSError as error:
        raise _os(path, error) from None
    except UnicodeDecodeError as error:
        raise MeshError(
            f"descriptor: {path} is no text: byte {error.start} is not UTF-8",
            fix="write it as UTF-8 text",
        ) from None
