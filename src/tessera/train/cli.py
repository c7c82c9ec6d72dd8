"""How does a command line show an error? In one line: what is wrong, and the way out."""

from __future__ import annotations

from ..core.errors import TesseraError


def one_line(error: TesseraError) -> str:
    """The error without its operands and places, which a command line's user did not write.

    >>> from tessera.core.errors import UsageError, fail
    >>> one_line(fail(UsageError, "corpus: 'x' is not there", [("root", "x")], fix="name another"))
    "corpus: 'x' is not there (name another)"
    """
    what, *rest = str(error).splitlines()
    fixes = [line.partition(":")[2].strip() for line in rest if line.split()[:2] == ["fix", ":"]]
    return f"{what} ({fixes[0]})" if fixes else what
