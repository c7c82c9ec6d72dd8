"""A module is a container of tensors with names; a call of it is a plain function of them.

Modules are trees to `ts.jit` and `ts.grad`: their parameters are dynamic arguments, and what a
recorded function puts into them is put into the caller's module too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from ..core.errors import ShapeError, UsageError, fail
from ..lang.checks import flag, shown, sizes
from ..lang.create import Init, dist_tensor
from ..lang.record import scope
from ..lang.tensor import Tensor, as_tensor
from ..lang.tree import register


def Parameter(*shape: int, init: Init = "normal", dtype: Any = "f32", name: str = "") -> Tensor:
    """A weight, made when it is first used; its layout may still be chosen until then.

    Its values depend on `name`, or without one on the order of creation.
    """
    t = dist_tensor(sizes("Parameter", shape), init=init, dtype=dtype, name=name)
    t.remake = lambda sizes, name="": Parameter(*sizes, init=init, dtype=dtype, name=name)
    return t


class Module:
    """Base of layers and models: set tensors and modules as attributes, define `__call__`.

    `buffers` names the attributes that are state and no weights, such as running statistics.
    """

    buffers: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(cls)
        call = cls.__dict__.get("__call__")
        if call is not None:
            cls.__call__ = _scoped(call)  # type: ignore[method-assign]

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """(dotted name, tensor) of every weight below, in order of definition."""
        for name, value in self.__dict__.items():
            if name not in self.buffers:
                yield from _walk(value, f"{prefix}{name}")

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """(dotted name, tensor) of all state below that is no weight."""
        for path, module in self.modules(prefix):
            for name in module.buffers:
                yield f"{path}{name}", getattr(module, name)

    def modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(prefix of its names, module) of this module and of every one below."""
        yield prefix, self
        for name, value in self.__dict__.items():
            for path, module in _modules(value, f"{prefix}{name}"):
                yield from module.modules(f"{path}.")

    def train(self, mode: bool = True) -> Self:
        """Sets `training` where a module has it: dropout drops, batch norms take the batch's
        statistics. `train(False)` is for using the model. Raises UsageError."""
        for _, module in self.modules():
            if "training" in module.__dict__:
                module.training = flag("train", "mode", mode)  # type: ignore[attr-defined]
        return self

    def parameters(self) -> dict[str, Tensor]:
        """Every weight below by its dotted name; gives the tensors these names."""
        found = dict(self.named_parameters())
        for name, t in found.items():
            t.name = t.name or name
        return found

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Puts tensors in the places that `parameters()` names, and `state_dict()` where they are
        given. Raises UsageError, ShapeError."""
        if not isinstance(values, Mapping):
            raise fail(
                UsageError,
                f"load_parameters: the parameters cannot be {shown(values)}",
                fix="give a dict from names to tensors, such as state_dict() gives",
            )
        have = dict(self.named_parameters())
        state = dict(self.named_buffers())
        unknown, absent = set(values) - set(have) - set(state), set(have) - set(values)
        have |= state
        if unknown or absent:
            raise fail(
                UsageError,
                f"load_parameters: {len(unknown)} names too many, {len(absent)} missing",
                [("too many", ", ".join(sorted(unknown)[:5]) or "none"),
                 ("missing", ", ".join(sorted(absent)[:5]) or "none")],
                fix="give what parameters() names",
            )  # fmt: skip
        for name, value in values.items():
            t = as_tensor(value)
            if t.shape != have[name].shape:
                raise fail(
                    ShapeError,
                    f"load_parameters: {name!r} has another shape",
                    [("have", have[name].type), ("given", t.type)],
                    fix="load a checkpoint of a model with the same sizes",
                )
            _set(self, name.split("."), t)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights and the other state by name, for saving."""
        return {**self.parameters(), **dict(self.named_buffers())}


def _scoped(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(self: Module, *args: Any, **kwargs: Any) -> Any:
        with scope(self.__dict__.get("scope_name") or type(self).__name__.lower()):
            return call(self, *args, **kwargs)

    return run


def _walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Module):
        yield from value.named_parameters(f"{name}.")
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from _walk(v, f"{name}.{k}")
    elif isinstance(value, (list, tuple)):
        for k, v in enumerate(value):
            yield from _walk(v, f"{name}.{k}")


def _modules(value: Any, name: str) -> Iterator[tuple[str, Module]]:
    if isinstance(value, Module):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _modules(v, f"{name}.{k}")


def _set(holder: Any, path: list[str], t: Tensor) -> None:
    for key in path[:-1]:
        holder = holder[int(key)] if isinstance(holder, (list, tuple)) else (
            holder[key] if isinstance(holder, dict) else getattr(holder, key)
        )  # fmt: skip
    last = path[-1]
    t.name = t.name or ".".join(path)
    if isinstance(holder, list):
        holder[int(last)] = t
    elif isinstance(holder, dict):
        holder[last] = t
    else:
        setattr(holder, last, t)
