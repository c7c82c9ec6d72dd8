"""What does a user of PyTorch, NumPy or JAX hear who writes a name of theirs? An error that offers
the name that exists here.

It answers for attributes of public modules, tensors, modules and optimizers (`no_name`), and for
arguments of public functions and classes (`public`, `checked`). The names are in
`peer_names.py`, the arguments in `peer_arguments.py`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any, NoReturn, TypeVar, cast, get_args, get_type_hints

import numpy as np

from .callable_module import make_callable
from .errors import PACKAGE, TesseraError, UnknownNameError, UsageError, fail
from .peer_arguments import ARGUMENT_ADVICE, ARGUMENTS, CALL_ADVICE
from .peer_names import ADVICE, INSTEAD
from .renamed import renamed_names
from .tracebacks import boundary
from .wording import nearest

F = TypeVar("F", bound=Callable[..., Any])
_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FREQUENT = ("now",)  # which each step calls for each weight, and no user with arguments
_CALLED = {
    f"__{n}__"
    for n in (
        ["call", "bool", "float", "int", "index", "len", "iter", "array", "format", "setitem"]
    )
}
_OF_TENSORS = ("ts", "nn", "Tensor")  # where what is missing is a function of tensors
_FIRST = " ts nn optim dist ts.linalg x model "  # whose name is offered, where several have it
# What users write before a public name, and the names that it has; filled as modules are imported.
SPACES: dict[str, Iterable[str]] = {}
# The names that public modules import when they are asked for them, as `pkgutil` resolves them.
LATE: set[str] = set()


def public(
    module: str,
    there: dict[str, Any],
    renamed: Mapping[str, str] | None = None,
    late: Sequence[str] = (),
) -> Callable[[str], Any]:
    """The `__getattr__` of a public module, which users write as `module` and whose globals are
    `there`; `renamed` are its old names, and `late` is what it imports when it is first asked for
    it ("data", "observe.profile:profile", "tessera.interop.hf:load_hf"), as a program that does not
    use it need not wait for it. Its functions and classes answer for wrong arguments, and the
    module and those within it for being called, unless they can be. What completes names offers the
    public ones."""
    SPACES[module] = there["__all__"]
    there["__dir__"] = lambda: sorted(there["__all__"])
    near = f"{there['__package__']}."
    places = {w.rpartition(":")[2]: w if w.startswith("tessera.") else near + w for w in late}
    LATE.update(places.values())
    for name in there["__all__"]:
        if name not in places:
            there[name] = checked(there[name])
    old = renamed_names(module, renamed or {}, there)
    if type(sys.modules[there["__name__"]]) is ModuleType:
        not_callable(there["__name__"], there["__all__"])
    for name, inner in there.items():
        full = f"{there['__name__']}.{name}"
        if name not in there["__all__"] and type(inner) is ModuleType and inner.__name__ == full:
            not_callable(full, there["__all__"], module)  # nn.dot_product_attention(x), of JAX

    def __getattr__(name: str) -> Any:
        if name in places:
            there[name] = checked(resolve_name(places[name]))
            return there[name]
        if name in (renamed or {}):
            return old(name)
        here = there["__name__"]
        if any(Path(at, name, "__init__.py").is_file() for at in there.get("__path__", ())):
            raise fail(
                UnknownNameError,
                f"module {here!r} has no attribute {name!r} until it is imported",
                fix=f"import what you need of it: from {here}.{name} import ...",
            )
        raise no_name(f"module {here!r}", module, name, there["__all__"])

    return __getattr__


def not_callable(module: str, have: Sequence[str] = (), owner: str = "") -> None:
    """Makes a call of the module named `module` an error of ours: it has the names `have`, or its
    `owner`, as users write that, has them."""
    name = module.rpartition(".")[2]

    def call(*args: object, **kwargs: object) -> NoReturn:
        fix = f"it has {', '.join([n for n in have if not n[0].isupper()][:6])}"
        fix = _instead(owner, name, tuple(have)) if owner else fix
        raise fail(
            UsageError,
            f"{name}: a module is not a function",
            [("module", module)],
            fix=CALL_ADVICE.get(f"{module}()", fix),
        )

    make_callable(module, call)


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


def no_attribute(owner: str) -> Callable[[Any, str], Any]:
    """The `__getattr__` of objects of the kind `owner`."""

    def __getattr__(self: Any, name: str) -> Any:
        if hasattr(type(self), name):  # a property that failed: its own error
            return object.__getattribute__(self, name)
        raise no_name(f"{type(self).__name__!r} object", owner, name, dir(self))

    return __getattr__


def _set(frozen: type) -> Callable[[Any, str, Any], None]:
    """`__setattr__` of the dataclass `frozen`; classes made of it may have attributes more."""
    mine = {f.name for f in fields(frozen)}
    by_field = frozen.__dataclass_params__.init  # type: ignore[attr-defined]

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is not frozen and name not in mine:
            object.__setattr__(self, name, value)
            return
        how = f": dataclasses.replace(x, {name}=...)" if by_field and name in mine else ""
        kind = type(self).__name__
        raise fail(
            UsageError, f"{kind}: {name} cannot be set, it is a value", fix=f"make another one{how}"
        )

    return __setattr__


def _delete(frozen: type) -> Callable[[Any, str], None]:
    """`__delattr__` of the dataclass `frozen`."""
    mine = {f.name for f in fields(frozen)}

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is frozen or name in mine:
            kind = type(self).__name__
            raise fail(
                UsageError,
                f"{kind}: {name} cannot be deleted, it is a value",
                fix="make another one",
            )
        object.__delattr__(self, name)

    return __delattr__


@functools.cache
def _instead(owner: str, name: str, have: tuple[str, ...]) -> str:
    """What to write for `name`."""
    advice = ADVICE.get(f"{owner}.{name}") or ADVICE.get(name)
    if advice is not None:
        return advice
    if here := [n for n in ARGUMENTS.get(name, ()) if n in have]:  # config.n_embd is config.d
        return f"write {here[0]}"
    if name in INSTEAD:
        return f"write {INSTEAD[name]}"
    for late in LATE:  # which may have it
        resolve_name(late)
    spaces = sorted(SPACES, key=lambda s: _FIRST.find(f" {s} ") % 999)
    for space in spaces:
        if space != owner and name in SPACES[space]:
            return f"write {space}.{name}"
    if plain := name.removesuffix("_") if name.endswith("_") else "":
        new = f"x.{plain}(...)" if plain in SPACES["x"] else INSTEAD.get(plain, f"ts.{plain}(...)")
        if plain in INSTEAD or plain in SPACES["x"] or plain in SPACES["ts"]:
            return f"tensors do not change: x = {new}"
    public_names = [n for n in have if not n.startswith("_")]
    unlike = not get_close_matches(name, public_names, 1, 0.7)
    if owner == "optim" and unlike:
        return f"if optax has it: optim.from_optax(optax.{name}(...)); a rate: lr=optax.{name}(...)"
    if owner in _OF_TENSORS and unlike:
        for space in spaces:
            if like := get_close_matches(name, list(SPACES[space]), 1, 0.85):
                return f"the name most like it is {space}.{like[0]}"
        of_numpy = callable(getattr(np, name, None))
        return (
            f"of a value alone np.{name}(x.numpy()); in a program " if of_numpy else ""
        ) + "compose it of functions of ts, or write it in JAX: @ts.op(index=...)"
    return f"the names most like it are {nearest(name, public_names, 3).partition(', …')[0]}"


# -- arguments ------------------------------------------------------------------------------------
def checked(what: F) -> F:
    """The function `what` with an error of ours for arguments that it does not take, or lacks; a
    class with such methods, and one for attributes that its objects lack. The module that defines a
    function has the new one then."""
    if isinstance(what, type):
        if not (issubclass(what, BaseException) or hasattr(what, "__getattr__")):
            what.__getattr__ = no_attribute(what.__name__)  # type: ignore[attr-defined]
        own = getattr(vars(what).get("__setattr__"), "__qualname__", "")
        if is_dataclass(what) and own == f"{what.__qualname__}.__setattr__":  # of a frozen one
            what.__setattr__ = _set(what)  # type: ignore[method-assign]
            what.__delattr__ = _delete(what)  # type: ignore[method-assign]
        for name, method in list(vars(what).items()):
            if name == "__init__" or (not name.startswith("_") and name not in _FREQUENT):
                _check_method(what, name, method)
            elif name in _CALLED and isinstance(method, FunctionType):
                setattr(what, name, boundary(method))
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


def _check_method(owner: type, name: str, method: Any) -> None:
    """Makes `method` of the public class `owner` answer for wrong arguments, if it has any."""
    fn = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
    if not isinstance(fn, FunctionType) or hasattr(fn, "checked"):
        return
    shown = owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"
    new = asking(fn, shown, of_object=not isinstance(method, staticmethod))
    setattr(owner, name, new if fn is method else type(method)(new))


def asking(fn: F, name: str, of_object: bool = False) -> F:
    """The function `fn`, named `name` in errors, with an error for an argument that it lacks or
    that it was not given. Its first is not to be given where it is `of_object`."""

    @functools.cache  # not before it is needed: `import tessera` would take some 500 signatures
    def takes() -> tuple[list[str], list[str], set[str], bool, str]:
        have = inspect.signature(fn).parameters.values()
        by_name = [p.name for p in have if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        in_order = [p.name for p in have if p.kind in _PLACED]
        known = {*by_name, *getattr(fn, "old_names", ())}
        more = any(p.kind is p.VAR_KEYWORD for p in have)
        rest = next((p.name for p in have if p.kind is p.VAR_POSITIONAL), "")
        return by_name, in_order, known, more, rest

    @boundary
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            by_name, in_order, known, more, rest = takes()
            if rest in kwargs and not more:  # shape=(2, 3) for *shape, in one tuple
                placed = [kwargs.pop(n) for n in in_order[len(args) :] if n in kwargs]
                args = (*args, *placed, kwargs.pop(rest))
            if not more and not known.issuperset(kwargs):
                wrong = next(k for k in kwargs if k not in known)
                raise _no_argument(name, wrong, by_name[of_object:])
            if not kwargs.keys().isdisjoint(in_order[: len(args)]):
                twice = next(k for k in in_order[: len(args)] if k in kwargs)
                raise _given_twice(name, twice, by_name[of_object:])
        try:
            return fn(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            wrong_call = unfit_call(error, fn, name, args, kwargs, of_object)
            if wrong_call is None:
                raise
        raise wrong_call

    call.checked = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def unfit_call(
    error: TypeError | AttributeError,
    fn: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of_object: bool = False,
) -> UsageError | None:
    """The error for a call of `fn` that raised `error`, if that is as its arguments do not fit:
    too few, too many, or, where it was raised in this package, of no class that `fn` takes."""
    renamed = not kwargs.keys().isdisjoint(getattr(fn, "old_names", ()))
    if isinstance(error, TesseraError) or renamed:
        return None
    signature = inspect.signature(fn)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return misfit(signature, name, args, kwargs, of_object)
    end = error.__traceback__
    while end is not None and end.tb_next is not None:
        end = end.tb_next
    inside = end is not None and end.tb_frame.f_code.co_filename.startswith(PACKAGE)
    return _of_no_class(fn, name, given) if inside else None


def _of_no_class(fn: Callable[..., Any], name: str, given: Mapping[str, Any]) -> UsageError | None:
    """The error for the first of the arguments `given` that should be of a class of ours and is
    not; what takes tensors takes arrays and numbers too, so it is not looked at."""
    try:
        hints = get_type_hints(inspect.unwrap(fn))
    except (NameError, TypeError):  # a type that is only there for type checkers
        return None
    for what, value in given.items():
        legal = get_args(hints.get(what)) or (hints.get(what),)
        classes = [k for k in legal if isinstance(k, type)]
        kinds = tuple([k for k in classes if not getattr(k, "_is_protocol", False)])
        ours = [k.__name__ for k in kinds if k.__module__.startswith("tessera")]
        others = [k for k in kinds if k.__name__ not in ours and k is not type(None)]
        if not ours or others or "Tensor" in ours or isinstance(value, kinds):
            continue
        said = (
            repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
        )
        fix = f"give a {' or a '.join(ours)}"
        return fail(UsageError, f"{name}: {what} cannot be {said}", fix=fix)
    return None


def misfit(
    signature: inspect.Signature,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of_object: bool = False,
) -> UsageError:
    """The error for arguments that `signature`, of the function `name`, does not take."""
    have = [*signature.parameters.values()][of_object:]
    names = [p.name for p in have]
    in_order = [p for p in have if p.kind in _PLACED]
    by_name = [p.name for p in have if p.kind is p.KEYWORD_ONLY]
    place = len(args) - of_object
    given = {*kwargs, *(p.name for p in in_order[:place])}
    needed = [p.name for p in have if p.default is p.empty and p.kind in (*_PLACED, p.KEYWORD_ONLY)]
    missing = [n for n in needed if n not in given]
    twice = next((p.name for p in in_order[:place] if p.name in kwargs), None)
    more = any(p.kind is p.VAR_KEYWORD for p in have)
    wrong = None if more else next((n for n in kwargs if n not in names), None)
    if missing and wrong is None:
        what = f"{name}: {' and '.join(missing)} {'are' if missing[1:] else 'is'} missing"
        fix = f"call it with ({', '.join(f'{n}=...' if n in by_name else n for n in needed)})"
    elif place > len(in_order):
        count = f"{place} argument{'s' if place > 1 else ''}"
        what = f"{name}: {count} by place, where it takes {len(in_order) or 'none'}"
        many = [p.name for p in in_order if re.search("Sequence|Dims", str(p.annotation))]
        fix = "leave out those that it does not take"
        if by_name:
            fix = f"give the others by name: {', '.join(f'{n}=' for n in by_name)}"
        elif many:
            fix = f"several go in one tuple: {many[0]}=(a, b)"
    elif twice is not None:
        return _given_twice(name, twice, names)
    else:
        return _no_argument(name, str(wrong), names, missing)
    operands = [("arguments", ", ".join(names) or "none")]
    return fail(UsageError, what, operands, fix=CALL_ADVICE.get(name, fix))


def _no_argument(
    function: str, name: str, have: list[str], missing: Sequence[str] = ()
) -> UsageError:
    here = [n for n in ARGUMENTS.get(name, ()) if n in have]
    close = get_close_matches(name, have, 1, 0.75)
    fix = ARGUMENT_ADVICE.get(f"{function}.{name}", "")
    if not fix and (here or close):
        fix = f"write {(here or close)[0]}="
    for key in (name, f"{function}.*"):
        fix = fix or ARGUMENT_ADVICE.get(key, "")
    if not fix and len(missing) == 1:
        fix = f"write {missing[0]}="
    fix = fix or "leave it out if its default is meant: no other choice is offered"
    return fail(
        UsageError,
        f"{function}: there is no argument {name!r}",
        [("arguments", ", ".join(have) or "none by name")],
        fix=fix,
    )


def _given_twice(function: str, name: str, have: list[str]) -> UsageError:
    own = CALL_ADVICE.get(f"{function}.{name}") or CALL_ADVICE.get(f".{name}")
    return fail(
        UsageError,
        f"{function}: {name!r} is given by place and by name",
        [("arguments", ", ".join(have))],
        fix=own or "give it once",
    )
