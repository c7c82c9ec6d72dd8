"""`tessera calibrate`: measures this machine into a file that plans read.

>>> from typer.testing import CliRunner
>>> from .cli import app
>>> CliRunner().invoke(app, ["calibrate", "--out", "machine.txt"]).exit_code
2
"""

from __future__ import annotations

import json as js
from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import TesseraError
from ..core.machine.load import CLUSTERS, save
from ..train.cli import one_line


def calibrate(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("machine.yaml"),
    quick: Annotated[bool, typer.Option("--quick", help="Few and small measurements.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Prints the result as JSON.")] = False,
) -> None:
    """Measures products, memory, launches and collectives here, in less than two minutes."""
    from ..plan.calibrate import SHAPES
    from ..plan.calibrate import calibrate as measure

    if out.suffix not in CLUSTERS:
        typer.echo(f"calibrate: {out} is no YAML by its name (write --out machine.yaml)", err=True)
        raise typer.Exit(2)
    try:
        found = measure(SHAPES[:3], large=1 << 16, rounds=1) if quick else measure()
        save(found.machine, out)
    except TesseraError as error:
        typer.echo(one_line(error), err=True)
        raise typer.Exit(2) from None
    chip = found.machine.chip
    assert chip is not None
    if json:
        said = {
            "file": str(out),
            "flops_per_s": {p.dtype: p.peak_flops_per_s * p.most for p in chip.products},
            "memory_bytes_per_s": chip.memory_bytes_per_s,
            "launch_s": chip.program_s,
            "kernel_s": chip.kernel_s,
            "links": str(found.machine.topology),
            "error": found.error,
        }
        typer.echo(js.dumps(said))
        return
    for p in chip.products:
        typer.echo(f"{p.dtype:<7} {p.peak_flops_per_s * p.most / 1e9:,.0f} GFLOP/s in products")
    typer.echo(f"memory  {chip.memory_bytes_per_s / 1e9:.1f} GB/s read and written")
    typer.echo(f"launch  {chip.program_s * 1e6:.0f} µs a program, {chip.kernel_s * 1e6:.2f} µs")
    typer.echo(f"links   {found.machine.topology}")
    typer.echo(f"{out}: products with an error of {found.error:.0%} (root mean square)")


__all__ = ["calibrate"]
