"""Declared arguments of public functions: each refuses values that do not fit."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest

import tessera as ts
from tessera.core import declared
from tessera.core.declared import Check, Count, Declaration, declarations
from tessera.core.public import asking
from tests.core.test_option_table import MODULES

MORE = (
    "core.topology", "data.tokens", "interop.hf", "lang.program.schedule", "nn.experts.options",
    "nn.stack", "observe.compare", "observe.profile", "observe.validate", "show.plan_view",
    "train.accumulate", "train.generate", "train.guard", "train.run", "train.trackers",
)  # fmt: skip
SAMPLES: tuple[Any, ...] = (1, 0.5, True, "x", {}, (1,), (0.5, 0.5), print)


def every() -> dict[str, Callable[..., Any]]:
    """The functions and methods with checks of arguments that have a declaration, by name."""
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            getattr(sys.modules[module], name)  # imports it
    for module in MORE:
        importlib.import_module(f"tessera.{module}")
    found: dict[str, Callable[..., Any]] = {}
    for module, there in [*sys.modules.items()]:
        for value in [*vars(there).values()] if module.startswith("tessera") else ():
            for fn in [value, *vars(value).values()] if isinstance(value, type) else [value]:
                fn = getattr(fn, "__func__", fn)
                if getattr(fn, "checked", False) is True and declarations(fn):
                    owner = f"{value.__name__}." if isinstance(value, type) else ""
                    found[f"{fn.__module__}.{owner}{fn.__name__}"] = fn
    return found


EVERY = every()


def samples(check: Check) -> Iterator[Any]:
    """Values that may fit."""
    yield from SAMPLES
    for x in (kind for given in check.args for kind in get_args(given) or (given,)):
        yield x.__new__(x) if isinstance(x, type) else x


def fits(check: Check, value: Any) -> bool:
    try:
        check.check("f", "x", value)
    except ts.TesseraError:
        return False
    return True


def beyond(check: Check) -> list[Any]:
    """Values that do not fit: an object, and numbers just outside of the bounds."""
    bounds = {**dict(zip(("least", "most"), check.args)), **check.bounds}
    bounds = bounds if isinstance(check, declared.Whole | declared.Number) else {}
    step = {"least": -1, "most": 1, "above": 0, "below": 0}
    return [object(), *(n + step[how] for how, n in bounds.items() if math.isfinite(n))]


def refusal(fn: Callable[..., Any], bad: Declaration, value: Any, others: Any) -> str:
    """Returns the first line of the error of a call where only `bad` does not fit."""
    given = {}
    takes = inspect.signature(fn).parameters.values()
    for p in takes:
        other = next((d.check for d in others if d.name == p.name), None)
        if p.name == bad.name:
            given[p.name] = value
        elif p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            fit = (x for x in samples(other) if fits(other, x)) if other else iter([object()])
            given[p.name] = next(fit)
    with pytest.raises(ts.TesseraError) as caught:
        placed = [p.name for p in takes if p.kind is p.POSITIONAL_ONLY or p.name == "self"]
        fn(*[given.pop(n) for n in placed if n in given], **given)
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("name", sorted(EVERY))
def test_an_argument_that_does_not_fit_is_named(name: str) -> None:
    fn = EVERY[name]
    others = declarations(fn)
    for d in others:
        for value in beyond(d.check):
            said = refusal(fn, d, value, others)
            assert re.search(rf"\b{d.name} cannot be ", said), said


def test_most_functions_are_seen() -> None:
    names = {name.rpartition(".")[2] for name in EVERY}
    assert len(EVERY) > 150
    assert {"topk", "Conv2d", "GPTConfig", "Keep", "Link", "generate"} <= names | {
        name.split(".")[-2] for name in EVERY
    }


def made(k: Count, more: Count | None = 3, free: int = 0) -> tuple[Any, ...]:
    return k, more, free


def test_values_are_converted_and_defaults_are_not_checked() -> None:
    call = asking(made, "made")
    out = call(np.int64(2), more=np.int32(4))
    assert out == (2, 4, 0) and {type(x) for x in out} == {int}
    assert call(2, None) == (2, None, 0) and call(k=2, free="x") == (2, 3, "x")  # type: ignore[arg-type]
    assert [d.name for d in declarations(made)] == ["k", "more"]


def test_a_call_with_a_wrong_number_of_arguments_is_said_first() -> None:
    call = asking(made, "made")
    for args in ((0, 1, 2, 3), ()):
        with pytest.raises(ts.UsageError, match=r"made: (4 arguments|k is missing)"):
            call(*args, **({} if args else {"more": 0}))
