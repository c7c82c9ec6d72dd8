"""`tessera train`: trains the model of a HuggingFace config on text or tokens.

>>> from typer.testing import CliRunner
>>> from .cli import app
>>> print(CliRunner().invoke(app, ["train", "--hf", "absent", "--data", "."]).output)
train: 'absent' does not exist (give a config.json, or a folder with one)
<BLANKLINE>
"""

from __future__ import annotations

import json as js
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..core.checks import existing, one_of
from ..core.devices import process_count, process_index
from ..core.errors import TesseraError, UsageError
from ..train.cli import one_line


def train(
    hf: Annotated[Path, typer.Option(help="A config.json, or a folder with one.")],
    data: Annotated[Path, typer.Option(help="A file or folder of text, or of tokens.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run [runs/NAME].")] = None,
    mesh: Annotated[str, typer.Option(help="auto, or axes and sizes: dp=2,tp=4.")] = "auto",
    zero: Annotated[int, typer.Option(help="ZeRO stage over dp of --mesh.", min=0, max=3)] = 0,
    machine: Annotated[
        str, typer.Option(help="For --mesh auto: a file of tessera calibrate [measured now].")
    ] = "",
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 1000,
    batch: Annotated[int, typer.Option(help="Sequences a step.", min=1)] = 32,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.", min=1)] = 512,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=0)] = 3e-4,
    seed: Annotated[int, typer.Option(help="Of weights, batches, dropout.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="Of the matrix products: f32 or bf16.")] = "f32",
    data_dtype: Annotated[str, typer.Option(help="Of .bin files: uint16 or uint32.")] = "",
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints [a tenth of --steps].", min=0)
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with the run in --out.")
    ] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Prints the result as JSON, all else to stderr.")
    ] = False,
) -> None:
    """Trains the causal language model of a HuggingFace config, and saves it in that format.

    The same command with the same --out goes on where the run ended, with the bits of a run that
    never stopped. A folder's weights are the first ones; a config alone gives random ones.
    """
    from ..lang.record.contexts import autocast
    from ..train.hf_run import Options, train_hf

    try:
        existing("train", hf, "give a config.json, or a folder with one", folder=True)
        one_of("train", "--dtype", dtype, ("f32", "bf16"))
        if mesh == "auto" and zero:
            fix = "the search decides it: leave it out, or name the --mesh"
            raise UsageError("train: --zero has no effect with --mesh auto", fix=fix)
        if mesh != "auto" and machine:
            fix = "it is for --mesh auto: leave one out"
            raise UsageError(f"train: --machine has no effect with --mesh {mesh}", fix=fix)
        with autocast(dtype):
            options = Options(
                hf=hf, data=data, out=out or _fresh(hf), mesh=mesh, zero=zero, machine=machine,
                steps=steps, batch=batch, seq=seq, lr=lr, seed=seed, dtype=dtype,
                data_dtype=data_dtype, save_every=save_every or max(1, steps // 10), resume=resume,
            )  # fmt: skip
            found = train_hf(options, Console(quiet=process_index() > 0, stderr=json))
            if json and process_index() == 0:
                typer.echo(js.dumps(found))
    except TesseraError as error:
        typer.echo(one_line(error), err=True)
        raise typer.Exit(2) from None


def _fresh(hf: Path) -> Path:
    """A new folder for the run. Raises UsageError for several processes, which need one name."""
    from ..train.run import fresh_folder

    if process_count() > 1:
        raise UsageError("train: several processes need one folder", fix="name it: --out FOLDER")
    return fresh_folder("runs", hf.resolve().stem)


__all__ = ["train"]
