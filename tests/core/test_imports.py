"""Do imports point one way inside of a package too? In lang/ no files are in a circle."""

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def order(package: str) -> list[str]:
    """The files of `package`, each after those that it imports: inside of functions and for types
    only, too. Raises CycleError, which names a circle."""
    graph = grimp.build_graph("tessera")
    files = sorted(m for m in graph.modules if m.startswith(f"tessera.{package}."))
    return [
        *TopologicalSorter(
            {m: graph.find_modules_directly_imported_by(m) & set(files) for m in files}
        ).static_order()
    ]


def test_no_files_of_the_language_are_in_a_circle() -> None:
    files = [m.removeprefix("tessera.lang.") for m in order("lang")]
    assert files.index("tensor") < files.index("eager") < files.index("record")
    assert files.index("pipelines.microbatch") < files.index("jit")


def test_a_circle_would_be_found() -> None:
    with pytest.raises(CycleError):
        [*TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order()]


def test_what_is_slow_to_import_waits_until_it_is_used() -> None:
    late = (
        "jax",
        "jaxlib",
        "optax",
        "pydantic",
        "matplotlib",
        "networkx",
        "typer",
        "safetensors",
        "importlib.metadata",
    )
    code = f"import sys, tessera; print([m for m in {late} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "[]\n", ran.stderr
