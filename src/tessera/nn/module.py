"""`Module`, a container of named tensors; a call of it is a plain function of them.

Its parameters are trained. Other tensors are buffers: state that is moved and saved. Modules are
pytrees for `ts.jit`: their tensors are dynamic arguments, and tensors that a recorded function sets
are set in the caller's module too.
"""

from __future__ import annotations

import fnmatch
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from types import FunctionType
from typing import Annotated, Any, NamedTuple, NoReturn, Self

import numpy as np

from ..core.checks import instance, same_names, shown
from ..core.declared import Flag, Mapped
from ..core.dtypes import dtype_of
from ..core.errors import DTypeError, UnknownNameError, UsageError, lines_up
from ..core.interrupts import whole
from ..core.locks import RECORDING_LOCK
from ..core.peers import SPACES, no_attribute
from ..core.tracebacks import boundary
from ..core.value_checks import is_number
from ..lang.math.create import Init, dist_tensor
from ..lang.record.module_items import ITEMS, converted, stored
from ..lang.record.operands import as_tensor
from ..lang.record.parameter import Parameter
from ..lang.record.recorder import current
from ..lang.record.tree import register
from ..lang.record.variables import is_plain
from ..lang.value.engine import engine
from ..lang.value.host_data import is_array
from ..lang.value.tensor import Tensor
from .module_calls import not_callable, recording_use, scoped
from .module_tree import Holder, direct, modules_of, outer_modules, swap, tensors_of, walk
from .torch_layout import need_fit, transposed_names


def state(*shape: int, init: Init = "zeros") -> Tensor:
    """A buffer, created at its first use."""
    t = dist_tensor(shape, init=init)
    t.remake = lambda sizes, name="": state(*sizes, init=init)
    return t


SHOWN = 60  # letters of an attribute, in the text of a module


Values = Annotated[
    Mapping[str, Any], Mapped("give a dict from names to tensors, such as state_dict() gives")
]


class Unmatched(NamedTuple):
    """The names that `load_state_dict(strict=False)` did not find, and those that it did not
    use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


SETS_TRAINING: set[type] = set()  # classes that set `training` themselves


class Module(Holder):
    """The base class of layers and models.

    Assign parameters and modules as attributes and define `__call__`. An `nn.Parameter` is trained;
    any other tensor is a buffer. A tensor that is assigned to an attribute with a parameter is
    written into that parameter, so every module that holds the parameter sees it. `training` is
    True until `eval()` is called.
    """

    training: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.__dict__.get("buffers"), (tuple, list)):
            raise UsageError(
                f"{cls.__name__}: buffers are not listed",
                fix="every tensor that is no nn.Parameter is one: self.mean = ts.zeros(4)",
            )
        register(cls)
        for name, made in list(cls.__dict__.items()):
            if name == "__call__":
                cls.__call__ = scoped(made, Module)  # type: ignore[method-assign]
            elif name == "__init__":
                cls.__init__ = _settled(made)  # type: ignore[method-assign]
            elif type(made) is FunctionType and not name.startswith("_"):
                setattr(cls, name, recording_use(made, Module))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        recorder = current()
        if recorder is not None:  # a function's own module: nothing of it outlives the recording
            recorder.add_created(made)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if "." in name:
            raise UsageError(
                f"{type(self).__name__}: an attribute cannot be named {name!r}",
                fix="write model.block.weight = t, or load_state_dict({name: t}, strict=False)",
            )
        if not isinstance(value, Tensor) and any(m is self for _, m in modules_of(value, name)):
            raise UsageError(
                f"{type(self).__name__}.{name}: a module cannot hold itself, nor one that holds it",
                fix="give what is needed of it as an argument of the call",
            )
        old = self.__dict__.get(name)
        if isinstance(old, Tensor) and type(value) is not Parameter and is_array(value):
            value = as_tensor(value)
        if isinstance(old, Tensor) and type(old) is not Parameter and is_number(value):
            if old.shape:
                raise UsageError(
                    f"{type(self).__name__}.{name} is a buffer, it cannot be {shown(value)}",
                    buffer=old.type,
                    fix=f"give a tensor of its type: ts.full_like(module.{name}, {shown(value)})",
                )
            value = as_tensor(value).to(old.dtype)
        if isinstance(value, Tensor):
            value = stored(self, name, old, value)
        elif type(old) is Parameter and value is not None and not isinstance(value, Module):
            raise UsageError(
                f"{type(self).__name__}.{name} is a parameter, it cannot be {shown(value)}",
                parameter=old.type,
                fix="give a tensor of its type, or another nn.Parameter",
            )
        elif is_plain(value) and (recorder := current()) is not None:
            recorder.set_number(self, name)
        object.__setattr__(self, name, converted(value))
        for t in direct(value):
            t.home = weakref.ref(self)

    # -- contents ---------------------------------------------------------------------------------
    def named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yields (dotted name, parameter) of each parameter of this module and of those below, in
        order.

        A parameter with several names comes once, by its first; with `remove_duplicate=False` by
        each.
        """
        known: set[int] = set()
        for name, t in tensors_of(self, prefix):
            if type(t) is Parameter and not (remove_duplicate and id(t) in known):
                known.add(id(t))
                yield name, t

    def named_buffers(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (dotted name, tensor) of each buffer of this module and of those below.

        A buffer with several names comes as in `named_parameters`.
        """
        known: set[int] = set()
        for name, t in tensors_of(self, prefix):
            if type(t) is not Parameter and not (remove_duplicate and id(t) in known):
                known.add(id(t))
                yield name, t

    def modules(self) -> Iterator[Module]:
        """Yields this module and each module below, each once, as in PyTorch."""
        for _, module in self.named_modules():
            yield module

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yields (dotted name, module) of this module, whose name is `prefix`, and of each module
        below.

        A module with several names comes once, by its first.
        """
        known: set[int] = set()
        for name, module in modules_of(self, prefix):
            if id(module) not in known:
                known.add(id(module))
                yield name, module

    def parameters(self) -> dict[str, Parameter]:
        """A dict of all parameters by dotted name, frozen ones included; it sets their `name`.

        `model.parameters().values()` are the weights alone, like PyTorch's `parameters()`.
        """
        found: dict[str, Parameter] = {}
        for name, t in self.named_parameters():
            t.name = t.name or name
            found[WeightName(name)] = t
        return found

    def trainable_parameters(self) -> dict[str, Parameter]:
        """A dict of the parameters that are not frozen, as `ts.grad` and optimizers take them."""
        return {name: t for name, t in self.parameters().items() if t.requires_grad}

    def train(self, mode: Flag = True) -> Self:
        """Sets `training` on all modules: dropout is active, batch norms use batch statistics.

        `train(False)`, or `eval()`, is for inference. Raises UsageError if `mode` is not a bool.
        """
        for module in self.modules():
            kind = type(module)
            if "training" in module.__dict__ and module.training:
                SETS_TRAINING.add(kind)
            if kind in SETS_TRAINING or not mode:
                module.training = mode
            elif mode and "training" in module.__dict__:
                del module.__dict__["training"]  # as it was before `eval()`: it is True again
        return self

    def eval(self) -> Self:
        """Sets `training` to False on all modules, like `train(False)`: for inference."""
        return self.train(False)

    # -- frozen parameters ------------------------------------------------------------------------
    def freeze(self, *patterns: str) -> Self:
        """Freezes the parameters whose names match a pattern, or all: they are not trained.

        A frozen parameter has no gradient and no optimizer state; it is saved and loaded as before.
        A pattern is the name of a parameter or of a module; `*` matches any part: `"encoder.*"`.
        Raises UsageError if a pattern matches nothing.
        """
        return self._require("freeze", patterns, False)

    def unfreeze(self, *patterns: str) -> Self:
        """Unfreezes the parameters whose names match a pattern (see `freeze`), or all.

        Raises UsageError if a pattern matches nothing.
        """
        return self._require("unfreeze", patterns, True)

    def requires_grad_(self, requires_grad: Flag = True) -> Self:
        """Freezes all parameters (False) or trains them again (True), as in PyTorch."""
        return self._require("requires_grad_", (), requires_grad)

    def _require(self, caller: str, patterns: tuple[str, ...], value: bool) -> Self:
        """Sets `requires_grad` of the parameters that match one of `patterns`, or of all without
        patterns. Raises UsageError if a pattern matches no name."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for pattern in patterns or ("*",):
            instance(
                caller, "a pattern", pattern, str, f'give names with *, e.g. {caller}("encoder.*")'
            )
            matching = [
                t for name, t in parameters.items()
                if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
            ]  # fmt: skip
            if not matching and patterns:
                raise UsageError(
                    f"{caller}: {pattern!r} fits no parameter",
                    parameters=", ".join(list(parameters)[:5]) or "none",
                    fix="write what their names are, with * for any part",
                )
            for t in matching:
                t.requires_grad = value
        return self

    # -- dtype ------------------------------------------------------------------------------------
    @whole
    def to(self, dtype: object) -> Self:
        """Stores all float parameters and buffers in `dtype`, rounded to it, like PyTorch's `to`.

        An optimizer keeps f32 copies of weights narrower than f32, so call this before
        `Optimizer.init`. For another layout use `dist.place`. Tensors that are not yet created will
        be created in `dtype`. Raises DTypeError if `dtype` is not a float.

        >>> import tessera as ts
        >>> ts.nn.Linear(2, 3).to(ts.bf16).weight.dtype
        bf16
        """
        want = dtype_of(dtype)
        if not want.is_float:
            raise DTypeError(f"to: weights cannot be {want}", fix="give a float, such as ts.bf16")
        for box in self.parameters().values():
            box.put(box.now().to(want))
        swap(self, {id(t): t.to(want) for _, t in self.named_buffers() if t.dtype.is_float})
        return self

    # -- from and to dicts ------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Tensor]:
        """A dict of all parameters and buffers by name. The values do not change in later steps."""
        with RECORDING_LOCK:
            return {str(n): t.now() for n, t in (*self.parameters().items(), *self.named_buffers())}

    def load_parameters(self, values: Values, strict: Flag = True) -> None:
        """Writes tensors into the parameters that `parameters()` names, and into buffers if given.

        Floats are rounded to the dtype of the model's parameter, as in PyTorch; `model.to(dtype)`
        changes that. Frozen parameters may be missing. With `strict=False` any may be missing, and
        unknown names are ignored. Raises UsageError if a name is missing or unknown, ShapeError or
        DTypeError if a value does not fit; then nothing is written.
        """
        need = set(self.trainable_parameters())
        self._load("load_parameters", values, need, strict)

    def load_state_dict(self, values: Values, strict: Flag = True) -> Unmatched:
        """Writes all values of a `state_dict()`: every parameter and buffer.

        Floats are rounded to the dtype of the model's tensors. With `strict=False` it returns the
        names that are missing and those that were not used. Raises the errors of `load_parameters`;
        then nothing is written.
        """
        return self._load("load_state_dict", values, set(self.state_dict()), strict)

    @whole
    def _load(
        self,
        caller: str,
        values: Mapping[str, Any],
        need: set[str],
        strict: bool,
        round_to_mine: bool = True,
    ) -> Unmatched:
        """Writes `values` into the parameters and buffers of these names; the names `need` must be
        given. A tensor with two names may be given under both, with equal values. All checks come
        before any write."""
        # One tensor may come under any of its names.
        boxes = dict(self.named_parameters(remove_duplicate=False))
        buffers = dict(self.named_buffers(remove_duplicate=False))
        tensors: dict[str, Tensor] = {**boxes, **buffers}
        first: dict[int, str] = {}
        for name, t in tensors.items():
            first.setdefault(id(t), name)
        given: dict[str, tuple[str, Any]] = {}
        for name, value in values.items():
            if name in tensors:
                one = first[id(tensors[name])]
                other = given.setdefault(one, (name, value))
                if other[1] is not value and not _equal(other[1], value):
                    raise UsageError(
                        f"{caller}: {other[0]!r} and {name!r} are one"
                        f" {'parameter' if name in boxes else 'buffer'}, the values differ",
                        tensor=tensors[name].type,
                        fix="give one of them, or untie them: module.weight = nn.Parameter(...)",
                    )
        unknown = [str(n) for n in values if n not in tensors]
        absent = [n for n in tensors if n in need and n not in given]
        if strict:
            names = "parameters()" if caller == "load_parameters" else "state_dict()"
            fix = f"give what {names} names, or load what is there: strict=False"
            same_names(caller, absent, unknown, fix)
        new_values = {name: as_tensor(value) for name, (_, value) in given.items()}
        transposed = transposed_names(self.named_modules())
        for name, t in new_values.items():
            need_fit(
                f"{caller}: {name!r}",
                tensors[name].type,
                t.type,
                given[name][1],
                transposed=name in transposed,
            )
            if current() is None:
                if t._data is not None:
                    engine().alive(t._data, t.type)
                if t.home is not None and name not in boxes:
                    t = new_values[name] = copy(t)  # another module's buffer stays its own
            if round_to_mine and t is not tensors[name]:
                new_values[name] = t.to(tensors[name].dtype)
        if new_values and all(t is tensors[name] for name, t in new_values.items()):
            warnings.warn(
                f"{caller}: these are the model's own parameters, so nothing changes; to come "
                "back to"
                " what they were, keep state_dict() from that time",
                stacklevel=lines_up(),
            )
        for name, t in new_values.items():
            box = boxes.get(name)
            if box is not None and box is not t:
                box.put(t)
                box.name = box.name or name
        swap(self, {id(tensors[name]): t for name, t in new_values.items() if name not in boxes})
        return Unmatched(absent, unknown)

    # -- shown ------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        kind, parts, inner = type(self).__name__, [], []
        for name, value in self.__dict__.items():
            found = list(outer_modules(value, name))
            if found:
                inner += [f"({path}): {module!r}" for path, module in found]
            elif isinstance(value, Tensor):
                parts.append(f"{name}={_type_text(value)}")
            elif isinstance(value, (bool, int, float, str)) and name != "training":
                text = repr(value)
                parts.append(f"{name}={text if len(text) <= SHOWN else text[:SHOWN] + '…'}")
            elif callable(value):
                inner.append(f"({name}): {getattr(value, '__name__', type(value).__name__)}")
            elif value and isinstance(value, (dict, list, tuple)):
                parts += [f"{path}={_type_text(t)}" for path, t in walk(value, name)]
        first = ", ".join(parts)
        if not inner:
            return f"{kind}({first})"
        lines = [*([first] if first else []), *inner]
        return f"{kind}(\n" + "\n".join(f"  {x}".replace("\n", "\n  ") for x in lines) + "\n)"


def load_with_dtypes(model: Module, values: Mapping[str, Any]) -> None:
    """Calls `model.load_parameters(values)`, but gives the weights the dtypes of the values."""
    need = set(model.trainable_parameters())
    model._load("load_parameters", values, need, True, round_to_mine=False)


def _settled(init: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of a module, followed by the conversion of its lists and dicts to a module's
    own."""

    @boundary
    @functools.wraps(init)
    def run(self: Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for name, value in vars(self).items():
            if type(value) in ITEMS and (new := converted(value)) is not value:
                object.__setattr__(self, name, new)
                for t in direct(new):
                    t.home = weakref.ref(self)

    return run


SPACES["model"] = vars(Module).keys()


Module.__getattr__ = no_attribute("Module")  # type: ignore[attr-defined]  # unseen by type checkers
Module.__call__ = not_callable  # type: ignore[method-assign]


def _type_text(t: Tensor) -> str:
    return f"{t.type}{' frozen' if t.frozen else ''}"


def _equal(a: Any, b: Any) -> bool:
    x, y = (v.numpy() if isinstance(v, Tensor) else np.asarray(v) for v in (a, b))
    return x.shape == y.shape and bool((x == y).all())


# Names of weights with a hint for users of PyTorch, who expect weights from `model.parameters()`.
#
# `parameters()` is a dict, as in JAX, so a loop over it gives names. Each is a string that, asked
# for an attribute of a tensor, raises an error with the way to the tensor.

_FIX = "parameters() is a dict: for p in model.parameters().values()"


class WeightName(str):
    """The name of a weight in `Module.parameters()`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        text = f"{str(self)!r} is the name of a weight, it has no {name!r}"
        if name.startswith("_"):  # a question of Python or of a library, no user's
            raise AttributeError(text)
        raise UnknownNameError(text, fix=_FIX)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self.__getattr__(name)

    def _no_number(self, other: object, *more: object) -> NoReturn:
        raise UsageError(
            f"{str(self)!r} is the name of a weight, it is not computed with", fix=_FIX
        )

    __pow__ = __mul__ = __rmul__ = _no_number

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)
