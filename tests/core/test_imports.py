"""Import cycles inside of a package. The files of lang/ have none."""

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def order(package: str) -> list[str]:
    """Returns the files of `package`, each after the files that it imports, in functions and for
    type checking too. Raises CycleError, which names a cycle."""
    graph = grimp.build_graph("tessera")
    files = sorted(m for m in graph.modules if m.startswith(f"tessera.{package}."))
    return [
        *TopologicalSorter(
            {m: graph.find_modules_directly_imported_by(m) & set(files) for m in files}
        ).static_order()
    ]


def test_no_files_of_the_language_are_in_a_circle() -> None:
    files = [m.removeprefix("tessera.lang.") for m in order("lang")]
    assert files.index("value.tensor") < files.index("value.eager") < files.index("record.recorder")
    assert files.index("parallel.pipelines.microbatch") < files.index("jit.jit")


def test_a_circle_would_be_found() -> None:
    with pytest.raises(CycleError):
        [*TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order()]


LATE = (
    *("jax", "jaxlib", "optax", "pydantic", "matplotlib", "networkx", "typer", "safetensors"),
    *("importlib.metadata", "tomllib", "tessera.checkpoint", "tessera.data", "tessera.debug"),
    *("tessera.elastic", "tessera.interop", "tessera.observe.profile"),
)
PROGRAMS = {
    f"import tessera, sys; print([m for m in {LATE} if m in sys.modules])": "[]",
    "import tessera as ts; print(ts.dist.elastic, ts.elastic.elastic)": "<class 'tessera.elastic."
    "policy.elastic'> <class 'tessera.elastic.policy.elastic'>",
    "import tessera as ts; print([n for n in ts.__all__ if not hasattr(ts, n)])": "[]",
    "from tessera import *; print(elastic.steps.__name__, pipeline.Pipe.__name__)": "steps Pipe",
    "import tessera as ts\ntry: ts.nn.save_hf\nexcept AttributeError as e: print(e.fix)": "write "
    "checkpoint.save_hf",  # the error finds the name in a module that is not imported
    "import tessera as ts; ts.dist.resize(msh=3)": "resize: there is no argument 'msh'",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_few_programs_use_is_imported_when_it_is_used(program: str) -> None:
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert PROGRAMS[program] in ran.stdout + ran.stderr
