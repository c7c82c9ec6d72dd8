"""Makes the pictures of the demo, demo.svg and loss.png, by a run with its terminal recorded.

.venv/bin/python docs/images/make.py            # --steps and the like are the demo's defaults
.venv/bin/python docs/images/make.py steps=3    # or others
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

HERE = Path(__file__).resolve().parent
WIDTH = 84
EXAMPLE = HERE.parents[1] / "examples" / "train_gpt.py"


class Terminal(Console):
    """Wraps long lines as a real terminal does, and leaves out four of five lines of progress."""

    lines = 0

    def print(self, *objects: Any, **how: Any) -> None:
        progress = str(objects[0]).startswith("step ") if objects else False
        self.lines += progress
        if not progress or self.lines % 5 == 0:
            super().print(*objects, **{**how, "soft_wrap": False})


def main(*changes: str) -> None:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    settings = {p.name: p.default for p in inspect.signature(example.main).parameters.values()}
    for name, value in (change.split("=", 1) for change in changes):
        settings[name] = type(settings[name])(value)
    console = Terminal(record=True, width=WIDTH, force_terminal=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        example.train(SimpleNamespace(**settings), console)
        (curve,) = Path("runs").glob("*/loss.png")
        shutil.copy(curve, HERE / "loss.png")
    console.save_svg(str(HERE / "demo.svg"), title="make demo", theme=DIMMED_MONOKAI)


if __name__ == "__main__":
    main(*sys.argv[1:])
