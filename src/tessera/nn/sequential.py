"""Sequential layers, and calls of a module with other weights than its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.checks import function_of, instance, mapping, same_names, unfit
from ..core.errors import UsageError
from ..core.tensor_checks import alike
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Tensor
from .module import Module
from .module_tree import direct


class Sequential(Module):
    """A chain of layers: each is called with the result of the one before.

    A layer is a module or any function of one value, such as `nn.relu`. Its weights are named by
    its number, "0.weight", or by its key in a dict of layers. `model[0]` is a layer, which may be
    replaced; `model[1:3]` is a Sequential of some layers, which keep their names. Raises UsageError
    if a layer cannot be called.

    >>> import tessera as ts
    >>> model = ts.nn.Sequential(ts.nn.Linear(4, 8), ts.nn.relu, ts.nn.Linear(8, 2))
    >>> model(ts.ones((3, 4))).shape, list(model.parameters())
    ((3, 2), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    def __init__(self, *layers: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]]):
        one = layers[0] if len(layers) == 1 else None
        named = one.items() if isinstance(one, Mapping) else enumerate(layers)
        for name, layer in named:
            if isinstance(layer, (list, tuple)):
                raise unfit("Sequential", "a layer", layer, "give the layers one by one: *layers")
            key = str(name)
            if "." in key or hasattr(Module, key):
                raise unfit("Sequential", "a name", name, "give a name without dots of your own")
            setattr(self, key, function_of("Sequential", f"layer {key}", layer))
        self._others: tuple[str, ...] = ()  # attributes that are no layers

    def __setattr__(self, name: str, value: Any) -> None:
        others = self.__dict__.get("_others")
        mine = name in ("_others", "training")
        if others is not None and not mine and not isinstance(value, Module):
            if name not in self.__dict__:
                super().__setattr__("_others", (*others, name))
            elif name not in others and not callable(value):
                raise unfit("Sequential", f"layer {name}", value, "give a module or a function")
        super().__setattr__(name, value)

    @property
    def _layers(self) -> dict[str, Callable[[Any], Any]]:
        apart = {"_others", "training", *self._others}
        return {name: layer for name, layer in self.__dict__.items() if name not in apart}

    def __call__(self, x: Any) -> Any:
        for layer in self:
            x = layer(x)
        return x

    def __iter__(self) -> Iterator[Callable[[Any], Any]]:
        return iter(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return Sequential(dict(list(self._layers.items())[at]))
        return list(self)[at]

    def __setitem__(self, at: int, layer: Callable[[Any], Any]) -> None:
        name = list(self._layers)[at]
        setattr(self, name, function_of("Sequential", f"layer {name}", layer))


def functional_call(
    module: Module, params: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """`module(*args, **kwargs)` with the tensors of `params` in place of its own weights.

    `params` is a dict by the names of `state_dict()`, or a tuple of such dicts; other parameters
    and buffers are the module's own. `args` is a tuple, or the one argument. The module is
    unchanged afterwards, except for buffers of its own that it sets, such as running means. So
    gradients by `params` are those of a function of them (`torch.func.functional_call`). Raises
    UsageError if a name is unknown, or if the module sets a buffer that was given; ShapeError or
    DTypeError if a value does not fit.

    >>> import tessera as ts
    >>> layer = ts.nn.Linear(2, 1, bias=False)
    >>> ts.nn.functional_call(layer, {"weight": ts.ones((2, 1))}, ts.ones((1, 2))).item()
    2.0
    """
    caller = "functional_call"
    instance(caller, "module", module, Module, "give an nn.Module")
    given: dict[str, Any] = {}
    for part in params if isinstance(params, tuple) else (params,):
        mapping(caller, "params", part, "give a dict from names to tensors, as state_dict() does")
        given |= part
    fix = "several arguments go in one tuple: functional_call(module, params, (x, y))"
    mapping(caller, "kwargs", {} if kwargs is None else kwargs, fix)
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    fix = "give names that state_dict() has"
    same_names(caller, [], [str(n) for n in given if n not in own], fix)
    new: dict[int, tuple[str, Tensor]] = {}
    for name, value in given.items():
        t = as_tensor(value)
        alike(f"{caller}: {name!r}", own[name].type, t.type, "give a tensor of its shape")
        other, known = new.setdefault(id(own[name]), (name, t))
        if known is not t:
            raise UsageError(
                f"{caller}: {other!r} and {name!r} are one parameter",
                parameter=own[name].type,
                fix="give one of them",
            )
    swapped: list[tuple[str, Module, str, Any, Any]] = []
    try:
        for path, m in module.named_modules():
            for name, old in list(m.__dict__.items()):
                if any(id(t) in new for t in direct(old)):
                    put = m.__dict__[name] = _with(old, new)
                    swapped.append((f"{path}.{name}" if path else name, m, name, old, put))
        call = function_of(caller, "the module", module)
        out = call(*(args if isinstance(args, tuple) else (args,)), **(kwargs or {}))
        changed = [path for path, m, name, _, put in swapped if m.__dict__.get(name) is not put]
    finally:
        for _, m, name, old, _ in swapped:
            m.__dict__[name] = old
    if changed:
        raise UsageError(
            f"{caller}: {type(module).__name__} sets {changed[0]!r}, and the new value would be "
            "lost",
            set=", ".join(changed),
            fix="leave it out of params, then the module keeps it; or call module.eval() before",
        )
    return out


def _with(value: Any, new: Mapping[int, tuple[str, Tensor]]) -> Any:
    """`value`, with each tensor in it replaced by the one that `new` has for its id."""
    if isinstance(value, Tensor):
        return new[id(value)][1] if id(value) in new else value
    if isinstance(value, dict):
        return {k: _with(v, new) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        rows = [_with(v, new) for v in value]
        return type(value)(*rows) if hasattr(value, "_fields") else type(value)(rows)
    return value
