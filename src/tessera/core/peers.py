"""Words of PyTorch, JAX, NumPy, transformers and Megatron, each with a fix for errors.

The words are data in `peers.toml`, read when an error is made, so that an import does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from pkgutil import resolve_name
from typing import Any

import numpy as np

from .errors import UnknownNameError
from .wording import nearest

_OF_TENSORS = ("ts", "nn", "Tensor", "np")  # owners whose missing names are functions of tensors
# Preferred, in this order.
_FIRST = ("ts", "nn", "optim", "dist", "checkpoint", "ts.linalg", "x", "model")
# Public names by the prefix that users write (ts, nn, ...); filled as modules are imported.
SPACES: dict[str, Iterable[str]] = {}
# Names that public modules import at their first use, in the form of `pkgutil.resolve_name`.
LATE: set[str] = set()


@cache
def words() -> dict[str, dict[str, Any]]:
    """Returns the tables of `peers.toml`: the fix by `owner.word`, or by `.word` for all owners."""
    import tomllib  # imported late, to keep `import tessera` fast
    from importlib.resources import files

    text = files(__package__).joinpath("peers.toml").read_text("utf-8")
    return {
        table: {
            f"{owner}.{word}": fix
            for key, fix in rows.items()
            for owners, _, row in [key.rpartition(":")]
            for owner in owners.split() or [""]
            for word in row.split()
        }
        for table, rows in tomllib.loads(text).items()
    }


def fix_for(table: str, word: str, owner: str = "") -> Any:
    """Returns the fix for `word`: that of `owner` first, else that of all; "" if `peers.toml` has
    none."""
    rows = words()[table]
    return rows.get(f"{owner}.{word}") or rows.get(f".{word}", "")


def argument_fix(
    function: str, word: str, parameters: list[str], missing: Sequence[str] = ()
) -> str:
    """Returns the fix for the argument `word` of `function`, which has the arguments `parameters`;
    those of `missing` were not given."""
    rows = words()["argument_fixes"]
    meant = [n for n in fix_for("arguments", word) if n in parameters]
    near = [*meant, *get_close_matches(word, parameters, 1, 0.75)]
    return (
        rows.get(f"{function}.{word}")
        or "".join(f"write {n}=" for n in near[:1])
        or rows.get(f".{word}")
        or rows.get(f"{function}.*")
        or (f"write {missing[0]}=" if len(missing) == 1 else "")
        or "leave it out if its default is meant: no other choice is offered"
    )


@cache
def name_fix(owner: str, name: str, names: tuple[str, ...]) -> str:
    """Returns the fix for the attribute `name` of `owner`, which has the attributes `names`."""
    if found := fix_for("names", name, owner):
        return str(found)
    for meant in fix_for("arguments", name):  # config.n_embd is config.d
        if meant in names:
            return f"write {meant}"
    known: set[str] = set()
    while more := LATE - known:  # a late module may have the name, or late modules of its own
        known |= more
        for late in sorted(more):
            resolve_name(late)
    spaces = [s for s in _FIRST if s in SPACES] + [s for s in SPACES if s not in _FIRST]
    qualified = {f"{s}.{n}": n for s in spaces for n in SPACES[s] if not n.startswith("_")}
    if name.endswith("_") and (new := name_fix(owner, name[:-1], ())).startswith("write "):
        text = new.removeprefix("write ")
        call = "(...)" if text.replace(".", "").replace("_", "").isalnum() else ""
        return f"tensors do not change: x = {text}{call}"
    if same := [full for full, n in qualified.items() if _plain(n) == _plain(name)]:
        return f"write {max(same, key=lambda full: qualified[full] == name)}"
    public_names = [n for n in names if not n.startswith("_")]
    unlike = not get_close_matches(name, public_names, 1, 0.7)
    if owner == "optim" and unlike:
        return f"if optax has it: optim.from_optax(optax.{name}(...)); a rate: lr=optax.{name}(...)"
    if owner in _OF_TENSORS and unlike:
        for like in get_close_matches(name, [*qualified.values()], 1, 0.85):
            return f"the name most like it is {next(f for f, n in qualified.items() if n == like)}"
        alone = f"of a value alone np.{name}(x.numpy()); in a program "
        of_numpy = owner != "np" and callable(getattr(np, name, None))
        return (
            f"{alone * of_numpy}compose it of functions of ts, or write it in JAX:"
            " @ts.op(index=...)"
        )
    return f"the names most like it are {nearest(name, public_names, 3).partition(', …')[0]}"


def _plain(name: str) -> str:
    """Returns a name in lower case without "_", so that MaxPool2d equals max_pool2d."""
    return name.lower().replace("_", "")


# -- attributes -----------------------------------------------------------------------------------
def no_name(
    owner_text: str,
    owner: str,
    name: str,
    names: Iterable[str],
    operands: Iterable[tuple[str, object]] = (),
) -> AttributeError:
    """Returns the error that `owner_text`, of the kind `owner`, has no attribute `name`, but the
    names `names`."""
    text = f"{owner_text} has no attribute {name!r}"
    if name.startswith("_"):  # asked by Python or a library, not by a user
        return AttributeError(text)
    return UnknownNameError(text, rows=list(operands), fix=name_fix(owner, name, tuple(names)))


def no_attribute(owner: str) -> Callable[[Any, str], Any]:
    """Returns the `__getattr__` of objects of the kind `owner`."""

    def __getattr__(self: Any, name: str) -> Any:
        if hasattr(type(self), name):  # a property that failed: its own error
            return object.__getattribute__(self, name)
        raise no_name(f"{type(self).__name__!r} object", owner, name, dir(self))

    return __getattr__
