"""The distribution's name on pip, in each text with instructions to install it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import tessera as ts
from tessera.core import checks
from tessera.core.version import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile")),
    *(f for folder in ("docs", "examples", "bench") for f in (ROOT / folder).rglob("*.md")),
    *(f for folder in ("src", "examples", "bench") for f in (ROOT / folder).rglob("*.py")),
]
INSTALLED = re.compile(r"pip3? install ([^`\n]*)")
EXTRAS = re.compile(r"(?:tessera-spmd|\.|\.whl)\[([\w,]+)\]")


def test_the_project_has_the_name_and_its_extras_refer_to_it() -> None:
    assert PROJECT["name"] == DISTRIBUTION == "tessera-spmd"
    own = [
        r for extra in PROJECT["optional-dependencies"].values() for r in extra if "tessera" in r
    ]
    assert own and all(r.startswith(f"{DISTRIBUTION}[") for r in own)


def test_no_text_installs_a_distribution_of_another_name() -> None:
    named = [w for f in TEXTS for w in INSTALLED.findall(f.read_text(encoding="utf-8"))]
    assert sum("tessera" in w for w in named) > 6
    ours = re.compile(r"tessera-spmd\b|tessera_spmd-[\d.]+-")
    assert [w for w in named if "tessera" in ours.sub("", w)] == []
    extras = {e for w in named for found in EXTRAS.findall(w) for e in found.split(",")}
    assert {"hf", "data"} <= extras <= {*PROJECT["optional-dependencies"]}


def test_a_missing_library_is_installed_by_an_extra() -> None:
    with pytest.raises(ts.UsageError, match=r"fix : pip install 'tessera-spmd\[hf\]'"):
        checks.library("checkpoint", "no_such_library", "hf")
    sources = "".join(f.read_text(encoding="utf-8") for f in TEXTS if f.suffix == ".py")
    asked = {*re.findall(r'\blibrary\(\s*[\w."]+, [\w."]+, "(\w+)"\s*\)', sources)}
    assert {"hf", "data", "demo", "torch", "cloud"} <= asked
    assert asked <= {*PROJECT["optional-dependencies"]}


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == ts.__version__
    for page in ("README.md", "docs/install.md"):
        wheels = re.findall(r"tessera_spmd-(.*?)-py3", (ROOT / page).read_text(encoding="utf-8"))
        assert wheels and {*wheels} == {ts.__version__}
