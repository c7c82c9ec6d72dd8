"""Imported models against the originals: the table of docs/models-table.md.

`python bench/models_table.py` checks every row of tests/peer/zoo and writes the page; `--only NAME`
checks the rows whose names contain a regular expression, and keeps the others' results, which are
in tests/data/models.json. A row takes about 5 seconds. A library that is not installed keeps its
results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
DATA, PAGE = ROOT / "tests" / "data" / "models.json", ROOT / "docs" / "models-table.md"
BEGIN, END = "<!-- table: bench/models_table.py -->", "<!-- end of table -->"
LIBRARIES = ("transformers", "timm", "diffusers", "flax", "equinox")
WHY_NOT = {
    "'contract' needs all microbatches": "a product of its attention needs all microbatches",
    "needs all microbatches": "its routing needs the tokens of all microbatches",
}


def found(only: str) -> dict[str, Any]:
    """The results by name: those kept, and new ones for the names that contain `only`."""
    import tessera as ts
    from tests.peer.model_check import check
    from tests.peer.zoo import MODELS
    from tests.quickly import quickly

    kept = json.loads(DATA.read_text()) if DATA.exists() else {}
    with quickly():
        for name, model in MODELS.items():
            if not (re.search(only, name) and find_spec(model.library)):
                continue
            begin = time.perf_counter()
            row: dict[str, Any] = {"library": model.library, "version": version(model.library)}
            row |= {"uncut": model.uncut, "mode": model.mode}
            try:
                row |= asdict(check(model))
            except ts.TesseraError as error:
                row["error"] = str(error)
            print(f"{name} {time.perf_counter() - begin:.1f} s", row, flush=True)
            kept[name] = row
            kept = {n: kept[n] for n in MODELS if n in kept}  # in the table's order
            DATA.write_text(json.dumps(kept, indent=0) + "\n")
    return {n: kept[n] for n in MODELS if n in kept}


def reason(row: dict[str, Any]) -> str:
    first, *rest = row["error"].splitlines()
    said = next((line.split(":", 1)[1] for line in rest if line.startswith("  torch")), "")
    return re.sub(r"^\w+: ", "", said.strip() or first)


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the page's table."""
    title = name.partition("-")[2] + (" (eval)" if row["mode"] == "eval" else "")
    if "error" in row:
        return f"| {title} | | no: {reason(row)} | | | | |"
    pipeline = "" if row["stages"] is None else f"{row['stages']:.0e}"
    if row["uncut"]:
        pipeline = f"no: {WHY_NOT[row['uncut']]}"
    cells = (f"{row[k]:.0e}" for k in ("forward", "gradient", "mesh"))
    layouts = "by name" if row["known"] else "largest dim"
    return f"| {title} | {row['parameters']:,} | {' | '.join(cells)} | {layouts} | {pipeline} |"


def table(rows: dict[str, Any]) -> str:
    made = [r for r in rows.values() if "error" not in r]
    worst = max(max(r["forward"], r["gradient"], r["mesh"], r["stages"] or 0.0) for r in made)
    piped = sum(r["stages"] is not None for r in made)
    text = [
        f"{len(made)} models, {piped} of them also in a pipeline; the largest error is {worst:.0e}."
    ]
    for library in LIBRARIES:
        own = {n: r for n, r in rows.items() if r["library"] == library}
        if own:
            versions = sorted({r["version"] for r in own.values()})
            text += [
                f"## {library} {', '.join(versions)}",
                "| model | parameters | forward | gradient | dp × tp | layouts | dp × tp × pp |\n"
                "|---|---|---|---|---|---|---|\n" + "\n".join(line(n, r) for n, r in own.items()),
            ]
    return "\n\n".join(text)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--only", default="", help="check the rows whose names contain this")
    ap.add_argument("--page", action="store_true", help="check none: the page of the results")
    a = ap.parse_args()
    warnings.simplefilter("ignore")
    made = table(json.loads(DATA.read_text()) if a.page else found(a.only))
    text = PAGE.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}")
    print(made[: made.index("\n\n")])


if __name__ == "__main__":
    main()
