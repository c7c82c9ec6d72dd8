"""A table from the calls of another library to functions on tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from ...core.errors import UsageError
from ..value.tensor import Tensor

Rule = Callable[..., Any]  # operands as the library passes them, with tensors of ours
R = TypeVar("R", bound=Rule)


def stem(name: str) -> str:
    """The op's own name in "library.op.overload", or the whole name."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else name


class Rules:
    """The rules of one library, by the names of its calls. `adder` is the public decorator for
    further ones."""

    def __init__(self, library: str, adder: str = "rule") -> None:
        self.library, self.adder = library, adder
        self.table: dict[str, Rule] = {}

    def rule(self, *names: str) -> Callable[[R], R]:
        """A decorator that makes a function the rule for calls of these names."""

        def add(f: R) -> R:
            self.table.update(dict.fromkeys(names, f))
            return f

        return add

    def find(self, name: str, operands: Sequence[Any], caller: str, line: str) -> Rule:
        """The rule for `name`. Raises UsageError if there is none."""
        found = self.table.get(name)
        if found is not None:
            return found
        stems = {stem(n): n for n in reversed(self.table)}
        near = [stems[s] for s in get_close_matches(stem(name), stems, n=3, cutoff=0.5)]
        tensors = [(f"arg {i}", x.type) for i, x in enumerate(operands) if isinstance(x, Tensor)]
        raise UsageError(
            f"{caller}: {name} of {self.library} has no rule here",
            rows=[*tensors, ("in", line), ("near", ", ".join(near))],
            fix=f"give it one, a function on tensors: @ts.interop.{self.adder}({name!r})",
        )
