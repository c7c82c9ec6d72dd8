"""Faults of a file with their lines, reported all at once.

>>> faults = Faults("a.yaml")
>>> faults.add(3, "hosts: 3 does not divide 8")
>>> faults.add(1, "there is no name; add name: ...")
>>> try:
...     faults.stop()
... except MeshError as error:
...     print(error)
a.yaml: 2 faults
  line 1 : there is no name; add name: ...
  line 3 : hosts: 3 does not divide 8
  fix    : mend these lines; tessera mesh show t3000 --write FILE gives one that is right
"""

from __future__ import annotations

from ..errors import MeshError


class Faults:
    """The faults of one file, each with its line."""

    def __init__(self, where: str, example: str = "t3000") -> None:
        self.where, self.example = where, example
        self.messages: dict[tuple[int, str], None] = {}

    def add(self, line: int, message: str) -> None:
        self.messages[line, message] = None

    def stop(self) -> None:
        """Raises MeshError if there are faults."""
        if self.messages:
            raise self.error()

    def error(self) -> MeshError:
        """Returns the error with all faults, in the order of the lines."""
        rows = sorted(self.messages)
        return MeshError(
            f"{self.where}: {'1 fault' if len(rows) == 1 else f'{len(rows)} faults'}",
            rows=[(f"line {n}", what) for n, what in rows[:MOST]]
            + ([("and", f"{len(rows) - MOST} more")] if len(rows) > MOST else []),
            fix=f"mend {'this line' if len(rows) == 1 else 'these lines'}; tessera mesh show"
            f" {self.example} --write FILE gives one that is right",
        )


MOST = 20
