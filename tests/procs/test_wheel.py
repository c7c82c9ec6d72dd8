"""The wheel: built and installed alone, it runs the README's first example with the stated
output."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
from pathlib import Path

import tessera as ts
from tests.cases import LONG
from tests.mesh.test_docs import ROOT, blocks

WHERE = "import tessera; print(tessera.__file__)"


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a Python with the wheel and without this repository."""
    here = {**os.environ, "PYTHONPATH": str(cwd / "site")}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=here, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@LONG
def test_a_wheel_runs_the_first_example(tmp_path: Path) -> None:
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    made = ("--no-deps", "--no-build-isolation")
    run(*pip, "wheel", *made, "--wheel-dir", tmp_path, copy_of_sources(tmp_path), cwd=tmp_path)
    (wheel,) = tmp_path.glob(f"tessera_spmd-{ts.__version__}-*.whl")
    run(*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    assert Path(run("-c", WHERE, cwd=tmp_path).strip()).is_relative_to(tmp_path / "site")
    (about,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    metadata = email.message_from_string(about.read_text(encoding="utf-8"))
    assert (metadata["Name"], metadata["Version"]) == ("tessera-spmd", ts.__version__)
    assert {"hf", "data", "cloud"} <= {*metadata.get_all("Provides-Extra", [])}
    said = "import tessera as ts\ntry: ts.cat\nexcept AttributeError as error: print(error)"
    assert "write ts.concat" in run("-c", said, cwd=tmp_path)  # from a data file
    first = blocks((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    (tmp_path / "example.py").write_text(first.code)
    assert run("example.py", cwd=tmp_path) == first.printed


def copy_of_sources(folder: Path) -> Path:
    """A copy of the wheel's sources, since the build leaves files beside them."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    return sources
