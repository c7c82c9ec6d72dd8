"""Public modules, functions and classes: errors for unknown names and for wrong arguments."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType, ModuleType, NoneType
from typing import Any, NoReturn, TypeVar, cast, get_args, get_type_hints

from .callable_module import make_callable
from .declared import Declaration, declarations, fitted
from .errors import PACKAGE, TesseraError, UnknownNameError, UsageError
from .peers import LATE, SPACES, argument_fix, fix_for, name_fix, no_attribute, no_name
from .tracebacks import boundary

F = TypeVar("F", bound=Callable[..., Any])
_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FREQUENT = ("now",)  # unchecked: called for each weight in each step, without arguments
_CALLED = re.compile("__(call|bool|float|int|index|len|iter|array|format|setitem)__")


def public(
    module: str, namespace: dict[str, Any], late: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a public module, and makes the module's functions, classes and
    calls give errors with a fix.

    `module` is the name that users write, `namespace` its globals. The names of `late` ("data",
    "observe.profile:profile", "tessera.interop.hf:load_hf") are imported at their first use, so
    that other programs do not wait for them. Functions and classes of the module get errors for
    wrong arguments; the module and the modules in it get an error for a call; `dir` lists the
    public names.
    """
    SPACES[module] = names = namespace["__all__"]
    namespace["__dir__"] = lambda: sorted(namespace["__all__"])
    here, near = namespace["__name__"], f"{namespace['__package__']}."
    places = {w.rpartition(":")[2]: w if w.startswith("tessera.") else near + w for w in late}
    LATE.update(places.values())
    for name in names:
        if name not in places:
            namespace[name] = checked(namespace[name])
    if type(sys.modules[here]) is ModuleType:
        not_callable(here, names)
    for name, inner in namespace.items():
        full = f"{here}.{name}"
        if name not in names and type(inner) is ModuleType and inner.__name__ == full:
            not_callable(full, names, module)  # nn.dot_product_attention(x), of JAX

    def __getattr__(name: str) -> Any:
        if name in places:
            namespace[name] = checked(resolve_name(places[name]))
            return namespace[name]
        if any(Path(at, name, "__init__.py").is_file() for at in namespace.get("__path__", ())):
            raise UnknownNameError(
                f"module {here!r} has no attribute {name!r} until it is imported",
                fix=f"import what you need of it: from {here}.{name} import ...",
            )
        raise no_name(f"module {here!r}", module, name, names)

    return __getattr__


def not_callable(module: str, names: Sequence[str] = (), owner: str = "") -> None:
    """Makes a call of the module named `module` a UsageError. `names` are the names of the module,
    or of its `owner` if there is one."""
    name = module.rpartition(".")[2]

    def call(*args: object, **kwargs: object) -> NoReturn:
        first = ", ".join([n for n in names if not n[0].isupper()][:6])
        other = name_fix(owner, name, tuple(names)) if owner else f"it has {first}"
        fix = fix_for("modules", module) or other
        raise UsageError(f"{name}: a module is not a function", module=module, fix=fix)

    make_callable(module, call)


# -- classes --------------------------------------------------------------------------------------
def checked(target: F) -> F:
    """Returns the function `target` with a UsageError for wrong or missing arguments, and replaces
    `target` in the module that defines it. A class gets such methods, and an error for unknown
    attributes of its objects."""
    if isinstance(target, type):
        _check_class(target)
        return target
    if not isinstance(target, FunctionType) or hasattr(target, "checked"):
        return target
    home = vars(sys.modules[target.__module__])
    have: Any = home.get(target.__name__)
    if getattr(have, "checked", False) and inspect.unwrap(have) is inspect.unwrap(target):
        return cast(F, have)  # `target` is an alias of a function that is checked already
    new = asking(target, target.__name__)
    if have is target:
        home[target.__name__] = new
    return new


def _check_class(cls: Any) -> None:
    if not (issubclass(cls, BaseException) or hasattr(cls, "__getattr__")):
        cls.__getattr__ = no_attribute(cls.__name__)
    own = getattr(vars(cls).get("__setattr__"), "__qualname__", "")
    if own == f"{cls.__qualname__}.__setattr__" and "__dataclass_fields__" in vars(cls):  # frozen
        cls.__setattr__ = _refusal(cls, "set")
        cls.__delattr__ = _refusal(cls, "delete")
    for name, method in [*vars(cls).items()]:
        if isinstance(method, FunctionType) and _CALLED.fullmatch(name):
            setattr(cls, name, boundary(method))
        elif name == "__init__" or not (name.startswith("_") or name in _FREQUENT):
            fn = getattr(method, "__func__", method)  # of a class method
            if isinstance(fn, FunctionType) and not hasattr(fn, "checked"):
                shown = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
                new = asking(fn, shown, of_object=not isinstance(method, staticmethod))
                setattr(cls, name, new if fn is method else type(method)(new))


def _refusal(frozen: Any, action: str) -> Callable[..., None]:
    """Returns `__setattr__` or `__delattr__` of the dataclass `frozen`; subclasses may have
    attributes of their own."""
    mine = {f.name for f in fields(frozen)}
    by_field = action == "set" and frozen.__dataclass_params__.init

    def refuse(self: Any, name: str, *value: Any) -> None:
        if type(self) is not frozen and name not in mine:
            getattr(object, f"__{action[:3]}attr__")(self, name, *value)
            return
        how = f": dataclasses.replace(x, {name}=...)" if by_field and name in mine else ""
        done = "set" if action == "set" else "deleted"
        raise UsageError(
            f"{type(self).__name__}: {name} cannot be {done}, it is a value",
            fix=f"make another one{how}",
        )

    return refuse


# -- arguments ------------------------------------------------------------------------------------
def asking(fn: F, name: str, of_object: bool = False) -> F:
    """Returns `fn`, named `name` in errors, with a UsageError for wrong or missing arguments, and
    checks of those that are declared. With `of_object` the first argument is the object, which
    errors do not list."""

    have: tuple[Declaration, ...] | None = None

    @boundary
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal have
        if have is None:  # at the first call, as annotations take time to evaluate
            have = declarations(fn)
        try:
            return fn(*(fitted(fn, have, name, args, kwargs) if have else args), **kwargs)
        except (TypeError, AttributeError) as error:
            spread = _spread(fn, args, kwargs) if kwargs else None
            wrong = None if spread else unfit_call(error, fn, name, args, kwargs, of_object)
            if not (spread or wrong):
                raise
        if wrong:
            raise wrong
        return call(*spread[0], **spread[1])  # type: ignore[index]

    call.checked = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _spread(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments of a call of `fn` with `shape=(2, 3)` moved to `*shape`; None if there
    is no such argument."""
    have = inspect.signature(fn).parameters.values()
    kinds = {p.kind: p.name for p in have}
    rest = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
    if rest not in kwargs or inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    after = [p.name for p in have if p.kind in _PLACED][len(args) :]
    placed = [n for n in after if n in kwargs]
    others = {k: v for k, v in kwargs.items() if k not in (rest, *placed)}
    return (*args, *(kwargs[n] for n in placed), kwargs[rest]), others


def unfit_call(
    error: TypeError | AttributeError,
    fn: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of_object: bool = False,
) -> UsageError | None:
    """Returns the error for a call of `fn` that raised `error`, if its arguments do not fit: too
    few, too many, or of a wrong class. The class is checked only if code of this package raised
    `error`."""
    if isinstance(error, TesseraError):
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


def _of_no_class(
    fn: Callable[..., Any], name: str, arguments: Mapping[str, Any]
) -> UsageError | None:
    """Returns the error for the first argument of `arguments` that is annotated with classes of
    this package, but is an instance of none. Arguments that may be tensors are skipped, since they
    may be arrays and numbers, too."""
    try:
        hints = get_type_hints(inspect.unwrap(fn))
    except (NameError, TypeError):  # a type that is imported for type checkers only
        return None
    for argument, value in arguments.items():
        legal = get_args(hints.get(argument)) or (hints.get(argument),)
        kinds = tuple(
            k for k in legal if isinstance(k, type) and not getattr(k, "_is_protocol", False)
        )
        classes = [k for k in kinds if k is not NoneType]
        ours = [k.__name__ for k in classes if k.__module__.startswith("tessera")]
        if not ours or len(ours) < len(classes) or "Tensor" in ours or isinstance(value, kinds):
            continue
        plain = value is None or isinstance(value, str)
        value_text = repr(value) if plain else f"a {type(value).__name__}"
        fix = f"give a {' or a '.join(ours)}"
        return UsageError(f"{name}: {argument} cannot be {value_text}", fix=fix)
    return None


def misfit(
    signature: inspect.Signature,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of_object: bool = False,
) -> UsageError:
    """Returns the error for a call of the function `name`, whose `signature` does not fit the
    arguments."""
    parameters = [*signature.parameters.values()][of_object:]
    names = [p.name for p in parameters]
    placed = [p for p in parameters if p.kind in _PLACED]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    count = len(args) - of_object
    first = [p.name for p in placed[:count]]
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (*_PLACED, p.KEYWORD_ONLY)
    ]
    missing = [n for n in needed if n not in (*kwargs, *first)]
    more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wrong = [k for k in kwargs if k not in names and not more]
    twice = [n for n in first if n in kwargs]
    if wrong:
        message = f"{name}: there is no argument {wrong[0]!r}"
        fix = argument_fix(name, wrong[0], names, missing)
    elif twice:
        message = f"{name}: {twice[0]!r} is given by place and by name"
        fix = fix_for("twice", twice[0], name) or "give it once"
    elif missing:
        message = f"{name}: {' and '.join(missing)} {'are' if missing[1:] else 'is'} missing"
        fix = f"call it with ({', '.join(f'{n}=...' if n in by_name else n for n in needed)})"
    else:
        counted = f"{count} argument{'s' if count > 1 else ''}"
        message = f"{name}: {counted} by place, where it takes {len(placed) or 'none'}"
        many = [p.name for p in placed if re.search("Sequence|Dims", str(p.annotation))]
        fix = "leave out those that it does not take"
        if by_name:
            fix = f"give the others by name: {', '.join(f'{n}=' for n in by_name)}"
        elif many:
            fix = f"several go in one tuple: {many[0]}=(a, b)"
    if not (wrong or twice):
        fix = fix_for("calls", name) or fix
    return UsageError(message, arguments=", ".join(names) or "none", fix=fix)
