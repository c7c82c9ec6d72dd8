"""How does the facade say what is wrong? By `TTNNError`: the RuntimeError that TT-NN raises, with
the way out of a Tessera error."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import TesseraError, fail


class TTNNError(TesseraError, RuntimeError):
    """Raised when TT-NN's API is used in a way that has no meaning there, or here."""


def wrong(what: str, rows: Sequence[tuple[str, object]] = (), *, fix: str) -> TTNNError:
    """The error that says `what`, with its operands and the way out."""
    return fail(TTNNError, what, rows, fix=fix)
