"""What do the pages need to be a site? The README as the first one, and a reference of all names.

`python docs/site/build.py` writes them with the pages of docs/ into build/pages, and the nav of
mkdocs.yml says where each stands; `make docs` then builds site/ from them.
"""

from __future__ import annotations

import re
import shutil
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
    "nn": "Layers, losses and models.",
    "optim": "Optimizers, and schedules of their rates.",
    "graph": "Recorded programs.",
    "schedule": "What runs, step by step.",
    "pipeline": "Stages, microbatches and who runs what when.",
    "mesh": "The mesh in force.",
    "distributed": "Processes, and collectives by the names of PyTorch.",
    "data": "Loaders of tokens.",
    "checkpoint": "State on disk, and models in the formats of others.",
    "elastic": "Runs that go on when devices are lost, and when they come back.",
    "debug": "Where a NaN began; what a program held.",
    "linalg": "Linear algebra.",
    "random": "Random numbers, the same on every mesh.",
}
"""The modules with public names, each a page of the reference, and what that page says first."""


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "site"))
    shutil.copy(ROOT / "README.md", PAGES / "index.md")
    for name in ("CHANGELOG.md", "bench/RESULTS.md"):
        shutil.copy(ROOT / name, PAGES)
    for page in PAGES.glob("*.md"):
        page.write_text(FOLDERS.sub("", page.read_text()))
    (PAGES / "reference").mkdir()
    for name, about in FACES.items():
        (PAGES / "reference" / f"{name}.md").write_text(reference(name, about))


def reference(name: str, about: str) -> str:
    """A page with all public names of a module, but those of modules, which have their own."""
    module = ts if name == "tessera" else getattr(ts, name)
    title = "tessera" if name == "tessera" else f"tessera.{name}"
    lines = [f"# {title}", "", about, ""]
    lines += [f"::: {module.__name__}.{n}\n" for n in module.__all__ if n not in FACES]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
