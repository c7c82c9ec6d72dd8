"""`export.save` and `export.load`: a program in one file, with its weights.

The file is a zip archive: `program.json` (versions, structures of arguments and result), `graph`
(the text of the recorded graph, collectives included) and the bytes of each weight. A reader needs
neither the function's code nor the mesh's devices, since a mesh folds onto fewer.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checks import existing, file_access, path_of
from ..core.devices import device_count
from ..core.dtypes import dtype_of
from ..core.errors import GraphError, MeshError, TesseraError, UsageError
from ..core.files import write_whole
from ..core.layout import TensorType
from ..core.mesh import Mesh
from ..core.version import VERSION
from ..ir.graph.node import Graph
from ..ir.graph.text import parse_on, to_text
from ..ir.graph.verify import verify
from ..lang.jit.jit import Jit, jit
from ..lang.jit.taken_out import OneProgram
from ..lang.program.training_step import TrainingStep
from ..lang.record.first_process import by_first, to_first
from ..lang.record.recorder import current
from ..lang.record.tree import spec_paths
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from .program import Exported, Source
from .structure import decoded, encoded

FORMAT = 1
"""The version of the file; it changes when the meaning of one of its parts does."""
FIXED = (bool, int, float, str)


def save(f: Callable[..., Any], path: str | Path, *args: Any, **kwargs: Any) -> None:
    """Saves the program of `f(*args, **kwargs)` to the file `path`; `f` is recorded, not run.

    `f` is a function, compiled or not, or a module. Tensors in the arguments are arguments of the
    saved program; numbers and strings are fixed. What `f` closes over, such as the weights of a
    model, goes into the file. Raises UsageError if the call is several programs, changes what it
    closes over or its arguments, has containers other than dicts, lists and tuples, or calls
    functions of Python or JAX while it runs; or if the file cannot be written.

    >>> import tempfile, tessera as ts
    >>> w = ts.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ts.export.save(lambda x: {"y": x @ w}, f"{folder}/double.ts", ts.zeros((3, 2)))
    ...     program = ts.export.load(f"{folder}/double.ts")
    >>> program(ts.ones((3, 2)))["y"].numpy().tolist()
    [[4.0, 6.0], [4.0, 6.0], [4.0, 6.0]]
    """
    to = path_of("export.save", "path", path)
    if current() is not None:
        raise UsageError(
            "export.save: inside of a compiled function nothing is written", fix="call it outside"
        )
    if isinstance(f, TrainingStep):
        raise UsageError(
            f"export.save: {f.compiled.name} is a training step, which changes its parameters",
            fix="save a function that returns the new values, or the forward pass of its model",
        )
    own = f if isinstance(f, Jit) else jit(f)
    if own._pads:
        raise UsageError(
            f"export.save: {own.name} pads its arguments to several sizes",
            fix="save the function without pad=, a program for each size",
        )
    one = own.one_program("export.save", args, kwargs)
    if one.changes:
        raise UsageError(
            f"export.save: {own.name} changes its arguments or what it closes over, or prints",
            fix="return the new values",
        )
    head, weights = _described(own.name, one)
    text, arrays = _text(own.name, one.graph), list(map(to_first, weights))

    def write() -> None:
        with file_access("export.save", to, "written", "name another file"):
            write_whole(to, _archive(head, text, arrays))

    by_first(f"export.save {to}", write)


def _described(name: str, one: OneProgram) -> tuple[dict[str, Any], list[Tensor]]:
    """(the contents of `program.json`, the weights)."""
    given = {s for s in one.sources if isinstance(s, int)}
    tensors = {i for i, x in enumerate(one.leaves) if isinstance(x, Tensor)}
    own = one.leaves[: len(spec_paths(one.spec))]  # the others are of what it closes over
    fixed = {i: x for i, x in enumerate(own) if i not in given | tensors}
    results = [x for i, x in enumerate(one.out_leaves) if i not in set(one.slots)]
    odd = [x for x in (*fixed.values(), *results) if type(x) not in FIXED]
    if odd:
        raise UsageError(
            f"export.save: {name} takes or returns a {type(odd[0]).__name__}, which the file"
            " cannot hold",
            fix="give and return tensors, numbers and strings, in dicts, lists and tuples",
        )
    weights = [s for s in one.sources if isinstance(s, Tensor)]
    head = {
        "format": FORMAT,
        "tessera": VERSION,
        "arguments": encoded("export.save", "the call", one.spec),
        "fixed": {str(i): x for i, x in fixed.items()},
        "result": encoded("export.save", "the result", one.out_spec),
        "leaves": list(one.out_leaves),
        "slots": list(one.slots),
        "sources": [s if isinstance(s, int) else "key" if s is None else "weight"
                    for s in one.sources],
        "weights": [[t.dtype.name, list(t.shape)] for t in weights],
    }  # fmt: skip
    return head, weights


def _text(name: str, graph: Graph) -> str:
    try:
        return to_text(graph)
    except GraphError as error:
        raise UsageError(
            f"export.save: {name} calls a function of Python or JAX while it runs",
            rows=[("in the graph", str(error).splitlines()[0])],
            fix="write that part with ops of Tessera",
        ) from None


def _archive(head: dict[str, Any], graph: str, weights: list[Any]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("program.json", json.dumps(head))
        archive.writestr("graph", graph)
        for i, x in enumerate(weights):
            archive.writestr(f"weights/{i}", x.tobytes())
    return buffer.getvalue()


def load(path: str | Path, *, onto: str | int | dict[str, int] | Mesh | None = None) -> Exported:
    """The program of a file of `export.save`, to be called like the function. Its code is not
    needed.

    `onto` folds the program's mesh onto other devices, as `mesh.fold(onto=...)` does. Raises
    UsageError if the file does not exist, is damaged or was saved in another format, or if the
    machine has too few devices; MeshError if `onto` is no fold of the mesh.
    """
    at = path_of("export.load", "path", path)
    existing("export.load", at, "name a file of export.save")
    try:
        with zipfile.ZipFile(at) as archive:
            head = json.loads(archive.read("program.json"))
            _see_version(at, head)
            text = archive.read("graph").decode()
            weights = [archive.read(f"weights/{i}") for i in range(len(head["weights"]))]
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UsageError(
            f"export.load: {str(at)!r} is no file of export.save, or is damaged",
            reason=str(error),
            fix="save it again",
        ) from None
    graph = _on_devices(at, text, onto)
    return Exported(
        graph,
        head["tessera"],
        _sources(head, graph, weights),
        head["arguments"],
        {int(i): x for i, x in head["fixed"].items()},
        (decoded(head["result"]), head["leaves"], head["slots"]),
    )


def _see_version(path: Path, head: dict[str, Any]) -> None:
    if head["format"] != FORMAT:
        raise UsageError(
            f"export.load: {str(path)!r} is of format {head['format']}, this version reads"
            f" {FORMAT}",
            rows=[("saved by", f"Tessera {head['tessera']}"), ("this is", f"Tessera {VERSION}")],
            fix=f"load it with Tessera {head['tessera']}, or save it again with this one",
        )


def _on_devices(path: Path, text: str, onto: Any) -> Graph:
    """The graph of `text`, on the devices of this process."""

    def placed(mesh: Mesh) -> Mesh:
        if onto is None:
            return mesh
        plain = mesh.unfolded
        try:
            return Mesh(plain.axes, shape=dict(plain.sizes)).fold(onto)
        except TesseraError as error:
            wrong.append(error)
            raise

    wrong: list[TesseraError] = []
    try:
        graph = parse_on(text, placed)
    except GraphError as error:
        raise (wrong[0] if wrong else error) from None
    verify(graph)
    mesh = graph.mesh
    if onto is not None and mesh is None:
        raise MeshError(
            f"export.load: the program of {str(path)!r} has no mesh to fold", fix="leave out onto="
        )
    have = device_count()
    if mesh is not None and max(mesh.physical.ids) >= have:
        raise UsageError(
            f"export.load: the program runs on {mesh.physical.size} devices, here are {have}",
            mesh=mesh.text(),
            fix=f"export.load({str(path)!r}, onto={have}), or sizes by axis: onto={{...}}",
        )
    return graph


def _sources(head: dict[str, Any], graph: Graph, weights: list[bytes]) -> list[Source]:
    rest = iter(zip(head["weights"], weights, strict=True))
    found: list[Source] = []
    for source, n in zip(head["sources"], graph.inputs, strict=True):
        if source == "weight":
            (name, shape), data = next(rest)
            x = np.frombuffer(data, dtype_of(name).numpy).reshape(shape)
            found.append(_placed(x, n.type))
        else:
            found.append(None if source == "key" else source)
    return found


def _placed(x: np.ndarray[Any, Any], type: TensorType) -> Tensor:
    return Tensor(engine().place(x, type), type)
