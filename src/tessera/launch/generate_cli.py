"""`tessera generate`: continues texts with the model of a HuggingFace folder.

>>> from typer.testing import CliRunner
>>> from .cli import app
>>> CliRunner().invoke(app, ["generate", "no-folder", "Once"]).exit_code
2
"""

from __future__ import annotations

import json as js
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import TesseraError
from ..core.mesh import Mesh
from ..train.cli import one_line


def generate(
    folder: Annotated[
        Path, typer.Argument(help="A folder with config.json, *.safetensors, tokenizer.json.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Texts; without one, the lines of the input.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="New tokens of each text, at most.", min=0)] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw among so many; 0: all.")] = 40,
    top_p: Annotated[float, typer.Option(help="Draw among the fewest that reach it.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw with this share of the largest.")] = 0.0,
    repetition: Annotated[float, typer.Option(help="Above 1: repeats are less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides the draws.", min=0)] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text ends before it; may be repeated.")
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="Devices of tensor parallelism: tp=4.", show_default="one device")
    ] = "",
    dtype: Annotated[str, typer.Option(help="bf16, f32, ...", show_default="the files'")] = "",
    json: Annotated[bool, typer.Option("--json", help="Prints the texts as JSON.")] = False,
) -> None:
    """Continues texts with the model of a HuggingFace folder; one text is shown as it grows."""
    from ..interop.hf import load_hf
    from ..interop.hf_text import hf_ends, hf_tokenizer
    from ..train.generate import generate as continued

    try:
        texts = prompt or [line.rstrip("\n") for line in sys.stdin]
        devices = Mesh.parse(mesh) if mesh else None
        tokenizer = hf_tokenizer(folder)
        model = load_hf(folder, devices, "tensor_parallel" if mesh else None, dtype or None)
        alone = len(texts) == 1 and not json
        if alone:
            _show(texts[0])
        found = continued(
            model, texts[0] if alone else texts, tokens, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, repetition=repetition, seed=seed, mesh=devices,
            stop=[*hf_ends(folder), *(stop or ())], tokenizer=tokenizer,
            stream=_show if alone else None,
        )  # fmt: skip
    except TesseraError as error:
        typer.echo(one_line(error), err=True)
        raise typer.Exit(2) from None
    if json:
        pairs = zip(texts, found, strict=True)
        typer.echo(js.dumps([{"prompt": p, "text": text} for p, text in pairs]))
    else:
        typer.echo("" if alone else "\n".join(found))


def _show(piece: str) -> None:
    typer.echo(piece, nl=False)
    sys.stdout.flush()


__all__ = ["generate"]
