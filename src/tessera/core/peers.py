"""What does a user of PyTorch, NumPy or JAX hear who writes a name of theirs? An error that offers
the name that exists here.

It answers for attributes of public modules, tensors, modules and optimizers (`no_name`), and for
arguments of public functions and classes (`public`, `checked`). The names are in `peer_names.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar, cast

from .errors import UnknownNameError, UsageError, fail
from .peer_names import ADVICE, ARGUMENT_ADVICE, ARGUMENTS, INSTEAD
from .renamed import renamed_names
from .wording import nearest

F = TypeVar("F", bound=Callable[..., Any])
_FIRST = " ts nn optim dist ts.linalg x model "  # whose name is offered, where several have it
# What users write before a public name, and the names that it has; filled as modules are imported.
SPACES: dict[str, Iterable[str]] = {}


def public(
    module: str, there: dict[str, Any], renamed: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of a public module, which users write as `module` and whose globals are
    `there`; `renamed` are its old names. Its functions and classes answer for wrong arguments."""
    SPACES[module] = there["__all__"]
    for name in there["__all__"]:
        there[name] = checked(there[name])
    old = renamed_names(module, renamed or {}, there)

    def __getattr__(name: str) -> Any:
        if name in (renamed or {}):
            return old(name)
        raise no_name(f"module {there['__name__']!r}", module, name, there["__all__"])

    return __getattr__


# -- attributes -----------------------------------------------------------------------------------
def no_name(
    what: str,
    owner: str,
    name: str,
    have: Iterable[str],
    operands: Iterable[tuple[str, object]] = (),
) -> AttributeError:
    """The error that `what`, of the kind `owner`, has no attribute `name`, but the names `have`."""
    text = f"{what} has no attribute {name!r}"
    if name.startswith("_"):  # a question of Python or of a library, no user's
        return AttributeError(text)
    return fail(UnknownNameError, text, list(operands), fix=_instead(owner, name, tuple(have)))


@functools.cache
def _instead(owner: str, name: str, have: tuple[str, ...]) -> str:
    """What to write for `name`."""
    advice = ADVICE.get(f"{owner}.{name}") or ADVICE.get(name)
    if advice is not None:
        return advice
    if name in INSTEAD:
        return f"write {INSTEAD[name]}"
    for space in sorted(SPACES, key=lambda s: _FIRST.find(f" {s} ") % 999):
        if space != owner and name in SPACES[space]:
            return f"write {space}.{name}"
    close = nearest(name, [n for n in have if not n.startswith("_")], 3)
    return f"the names most like it are {close.partition(', …')[0]}"


# -- arguments ------------------------------------------------------------------------------------
def checked(what: F) -> F:
    """The function `what` with an error of ours for an argument by a name that it does not have; a
    class with such an `__init__`. The module that defines a function has the new one then."""
    if isinstance(what, type):
        make = vars(what).get("__init__")
        if isinstance(make, FunctionType) and not hasattr(make, "checked"):
            what.__init__ = asking(make, what.__name__, of_object=True)  # type: ignore[misc]
        return what
    if not isinstance(what, FunctionType) or hasattr(what, "checked"):
        return what
    name, home = what.__name__, vars(sys.modules[what.__module__])
    have: Any = home.get(name)
    if getattr(have, "checked", False) and inspect.unwrap(have) is inspect.unwrap(what):
        return cast(F, have)  # under another name
    new = asking(what, name)
    if have is what:
        home[name] = new
    return new


def asking(fn: F, name: str, of_object: bool = False) -> F:
    """The function `fn`, named `name` in errors, with an error for an argument that it lacks. Its
    first is not to be given where it is `of_object`."""
    have = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in have):
        return fn
    by_name = [p.name for p in have if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    in_order = [p.name for p in have if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = {*by_name, *getattr(fn, "old_names", ())}

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not known.issuperset(kwargs):
            wrong = next(k for k in kwargs if k not in known)
            raise _no_argument(name, wrong, by_name[of_object:])
        if kwargs and not kwargs.keys().isdisjoint(in_order[: len(args)]):
            raise _given_twice(name, next(k for k in in_order if k in kwargs), by_name[of_object:])
        return fn(*args, **kwargs)

    call.checked = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _no_argument(function: str, name: str, have: list[str]) -> UsageError:
    here = [n for n in ARGUMENTS.get(name, ()) if n in have]
    if here:
        fix = f"write {here[0]}="
    elif name in ARGUMENT_ADVICE:
        fix = ARGUMENT_ADVICE[name]
    else:
        fix = "give what it has" if have else "leave it out"
    return fail(
        UsageError,
        f"{function}: there is no argument {name!r}",
        [("arguments", ", ".join(have) or "none by name")],
        fix=fix,
    )


def _given_twice(function: str, name: str, have: list[str]) -> UsageError:
    return fail(
        UsageError,
        f"{function}: {name!r} is given by place and by name",
        [("arguments", ", ".join(have))],
        fix="give the weights to optimizer.init(params)" if name == "lr" else "give it once",
    )
