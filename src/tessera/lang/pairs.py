"""Does the caller of `ts.max(x, dim)` or `ts.grad(loss, x)` mean PyTorch's (values, ids), or a
tuple of one gradient? Here both give one tensor: what follows the call in the user's code tells.

>>> set(_asked(compile("f(x)[0]", "", "eval")).values())
{'[0]'}
"""

from __future__ import annotations

import dis
import functools
import sys
import warnings
from types import CodeType, FrameType

from ..core import peers, renamed
from ..core.errors import UsageError, fail, is_users, lines_up
from .tensor import Tensor

ONE, TWO = "a, = ...", "a, b = ..."
_BETWEEN = (peers.__file__, renamed.__file__)  # what checks the arguments of a public function


def need_no_pair(name: str, values: Tensor, search: str) -> None:
    """Raises UsageError where `values`, which `name` of a dim gives, are unpacked as a pair; where
    they may be, and where the first or the second of them is taken at once, it warns. `search` is
    the function that gives the ids."""
    then = _asked_of(sys._getframe(3))  # `max` and `min` share what asks
    if then not in ("[0]", "[1]", TWO) or (then == "[0]" and values.shape[:1] == (1,)):
        return  # the one row: it has the values
    fix = f"{name}(x, dim) for the values, {search}(x, dim) for their ids"
    if then is TWO and values.shape[:1] != (2,):
        what = f"{name}: it gives the values alone, not (values, ids)"
        raise fail(UsageError, what, [("values", values.type)], fix=f"write {fix}")
    warnings.warn(
        f"{name}: it gives the values alone, as in NumPy, so {then} is of rows; in PyTorch it gives"
        f" (values, ids)\n  fix : write {fix}; for rows give the values a name first",
        stacklevel=lines_up(),
    )


def need_no_tuple(gradient: Tensor) -> None:
    """Raises UsageError where a `gradient` by one tensor is unpacked as a tuple of one; where it
    may be, and where its first row is taken at once, it warns."""
    then = _asked_of(sys._getframe(2))
    if then not in ("[0]", ONE):
        return
    fix = "write ts.grad(loss, x) without it, or ts.grad(loss, [x])"
    if then is ONE and gradient.shape[:1] != (1,):
        what = "grad: by one tensor it gives its gradient, no tuple"
        raise fail(UsageError, what, [("gradient", gradient.type)], fix=fix)
    warnings.warn(
        f"grad: by one tensor it gives its gradient, so {then} is of rows; in PyTorch it gives a"
        f" tuple\n  fix : {fix}; for rows give the gradient a name first",
        stacklevel=lines_up(),
    )


def _asked_of(frame: FrameType) -> str:
    """What the user's code does at once with the result of the public function that it calls and
    that `frame` is above, if `_asked` knows; else ""."""
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return _asked(frame.f_code).get(frame.f_lasti, "") if is_users(frame) else ""


@functools.lru_cache(4096)
def _asked(code: CodeType) -> dict[int, str]:
    """By the places in `code` of calls whose results are unpacked in one or two, or subscripted by
    a constant at once: that."""
    found: dict[int, str] = {}
    rows = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for call, then, after in zip(rows, rows[1:], rows[2:], strict=False):
        if then.opname == "UNPACK_SEQUENCE" and then.arg in (1, 2):
            what = (ONE, TWO)[then.arg - 1]
        elif (then.opname, after.opname) == ("LOAD_CONST", "BINARY_SUBSCR"):
            what = f"[{then.argval}]"
        else:
            continue
        if call.opname.startswith("CALL"):
            found |= dict.fromkeys(range(call.offset, then.offset, 2), what)  # its caches too
    return found
