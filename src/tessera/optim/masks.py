"""Weight decay masks: a regular expression or a function of a weight's name. None decays matrices,
except those of norms and biases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..core.checks import unfit
from ..core.errors import UsageError
from ..core.kinds import is_number

Mask = str | Callable[[str], bool] | None

# In stacked layers the weights of norms and biases are matrices, so names exclude them from decay.
UNDECAYED = re.compile(r"(^|\.)(\w*norm\w*|ln_?\w*)(\.|$)|(^|\.)\w*bias$")


def decays(of: str, mask: Any, name: str, ndim: int) -> bool:
    """Returns whether the optimizer `of` decays the weight `name`."""
    return selects(of, mask, name) if mask is not None else ndim >= 2 and not UNDECAYED.search(name)


def selects(of: str, mask: Any, name: str) -> bool:
    """Returns whether `mask` is true of `name`. Raises UsageError if it fails, as an optax mask
    does, which is a function of the tree of weights."""
    if isinstance(mask, str):
        return bool(re.search(mask, name))
    fix = "give a function of one weight's name; a mask of optax goes with optim.from_optax"
    try:
        found = mask(name)
    except (AttributeError, LookupError, TypeError) as error:  # it takes the name for a tree
        what = f"{of}: the mask fails for the weight {name!r}"
        raise UsageError(what, says=error, fix=fix) from error
    if found is None or isinstance(found, (np.bool_, bool, re.Match)) or is_number(found):
        return bool(found)
    raise unfit(of, f"what the mask gives for the weight {name!r}", found, fix)


def check_mask(of: str, mask: Any) -> None:
    """Raises UsageError if `mask` is neither a function nor a regular expression."""
    if isinstance(mask, str):
        try:
            re.compile(mask)
        except re.error as error:
            raise UsageError(
                f"{of}: mask {mask!r} is no regular expression: {error}",
                fix='write one, such as "weight$", or give a function of the name',
            ) from None
    elif mask is not None and not callable(mask):
        raise UsageError(
            f"{of}: mask is a {type(mask).__name__}",
            fix="give a function from a weight's name to a bool, or a regular expression",
        )


def need_match(of: str, mask: Any, weights: Iterable[str]) -> None:
    """Raises UsageError if `mask` selects none of `weights`."""
    names = list(weights)
    if not any(selects(of, mask, name) for name in names):
        named = f" {mask!r} is in" if isinstance(mask, str) else " is true of"
        raise UsageError(
            f"{of}: mask{named} no weight's name, so nothing decays",
            weights=", ".join(names[:5]),
            fix="write what the names contain, or set weight_decay=0",
        )
