"""Errors of a command line, in one line: the problem and its fix."""

from __future__ import annotations

from ..core.errors import TesseraError


def one_line(error: TesseraError, *rows: str) -> str:
    """The error without its operands and source lines, but with its `rows` of these names, which a
    user of the command line cannot know.

    >>> from tessera.core.errors import UsageError
    >>> error = UsageError("corpus: 'x' is not there", root="x", fix="name another")
    >>> one_line(error)
    "corpus: 'x' is not there (name another)"
    >>> one_line(error, "root")
    "corpus: 'x' is not there; root: x (name another)"
    """
    what, *rest = str(error).splitlines()
    said = {name.strip(): value.strip() for name, _, value in (r.partition(":") for r in rest)}
    what = "; ".join([what, *(f"{row}: {said[row]}" for row in rows if row in said)])
    return f"{what} ({said['fix']})" if "fix" in said else what
