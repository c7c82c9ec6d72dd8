"""Meaningless calls of each public function: an error of ours for no arguments, a wrong kind, and
too many."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

import tessera as ts

X = ts.tensor([[1.0, 2.0], [3.0, 4.0]])
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "none": (), "None": (None,), "a text": ("a",), "texts": (["a", "b"],), "an object": (object(),),
    "nine": (X,) * 9, "a number": (3,), "a tensor and a text": (X, "a"),
    "a tensor and None": (X, None), "a tensor and an object": (X, object()), "a dict": ({"a": 1},),
}  # fmt: skip
# Functions that affect the whole process, block, or write files.
APART = {
    "set_collective_timeout", "breakpoint", "clear_caches", "set_program_cache", "initialize",
    "shutdown", "recv_from", "send_to", "wait", "prune", "save", "save_hf", "export",
}  # fmt: skip
KNOWN = {
    "Optimizer",  # abstract: Python's own error names the missing methods
    "Strategy", "algorithm", "restore", "pipeline_text",  # tested by their second arguments
}  # fmt: skip
SPACES = (
    ts, ts.nn, ts.optim, ts.dist, ts.data, ts.checkpoint, ts.linalg, ts.random, ts.graph,
    ts.pipeline, ts.op, ts.schedule, ts.debug, ts.elastic, ts.distributed, ts.mesh,
)  # fmt: skip


def called() -> Iterator[Any]:
    for space in SPACES:
        for name in space.__all__:
            f = getattr(space, name)
            error = inspect.isclass(f) and issubclass(f, BaseException)
            if callable(f) and not inspect.ismodule(f) and not error and name not in APART | KNOWN:
                yield pytest.param(f, id=f"{space.__name__}.{name}")


@pytest.mark.parametrize("f", [*called()])
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_meaning_is_an_error_of_ours(
    f: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for what, given in ARGUMENTS.items():
        try:
            copy_context().run(f, *given)  # its settings are confined to this context
        except ts.TesseraError:
            pass
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
