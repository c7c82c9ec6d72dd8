"""`tessera info`: versions, devices and caches of this host.

>>> from typer.testing import CliRunner
>>> from .cli import app
>>> CliRunner().invoke(app, ["info"]).output.split()[0]
'tessera'
"""

from __future__ import annotations

import json as js
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import environment
from ..core.wording import columns
from ..ir.graph.text import size_text
from ..lang.jit import tuner
from .doctor.command import engine_output_to_stderr
from .doctor.host import versions


def info(
    json: Annotated[bool, typer.Option("--json", help="Prints the facts as JSON.")] = False,
) -> None:
    """Shows the versions, the devices and the caches. The exit status is 1 if the devices cannot be
    started; tessera doctor finds out why."""
    with engine_output_to_stderr():
        facts = _facts()
    typer.echo(js.dumps(facts, indent=2) if json else _text(facts))
    raise typer.Exit(1 if "error" in facts["devices"] else 0)


def _facts() -> dict[str, Any]:
    _, found = versions()
    return {
        "versions": {**found, "python": platform.python_version(), "system": platform.platform()},
        "devices": _devices(),
        "caches": _caches(),
    }


def _devices() -> dict[str, Any]:
    """Returns the platform, the kind and the numbers of devices, or the error of their start."""
    try:
        from ..runtime.processes.diagnose import engine_facts

        found = engine_facts()
    except Exception as error:  # of Tessera or of the engine
        return {"error": str(error).splitlines()[0]}
    names = ("platform", "kind", "devices", "local", "processes")
    return {name: found[name] for name in names}


def _caches() -> dict[str, Any]:
    """Returns folder, files and bytes of each cache; None for one that is off."""
    tuning = tuner.folder()
    found = {"programs": tuning and tuning.parent / "programs", "tuning": tuning}
    if tuning is not None and environment.text(environment.PROGRAM_CACHE):
        found["programs"] = tuning.parent  # a named folder holds the programs itself
    return {name: folder and _cache(folder) for name, folder in found.items()}


def _cache(folder: Path) -> dict[str, Any]:
    """Returns the files in `folder`, without those of folders inside of it."""
    sizes = []
    for path in folder.glob("*") if folder.is_dir() else ():
        try:
            sizes += [path.stat().st_size] if path.is_file() else []
        except OSError:  # another process has just removed it
            continue
    return {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)}


def _text(facts: dict[str, Any]) -> str:
    rows = [(name, str(text)) for name, text in facts["versions"].items()]
    rows += [(name, str(text)) for name, text in facts["devices"].items()]
    for name, cache in facts["caches"].items():
        text = "off"
        if cache is not None:
            text = f"{cache['folder']}, {cache['files']} files, {size_text(cache['bytes'])}"
        rows.append((name, text))
    return "\n".join(columns(rows, 2))


__all__ = ["info"]
