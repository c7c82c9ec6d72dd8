"""`Parameter`, the weights of modules, and their checks for gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...core.checks import flag, shown, sizes, unfit
from ...core.context import settings
from ...core.dtypes import dtype_of
from ...core.errors import DTypeError, ShapeError, UsageError
from ...core.layout import plain
from ...core.value_checks import is_whole
from ..math.create import first_values
from ..value.eager import eager
from ..value.tensor import Like, Tensor
from .box import Box, fits
from .operands import as_tensor
from .recorder import current


class Parameter(Box):
    """A weight of a module, from sizes as in `Parameter(4, 8, init="normal")`, or from a tensor.

    From sizes, the values are made at the first use, and the layout may be chosen until then; they
    depend on `ts.seed` and `name` (without a name, on the order of creation). `init` is as in
    `dist.tensor`. With `requires_grad=False` it is frozen: saved, moved and used, but not trained.
    Raises UsageError if `init` is unknown or is given with a tensor, DTypeError if the dtype is not
    a float, ShapeError if a size is negative.

    >>> import tessera as ts
    >>> w = ts.nn.Parameter(ts.ones((2, 3)))
    >>> w.shape, w.requires_grad, isinstance(w, ts.Tensor)
    ((2, 3), True, True)
    """

    def __init__(
        self,
        *shape: Any,
        init: Any = None,
        dtype: Any = None,
        name: str = "",
        requires_grad: bool = True,
    ) -> None:
        recorder = current()
        if recorder is not None:
            recorder.add_created(self)
        given = shape[0] if shape and not isinstance(shape[0], np.generic) else None
        if given is not None and hasattr(given, "__array__"):  # an array of any library
            if len(shape) == 2 and isinstance(shape[1], bool):
                requires_grad = shape[1]
            elif len(shape) > 1 or init is not None:
                raise UsageError(
                    "Parameter: a tensor has its values already",
                    tensor=shown(shape[0]),
                    fix="give the tensor alone, or sizes and init=",
                )
            value = as_tensor(shape[0], dtype)
            super().__init__(None, value.type)
            self.name = name or value.name
            self._take(value)
        else:
            if len(shape) == 1 and isinstance(given, (tuple, list)):
                shape = tuple(given)
            if not all(map(is_whole, shape)):
                fix = "give sizes, nn.Parameter(8, 4096), or a tensor: nn.Parameter(ts.tensor(x))"
                raise unfit("Parameter", "the shape", shape, fix, ShapeError)
            kind = dtype_of("f32" if dtype is None else dtype)
            super().__init__(None, plain(kind, sizes("Parameter", shape), settings().mesh))
            self.wait(first_values("Parameter", "normal" if init is None else init, name))
            self.name, self.drawn = name, True
            self.remake = lambda s, name="": Parameter(
                *s, init=init, dtype=dtype, name=name, requires_grad=self.requires_grad
            )
        if not self.dtype.is_float:
            raise DTypeError(
                f"Parameter: {self.dtype} cannot be trained",
                tensor=self.type,
                fix="give floats; a tensor of integers is an attribute like any other",
            )
        self.requires_grad = requires_grad

    # -- training ---------------------------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:
        """True if the parameter is trained. If False it has no gradient and no optimizer state."""
        return not self.frozen

    @requires_grad.setter
    def requires_grad(self, value: object) -> None:
        trained = flag("Parameter", "requires_grad", value)
        if self.frozen is trained:
            self.frozen = not trained
            FREEZING.add(True)

    @property
    def data(self) -> Tensor:
        """The value without its history. Setting it replaces the value of the parameter, as in
        PyTorch: `p.data = p.data - step`. Raises ShapeError or DTypeError if the new value differs
        in shape or dtype."""
        return self.detach()

    @data.setter
    def data(self, value: Like) -> None:
        new = as_tensor(value).detach()
        fits("Parameter.data: the new value", self, new, "give a value of its shape and dtype")
        self.put(new)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UsageError(
            "a parameter cannot be changed in a part of it",
            parameter=self.type,
            fix="put a whole value into it: p.data = ts.where(mask, value, p)",
        )

    def _in_place(self, value: Tensor) -> Tensor:
        """Replaces the value and returns the parameter: the meaning of `p -= step`. Raises
        UsageError, as PyTorch does, unless the parameter is frozen or inside `ts.no_grad`:
        elsewhere a gradient through the old value could be asked for."""
        if not (settings().no_grad or self.frozen):
            raise UsageError(
                "Parameter: a weight that is trained is changed in place",
                weight=self.type,
                fix="change it inside `with ts.no_grad():`; assign it: model.weight = tensor; or"
                " compute on with a new tensor: w = w - step",
            )
        fits("Parameter: the new value", self, value, "give a value of its shape and dtype")
        self.put(value)
        return self

    def draw_as(self, name: str) -> None:
        """Makes the first values those of a parameter called `name`. For graph functions."""
        if self.remake is not None:
            with eager():
                first = self.remake(self.shape, name)
            self.wait(first._first)  # type: ignore[attr-defined]


# Not empty once a parameter was frozen: until then calls need not compare `frozen`.
FREEZING: set[bool] = set()


def stand_ins(leaves: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns `values`, for the `leaves` of a function's arguments. The value for a parameter
    becomes a Parameter: frozen like it, and one object where the parameter has several names."""
    made: dict[int, Parameter] = {}
    for leaf, x in zip(leaves, values, strict=True):
        if type(leaf) is Parameter and type(x) is Tensor and id(leaf) not in made:
            made[id(leaf)] = p = Parameter(x, name=leaf.name)
            p.frozen = leaf.frozen
    return [made.get(id(leaf), x) for leaf, x in zip(leaves, values, strict=True)]


def trained(tree: Any) -> Any:
    """Returns `tree` with each module replaced by a dict of its trainable parameters."""
    if hasattr(type(tree), "trainable_parameters"):
        return tree.trainable_parameters()
    if isinstance(tree, dict):
        return {k: trained(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [trained(v) for v in tree]
        if isinstance(tree, list):
            return values
        return tuple(values) if type(tree) is tuple else type(tree)(*values)
    return tree


def need_trained(call: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raises UsageError if a parameter is frozen, or has two names."""
    names: dict[int, str] = {}
    for name, t in named:
        if not isinstance(t, Parameter):
            continue
        if t.frozen:
            raise UsageError(
                f"{call}: {name!r} is frozen",
                parameter=t.type,
                fix="give the module itself or its trainable_parameters(), or unfreeze it",
            )
        if names.setdefault(id(t), name) != name:
            raise UsageError(
                f"{call}: {names[id(t)]!r} and {name!r} are one parameter",
                parameter=t.type,
                fix="name it once, as the parameters() of a module do",
            )


def _in_place(name: str) -> Callable[[Parameter, Any], Tensor]:
    plain = name.replace("__i", "__", 1)
    return lambda p, y: p._in_place(getattr(Tensor, plain)(p, y))


for _name in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
    setattr(Parameter, _name, _in_place(_name))
