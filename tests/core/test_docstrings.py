"""Docstrings: all public names have one, with a first sentence that names a thing or an action."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

import tessera as ts

MODULES = (
    ts, ts.checkpoint, ts.data, ts.debug, ts.dist, ts.distributed, ts.graph, ts.linalg, ts.mesh,
    ts.nn, ts.op, ts.optim, ts.pipeline, ts.random, ts.schedule,
)  # fmt: skip


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes of the public modules, and `Jit`, which `ts.jit` returns."""
    yield "Jit", type(ts.jit(lambda x: x))
    for module in MODULES:
        for name in module.__all__:
            found = getattr(module, name)
            # A partial has the docstring of its function.
            found = found.func if isinstance(found, partial) else found
            if inspect.isfunction(found) or inspect.isclass(found):
                yield f"{module.__name__}.{name}", found


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        for name, found in vars(base).items() if base.__module__.startswith("tessera") else ():
            if isinstance(found, (classmethod, staticmethod)):
                found = found.__func__
            elif isinstance(found, property):
                found = found.fget
            elif isinstance(found, cached_property):
                found = found.func
            if not name.startswith("_") and inspect.isfunction(found):
                yield f"{base.__name__}.{name}", found


def own_doc(found: Any) -> str:
    """The docstring written for `found`: none that a class inherits or a dataclass makes."""
    doc = (vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__) or ""
    return "" if doc.startswith(f"{found.__name__}(") else doc


def test_every_public_name_and_method_has_a_docstring() -> None:
    named = list(public())
    named += [m for _, found in list(named) if inspect.isclass(found) for m in methods(found)]
    assert len(named) > 350
    assert [name for name, found in named if not own_doc(found).strip()] == []


def test_no_docstring_raises_an_error_without_its_condition() -> None:
    """`Raises UsageError.` does not say when; `Raises UsageError for what is none` is a riddle."""
    named = list(public())
    named += [m for _, found in list(named) if inspect.isclass(found) for m in methods(found)]
    bare = []
    for name, found in named:
        text = " ".join(own_doc(found).split())
        for sentence in text.split("Raises ")[1:]:
            first = sentence.split(". ")[0].rstrip(".")
            if all(word.strip(",").endswith("Error") or word == "and" for word in first.split()):
                bare.append(f"{name}: Raises {first}")
    assert bare == []


ROOT = Path(__file__).parents[2]
RIDDLE = re.compile(
    r"(What|Who|Whose|Whether|Which|How|Is|Are|Does|Do|Where|When|Why|May|Can)\b|[^.]*\?"
)


@pytest.mark.parametrize("folder", ["src", "tests", "bench"])
def test_the_first_sentence_of_a_docstring_is_no_question(folder: str) -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            doc = ast.get_docstring(node) if isinstance(node, kinds) else None
            first = re.split(r"(?<=[.?!])\s", (doc or "").partition("\n\n")[0])[0]
            if RIDDLE.match(first):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {first}")
    assert wrong == []
