"""The pages of the site: the README as the first one, those of docs/, and a reference of all names.

`python docs/site/build.py` writes them into build/pages, and the nav of mkdocs.yml says where each
stands; `make docs` then builds site/ from them.
"""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path

import tessera as ts

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "pages"
FOLDERS = re.compile(r"(?<=\]\()(?:\.\./)?(?:docs/|bench/)?(?=[\w-]+\.md|images/)")
"""What stands before a page or a picture in links: the site has all pages in one folder."""
FACES = {
    "tessera": "`import tessera as ts`: tensors, and functions of them.",
    "dist": "Meshes, strategies, collectives, determinism.",
    "op": "Ops as functions.",
    "kernel": "Kernels on tiles, and the statements of their bodies.",
    "nn": "Layers, losses and models.",
    "optim": "Optimizers, and schedules of their rates.",
    "graph": "Recorded programs.",
    "schedule": "What runs, step by step.",
    "pipeline": "Stages, microbatches and who runs what when.",
    "plan": "What a step costs on a cluster, before it runs.",
    "mesh": "The mesh in force.",
    "distributed": "Processes, and collectives by the names of PyTorch.",
    "data": "Loaders of tokens.",
    "checkpoint": "State on disk, and models in the formats of others.",
    "elastic": "Runs that go on when devices are lost, and when they come back.",
    "debug": "Where a NaN began; what a program held.",
    "linalg": "Linear algebra.",
    "random": "Random numbers, the same on every mesh.",
    "interop": "Models of HuggingFace and PyTorch.",
}
"""The modules with public names, each a page of the reference, and what that page says first."""
PACKAGES = {
    "train": "Recipes, runs, and what they write and tell while they run.",
    "cost": "Bytes, FLOPs and times of collectives, programs and stages.",
    "show": "Pictures of meshes, machines and plans as text.",
}
"""Packages whose modules the guides import from. A page of the reference has what they import."""
IMPORT = re.compile(r"^(?:>>> )? *from tessera\.(\w+)([.\w]*) import ([\w, ]+)$", re.MULTILINE)
HEAD = "---\nhide: [navigation, toc]\n---\n\n"
ASSETS = ("iframe-worker.js", "site.css")


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "site"))
    readme = (ROOT / "README.md").read_text()
    readme = re.sub(r"^```(\w+)$", r"``` { .\1 .whole-lines }", readme, flags=re.MULTILINE)
    (PAGES / "index.md").write_text(HEAD + readme)
    for name in ("CHANGELOG.md", "bench/RESULTS.md"):
        shutil.copy(ROOT / name, PAGES)
    for page in PAGES.glob("*.md"):
        page.write_text(FOLDERS.sub("", page.read_text()))
    (PAGES / "assets").mkdir()
    for name in ASSETS:
        shutil.copy(Path(__file__).parent / name, PAGES / "assets")
    (PAGES / "reference").mkdir()
    for name, about in FACES.items():
        (PAGES / "reference" / f"{name}.md").write_text(reference(name, about))
    for name, about in PACKAGES.items():
        lines = [f"# tessera.{name}", "", about, "", *(f"::: {n}\n" for n in imported(name))]
        (PAGES / "reference" / f"{name}.md").write_text("\n".join(lines))


def imported(package: str) -> list[str]:
    """The full names that the guides import from modules of `package`; of a module, all it has."""
    found = set()
    for page in (ROOT / "docs").glob("*.md"):
        for of, module, names in IMPORT.findall(page.read_text()):
            for name in re.findall(r"\w+", names) if of == package else ():
                full = f"tessera.{package}{module}.{name}"
                parts = () if module else import_module(full).__all__  # it has modules only
                found |= {f"{full}.{part}" for part in parts} or {full}
    return sorted(found)


def reference(name: str, about: str) -> str:
    """A page with all public names of a module, but those of modules, which have their own."""
    module = ts if name == "tessera" else getattr(ts, name)
    title = "tessera" if name == "tessera" else f"tessera.{name}"
    lines = [f"# {title}", "", about, ""]
    lines += [f"::: {module.__name__}.{n}\n" for n in module.__all__ if n not in FACES]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
