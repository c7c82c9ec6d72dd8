"""Rows of metrics: numbers, texts, booleans and None, set during a step.

>>> import numpy as np
>>> row = StepRow(3, {"loss": 2.5})
>>> row["share"] = np.float32(0.5)
>>> plain("run", "share", row["share"])
0.5
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ..core.checks import unfit
from ..core.errors import UsageError
from ..observe.metrics_file import Value


class StepRow(dict[str, Any]):
    """The row of step `number`, a dict that is written at the end of the step. A later assignment,
    or one to a key in `reserved_names`, which the run writes, raises UsageError."""

    def __init__(
        self, number: Any, values: Mapping[str, Any], reserved_names: Collection[str] = ("step",)
    ) -> None:
        super().__init__()
        self.number, self.reserved_names, self.written = number, reserved_names, False
        self.update(values)

    def __setitem__(self, key: str, value: Any) -> None:
        if self.written:
            raise UsageError(
                f"run: row[{key!r}] is set after step {self.number}, whose row is written",
                fix="set it inside of `with run.step(...) as row:`",
            )
        if key in self.reserved_names:
            raise UsageError(
                f"run: row[{key!r}] is what the run writes itself",
                fix="the number of a step is run.step(number); give yours another name",
            )
        super().__setitem__(key, value)

    def update(self, *args: Any, **more: Any) -> None:
        for key, value in dict(*args, **more).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> StepRow:  # type: ignore[override, misc]
        self.update(other)
        return self


def plain(caller: str, name: str, value: Any) -> Value:
    """A value of a row as a Python value; an array of one element becomes a number. Raises
    UsageError for any other type than number, text, boolean or None."""
    one = math.prod(getattr(value, "shape", ())) == 1
    found = value.item() if one and hasattr(value, "item") else value
    if found is None or isinstance(found, (bool, int, float, str)):
        return found
    fix = "give a number or a text"
    if not one:
        fix = "give a number of it, such as its mean; of tensors ts.debug.statistics gives some"
    elif isinstance(value, (Mapping, list, tuple, set)):
        fix = f"give each of its numbers a key of its own, such as {name + '/0'!r}"
        if isinstance(value, Mapping) and value:
            fix = fix.replace(f"{name}/0", f"{name}/{next(iter(value))}")
    raise unfit(caller, f"{name!r} in a row", value, fix)


__all__ = ["StepRow", "plain"]
