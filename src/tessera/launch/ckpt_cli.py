"""`tessera ckpt`: lists, shows, verifies, compares, exports and prunes checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..checkpoint.export import export as export_to
from ..checkpoint.listing import (
    ROOT,
    Keep,
    age_text,
    manifest_of,
    manifests,
    metrics_text,
    named,
    other_format,
    prune,
    reader,
    tags,
)
from ..checkpoint.manifest import Manifest
from ..checkpoint.storage import Storage
from ..core.errors import CheckpointError, TesseraError, UsageError
from ..ir.graph.text import size_text
from ..train.cli import one_line

ckpt = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Lists and checks checkpoints."
)
HELD = "The folder or URL that holds them."
Where = Annotated[str, typer.Option("--root", help=HELD)]
Json = Annotated[bool, typer.Option("--json", help="Prints JSON.")]
Tag = Annotated[str, typer.Argument(help="Which one; the latest without it.")]


DAMAGED, WRONG_USAGE = 1, 2
"""Exit statuses; a flag that does not exist has the second, too."""


@contextmanager
def _told(status: int = WRONG_USAGE, *rows: str) -> Iterator[None]:
    try:
        yield
    except TesseraError as error:
        typer.echo(one_line(error, "file", "tensor", "reason", *rows), err=True)
        raise typer.Exit(status) from None


def _state(check: Callable[[], object]) -> str:
    try:
        check()
    except TesseraError as error:
        return one_line(error).partition(" (")[0]
    return "whole"


def _sizes(storage: Storage, m: Manifest) -> str:
    """Returns "complete" if the files of `m` have the sizes in its manifest, else the number that
    do not."""
    sizes = {file: storage.size(f"{m.tag}/{file}") for file in m.files()}
    other = [file for file, size in m.files().items() if sizes[file] not in (None, size)]
    return f"{len(other)} files have another size" if other else "complete"


@ckpt.command()
def ls(
    folder: Annotated[str, typer.Argument(metavar="[ROOT]", help="As --root.")] = "",
    root: Annotated[str, typer.Option("--root", help=HELD, show_default=ROOT)] = "",
    verify: Annotated[bool, typer.Option(help="Read every byte of each.")] = False,
    metric: Annotated[str, typer.Option(help="The metric to show.")] = "",
    as_json: Json = False,
) -> None:
    """Lists the checkpoints, the newest last; the status of --verify is 1 if one is damaged."""
    with _told():
        if folder and root:
            raise UsageError(
                f"ckpt ls: {folder!r} and --root {root!r} are two roots",
                fix="name one of them, and list the other by itself",
            )
        storage = _storage_of(folder or root or ROOT)
        manifests_found, wrong = manifests(storage)
        files = set(storage.listed())
        if metric and manifests_found and not any(metric in m.metrics for m in manifests_found):
            raise UsageError(
                f"ckpt ls: no checkpoint in {storage.name!r} has the metric {metric!r}",
                fix=f"there are: {metrics_text(manifests_found)}",
            )
    table = Table("tag", "step", "age", "size", "mesh", "metric", "state", box=box.SIMPLE)
    damaged, listed = bool(wrong), list[dict[str, Any]]()
    for m in manifests_found:
        told = [(k, v) for k, v in m.metrics.items() if k == (metric or k)][:1]
        missing = [f for f in m.files() if f"{m.tag}/{f}" not in files]
        state = f"{len(missing)} files are missing" if missing else _sizes(storage, m)
        if verify:
            state = _state(reader(storage, m).check)
        if state not in ("complete", "whole") and m.tag not in tags(storage):
            continue  # another process has just removed it
        damaged |= state not in ("complete", "whole")
        listed.append({
            "tag": m.tag, "step": m.step, "created_s": m.created_s, "bytes": m.nbytes,
            "mesh": m.mesh, "metrics": m.metrics, "state": state,
        })  # fmt: skip
        table.add_row(
            m.tag, "" if m.step is None else str(m.step), age_text(m.created_s),
            size_text(m.nbytes), m.mesh, "".join(f"{k} {v:.4g}" for k, v in told), state,
        )  # fmt: skip
    for tag in wrong:
        table.add_row(tag, "", "", "", "", "", "its manifest cannot be used")
        listed.append({"tag": tag, "state": "its manifest cannot be used"})
    if as_json:
        typer.echo(json.dumps(listed))
    else:
        Console().print(table if manifests_found or wrong else f"no checkpoints in {storage.name}")
    if verify and damaged:
        raise typer.Exit(DAMAGED)


@ckpt.command()
def show(tag: Tag = "latest", root: Where = ROOT, as_json: Json = False) -> None:
    """Shows the tensors, metrics and state of one checkpoint."""
    with _told():
        m = _manifest(root, tag)
    console = Console()
    said = {
        "tag": m.tag, "step": m.step, "saved": age_text(m.created_s), "mesh": m.mesh or "none",
        "processes": m.processes, "numerics": m.numerics, "bytes": f"{m.nbytes:,}",
        "versions": m.versions, "metrics": m.metrics, "random": m.random, "state": m.state,
    }  # fmt: skip
    if as_json:
        tensors = {
            name: {"type": t.layout, "pieces": len(t.pieces), "bytes": t.nbytes}
            for name, t in m.tensors.items()
        }
        said |= {"saved": m.created_s, "bytes": m.nbytes, "tensors": tensors, "values": m.values}
        typer.echo(json.dumps(said, default=repr))
        return
    for name, value in said.items():
        text = value if isinstance(value, str) else json.dumps(value)
        console.print(f"{name:10} {text}", highlight=False, markup=False, soft_wrap=True)
    table = Table("name", "type", "pieces", "size", box=box.SIMPLE)
    for name, t in m.tensors.items():
        table.add_row(name, t.layout, str(len(t.pieces)), size_text(t.nbytes))
    for name, value in m.values.items():
        table.add_row(name, repr(value), "", "")
    console.print(table)


@ckpt.command()
def verify(tag: Tag = "latest", root: Where = ROOT, as_json: Json = False) -> None:
    """Reads every byte of a checkpoint; the status is 1 if it is damaged, 2 if it does not
    exist."""
    with _told():
        there = tags(Storage(root))
    found = there if tag == "latest" else tag in there
    with _told(DAMAGED if found else WRONG_USAGE, *there):
        m = _manifest(root, tag)
        count = reader(Storage(root), m).check()
    if as_json:
        typer.echo(json.dumps({"tag": m.tag, "bytes": count}))
    else:
        typer.echo(f"{m.tag}: {count:,} bytes are those that were saved")


@ckpt.command()
def diff(
    first: Annotated[str, typer.Argument(help="One checkpoint.")],
    second: Annotated[str, typer.Argument(help="The other one.")],
    root: Where = ROOT,
    as_json: Json = False,
) -> None:
    """Shows the tensors and values that differ; the exit status is 1 if any do."""
    with _told():
        storage = Storage(root)
        a, b = _manifest(root, first), _manifest(root, second)
        left, right = reader(storage, a), reader(storage, b)
        rows = []
        for name in sorted({*a.tensors, *b.tensors, *a.values, *b.values}):
            one, other = (x.tensors.get(name) for x in (a, b))
            if one is None or other is None:
                if a.values.get(name, ...) != b.values.get(name, ...):
                    rows.append((name, "only in one" if one or other else "differs"))
            elif (one.dtype, one.shape) != (other.dtype, other.shape):
                rows.append((name, f"{one.dtype}{one.shape}, {other.dtype}{other.shape}"))
            else:
                x, y = left.read(name), right.read(name)
                if x.tobytes() != y.tobytes():
                    largest_difference = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
                    rows.append((name, f"largest difference {largest_difference:.3g}"))
    if as_json:
        typer.echo(json.dumps({"differ": dict(rows), "all": len(a.tensors) + len(a.values)}))
        raise typer.Exit(1 if rows else 0)
    for name, why in rows:
        typer.echo(f"{name}: {why}")
    typer.echo(f"{len(rows)} of {len(a.tensors) + len(a.values)} differ")
    raise typer.Exit(1 if rows else 0)


@ckpt.command()
def export(
    to: Annotated[Path, typer.Argument(help="A .safetensors or .npz file.")],
    tag: Tag = "latest",
    root: Where = ROOT,
    only: Annotated[str, typer.Option(help="Names to take, such as blocks.*")] = "*",
    as_json: Json = False,
) -> None:
    """Writes the weights of a checkpoint to a file that other programs read."""
    with _told():
        count = export_to(to, tag, root, only=only)
    said = {"file": str(to), "tensors": count}
    typer.echo(json.dumps(said) if as_json else f"{to}: {count} tensors")


@ckpt.command("prune")
def prune_command(
    last: Annotated[int, typer.Argument(min=1, help="How many of the newest stay.")],
    root: Where = ROOT,
    every: Annotated[int, typer.Option(min=0, help="Each n-th step stays; 0: none.")] = 0,
    best: Annotated[int, typer.Option(min=0, help="So many of the best stay.")] = 0,
    metric: Annotated[str, typer.Option(help="By which metric.")] = "loss",
    largest: Annotated[bool, typer.Option(help="The largest values are the best.")] = False,
    as_json: Json = False,
) -> None:
    """Removes checkpoints that no option keeps."""
    with _told():
        _storage_of(root)
        gone = prune(Keep(last, every or None, best, metric, largest), root)
    said = json.dumps({"removed": list(gone)})
    typer.echo(said if as_json else f"removed {', '.join(gone) or 'nothing'}")


def _storage_of(root: str) -> Storage:
    """Returns the storage of `root`. Raises CheckpointError if it is a folder without
    checkpoints."""
    storage = Storage(root)
    if storage.folder is not None and not tags(storage):
        fix = other_format(storage)
        if fix or not storage.folder.is_dir():
            fix = fix or "name the root that checkpoint.save wrote to, and not a tag"
            raise CheckpointError(f"checkpoint: {root!r} has no checkpoint", fix=fix)
    return storage


def _manifest(root: str, tag: str) -> Manifest:
    storage = Storage(root)
    return manifest_of(storage, named(storage, tag))
