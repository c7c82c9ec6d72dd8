"""Does the caller of `ts.max(x, dim)` mean PyTorch's (values, ids)? Here it gives the values alone,
as in NumPy: what follows the call in the user's code tells.

>>> set(_asked(compile("f(x)[0]", "", "eval")).values())
{'[0]'}
"""

from __future__ import annotations

import dis
import functools
import sys
import warnings
from types import CodeType

from ..core import peers
from ..core.errors import UsageError, fail, is_users, lines_up
from .tensor import Tensor

UNPACKED, _TWO = "a, b = ...", (0, 1)


def need_no_pair(name: str, values: Tensor, search: str) -> None:
    """Raises UsageError where `values`, which `name` of a dim gives, are unpacked as a pair; where
    they may be, and where the first or the second of them is taken at once, it warns. `search` is
    the function that gives the ids."""
    frame = sys._getframe(3)  # of `max`, seen from here through what it shares with `min`
    while frame.f_code.co_filename == peers.__file__ and frame.f_back is not None:
        frame = frame.f_back
    then = _asked(frame.f_code).get(frame.f_lasti) if is_users(frame) else None
    if then is None or (then == "[0]" and values.shape[:1] == (1,)):
        return  # the one row: it has the values
    fix = f"{name}(x, dim) for the values, {search}(x, dim) for their ids"
    if then is UNPACKED and values.shape[:1] != (2,):
        what = f"{name}: it gives the values alone, not (values, ids)"
        raise fail(UsageError, what, [("values", values.type)], fix=f"write {fix}")
    warnings.warn(
        f"{name}: it gives the values alone, as in NumPy, so {then} is of rows; in PyTorch it gives"
        f" (values, ids)\n  fix : write {fix}; for rows give the values a name first",
        stacklevel=lines_up(),
    )


@functools.lru_cache(4096)
def _asked(code: CodeType) -> dict[int, str]:
    """By the places in `code` of calls whose results are unpacked in two, or whose first or second
    row is taken at once: that."""
    found: dict[int, str] = {}
    rows = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for call, then, after in zip(rows, rows[1:], rows[2:], strict=False):
        if (then.opname, then.arg) == ("UNPACK_SEQUENCE", 2):
            what = UNPACKED
        elif (then.opname, after.opname) == ("LOAD_CONST", "BINARY_SUBSCR") and then.argval in _TWO:
            what = f"[{then.argval}]"
        else:
            continue
        if call.opname.startswith("CALL"):
            found |= dict.fromkeys(range(call.offset, then.offset, 2), what)  # its caches too
    return found
