"""Every public option has a visible effect, or a warning says that it has none.

An option is an optional argument of a public function or class, a key of a configuration, or an
environment variable.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import tessera as ts
from tessera.core import environment
from tessera.data.config import KEYS as DATA
from tessera.lang.program.schedule import options
from tessera.nn.experts.transport import Transport
from tessera.train.config import KEYS
from tests.core.numpy_engine import Oracle
from tests.core.option_rows import ROWS, seen

for more in ("programs", "models", "machines", "graphs", "dist", "data"):
    importlib.import_module(f"tests.core.option_rows_{more}")  # registers its rows
MODULES = (
    "tessera", "tessera.dist", "tessera.nn", "tessera.op", "tessera.pipeline", "tessera.schedule",
    "tessera.graph", "tessera.kernel", "tessera.mesh", "tessera.debug", "tessera.distributed",
    "tessera.data", "tessera.optim", "tessera.checkpoint", "tessera.elastic", "tessera.plan",
    "tessera.lang.autodiff.linalg", "tessera.lang.math.random",
)  # fmt: skip
METHODS = (FunctionType, classmethod, staticmethod)
# Lines "name: option option" for options without a row yet. This list must only shrink.
MISSING = Path(__file__).with_name("options_without_a_row.txt")
# The same for options with a row in tests/mesh/test_option_rows.py.
WITH_DEVICES = Path(__file__).with_name("options_with_devices.txt")


def optional(found: Any) -> list[str]:
    """The optional arguments of `found`."""
    try:
        every = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in every if p.default is not p.empty]


def public() -> Iterator[tuple[str, list[str]]]:
    """Yields every public function, class and method once, with its options."""
    known: set[int] = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            found = getattr(module, name)
            if not callable(found) or inspect.ismodule(found) or id(found) in known:
                continue
            known.add(id(found))
            if inspect.isclass(found) and issubclass(found, BaseException):
                continue
            at = f"{re.sub(r'[.]lang[.][a-z]+', '', module.__name__)}.{name}"
            yield at, optional(found)
            if inspect.isclass(found):
                for method, kind in vars(found).items():
                    if not method.startswith("_") and isinstance(kind, METHODS):
                        yield f"{at}.{method}", optional(getattr(found, method))


def every() -> dict[str, set[str]]:
    """All options by the name of their function, class or table."""
    out = {name: set(found) for name, found in public() if found}
    out["schedule"] = {*optional(options)}
    out["transport"] = {f.name for f in fields(Transport)}
    out["config"] = {*KEYS}
    out["data"] = {*DATA}
    out["environment"] = {*environment.ALL_VARIABLES}
    return out


def covered() -> dict[str, set[str]]:
    """The options that have a row; those of "schedule of a pipeline" count for "schedule"."""
    out: dict[str, set[str]] = {}
    for name, row in ROWS.items():
        out.setdefault(name.partition(" ")[0], set()).update(row.changes)
    return out


def listed(file: Path) -> dict[str, set[str]]:
    """The options listed in a file; lines that begin with # are comments."""
    lines = [x for x in file.read_text().splitlines() if not x.startswith("#")]
    return {name: {*found.split()} for name, found in (x.split(":") for x in lines)}


def test_every_option_has_a_row() -> None:
    missing, have = listed(MISSING), covered()
    for name, found in listed(WITH_DEVICES).items():
        have.setdefault(name, set()).update(found)
    unknown = {n: have[n] - every().get(n, set()) for n in have}
    assert not {n: x for n, x in unknown.items() if x}, "rows of options that do not exist"
    left = {n: x - have.get(n, set()) for n, x in every().items()}
    assert {n: x for n, x in left.items() if x} == missing


def outcome(row: Any, **changed: Any) -> Any:
    """Returns the visible result of a call, and its warnings about options without effect."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = seen(row.run(**{**row.given, **changed}))
    return made, [str(w.message) for w in said if w.category is ts.OptionWarning]


@pytest.mark.parametrize("name", ROWS)
def test_each_option_changes_what_is_seen_or_says_that_it_does_not(
    name: str, oracle: Oracle
) -> None:
    row = ROWS[name]
    plain = outcome(row)
    assert plain == outcome(row), "two calls with the same options differ"
    same = [k for k, value in row.changes.items() if outcome(row, **{k: value}) == plain]
    assert not same, "these options change nothing"


def test_an_option_without_effect_would_be_found(oracle: Oracle) -> None:
    row = ROWS["tessera.sum"]
    assert outcome(row, dim=None) == outcome(row)
