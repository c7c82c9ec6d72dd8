"""The documentation site, built by `make docs` in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tessera as ts
from tests.cases import LONG
from tests.mesh.test_docs import PAGES, ROOT

IMPORT = re.compile(r"\bfrom tessera\.(train|cost|show)([.\w]*) import (.*)")
OUTSIDE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//")


def run(folder: Path, *command: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the pages of its site."""
    folder = tmp_path_factory.mktemp("copy")
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "bench").mkdir()
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("README.md", "CHANGELOG.md", "mkdocs.yml", "bench/RESULTS.md"):
        shutil.copy(ROOT / name, folder / name)
    run(folder, "docs/site/build.py")
    return folder


def test_the_reference_has_what_guides_import(copy: Path) -> None:
    reference = copy / "build" / "pages" / "reference"
    seen = set()
    for guide in PAGES:
        for package, module, names in IMPORT.findall(guide.read_text(encoding="utf-8")):
            page = (reference / f"{package}.md").read_text()
            seen.add(package)
            for name in names.split(", "):
                found = rf"^::: tessera\.{package}{module}\.{name}\b"
                assert re.search(found, page, re.MULTILINE), f"{guide.name}: {name}"
    assert seen == {"train", "cost", "show"}
    assert "::: tessera.train.recipe.make_step\n" in (reference / "train.md").read_text()


def test_code_of_the_first_page_has_whole_lines(copy: Path) -> None:
    page = (copy / "build" / "pages" / "index.md").read_text()
    fences = re.findall(r"^```.+", page, re.MULTILINE)
    assert len(fences) >= 2 and all(".whole-lines" in fence for fence in fences)
    assert re.match(r"---\nhide: \[navigation, toc\]\n", page)


def test_search_needs_no_file_from_elsewhere(copy: Path) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert "offline" in config["plugins"]
    (worker,) = config["extra"]["polyfills"]  # the plugin's default is a CDN
    assert "iframe-worker" in worker and (copy / "build" / "pages" / worker).is_file()


@LONG
def test_the_site_opens_from_disk(copy: Path) -> None:
    """All links hold, no page loads a file from elsewhere, and each shows the version."""
    run(copy, "-m", "mkdocs", "build", "--strict", "--quiet")
    site = copy / "site"
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert f"Tessera {ts.__version__}</title>" in text, page.name
        assert OUTSIDE.findall(text) == [], page.name
    assert (site / "install.html").is_file()
