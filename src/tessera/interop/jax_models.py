"""Models of Flax, Equinox and Haiku, and trees of weights with a function, as modules.

A library's model becomes a `Form`: its arrays by their paths, and functions that call it with other
arrays and give it back. The module has the arrays as parameters and buffers, under their paths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..core.checks import unfit
from ..core.errors import UsageError
from ..core.value_checks import is_list
from ..lang.foreign.jax_program import Traced
from ..lang.foreign.jax_rules import rule
from ..lang.math import random
from ..lang.record.operands import as_tensor
from ..lang.record.parameter import Parameter
from ..lang.record.tree import Path, flatten, path_name, spec_paths, unflatten
from ..lang.value.engine import engine
from ..lang.value.host_data import is_array
from ..lang.value.tensor import Tensor
from ..nn.module import Module

CALLER = "from_jax_model"


class Leaf(NamedTuple):
    """An array of a model; `trained` ones that are floats become parameters."""

    path: Path
    value: Any
    trained: bool


class Form:
    """A model of a library: its `arrays` at first, `call(arrays, key, args, kwargs)`, which returns
    (result, new arrays, or None for those that stay), and `tree(arrays)`, the model with them.

    `key` has the data of a random key for each stream of random numbers, or is None.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        call: Callable[[list[Any], Any, Any, Any], tuple[Any, list[Any]]],
        tree: Callable[[Sequence[Any]], Any],
    ) -> None:
        found = [engine().key_data(x.value) for x in leaves]
        self.leaves = [x._replace(value=None) for x in leaves]
        self.arrays = [x for x, _ in found]
        self.impls = [impl for _, impl in found]  # of arrays of random keys
        self._tree = tree
        self.of = lambda arrays, key, args, kwargs: call(self.keyed(arrays), key, args, kwargs)
        self.traced = Traced(CALLER, self.of)

    def keyed(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays, with data of random keys as keys."""
        pairs = zip(arrays, self.impls, strict=True)
        return [engine().key_of(x, impl) if impl else x for x, impl in pairs]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """The model with these arrays, data of keys as keys."""
        return self._tree(self.keyed(arrays))


class JaxModel(Module):
    """A model of a JAX library, as made by `from_jax_model`.

    Parameters and buffers have their paths in the library as names. A call takes and returns trees
    of tensors, as `from_jax_function` does, and sets the state that the model changes.
    """

    def __init__(self, form: Form, read: Callable[..., Form], draws: int) -> None:
        # A function, which a recording of the module compares as one object.
        self._form: Callable[[], Form] = lambda: form
        self._read, self._draws = read, draws
        for leaf, array in zip(form.leaves, form.arrays, strict=True):
            value = as_tensor(array)
            if leaf.trained and value.dtype.is_float:
                value = Parameter(value)
            _put(self, leaf.path, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = random.randint((self._draws, 2), 0, 2**31 - 1).to("u32") if self._draws else None
        form = self._form()
        held = [_get(self, leaf.path) for leaf in form.leaves]
        now = [x.now() if isinstance(x, Parameter) else x for x in held]
        out, new = form.traced(now, key, args, kwargs)
        for leaf, value in zip(form.leaves, new, strict=True):
            if value is not None:
                _put(self, leaf.path, value)
        return out

    def jax_tree(self) -> Any:
        """The model in the library's own form, with these values as arrays of JAX: the `variables`
        of Flax (linen), a model of Flax (nnx) or Equinox, (params, state) or params of others."""
        form = self._form()
        held = [_get(self, leaf.path) for leaf in form.leaves]
        return form.tree([t.jax().reshape(t.shape) for t in held])

    def load_jax_tree(self, *tree: Any) -> None:
        """Sets all values from a model in the library's own form, as `jax_tree` returns it.

        Raises UsageError, ShapeError or DTypeError if it does not fit.
        """
        form = self._read(*tree)
        pairs = zip(form.leaves, form.arrays, strict=True)
        self.load_state_dict({path_name(leaf.path): as_tensor(x) for leaf, x in pairs})


def _put(module: Module, path: Path, value: Tensor) -> None:
    """Sets the tensor at `path`, and makes the dicts on the way there."""
    name, *rest = path
    if not rest:
        setattr(module, str(name), value)
        return
    holder: Any = module.__dict__.get(str(name))
    if holder is None:
        setattr(module, str(name), {})
        holder = module.__dict__[str(name)]
    for key in rest[:-1]:
        if key not in holder:
            holder[key] = {}
        holder = holder[key]
    holder[rest[-1]] = value


def _get(module: Module, path: Path) -> Any:
    name = str(path[0])
    adapted = isinstance(getattr(type(module), name, None), property)
    found: Any = getattr(module, name) if adapted else module.__dict__[name]
    for key in path[1:]:
        found = found[key]
    return found


# -- the libraries --------------------------------------------------------------------------------
def from_jax_model(
    model: Any, params: Any = None, state: Any = None, *, rngs: Sequence[str] = ()
) -> JaxModel:
    """A model of JAX as a module with its weights as parameters.

    - a module of `flax.linen`, with its `variables` as `params`: its other collections, such as
      `batch_stats`, are buffers, which a call sets;
    - a model of `flax.nnx` or Equinox, which holds its weights: all that is no `nnx.Param`, or no
      float, is a buffer;
    - a `Transformed` of Haiku with its `params`, and its `state` if it has one;
    - a function `apply(params, *args)`, or `apply(params, state, *args)`, which then returns
      (result, new state).

    `rngs` names the streams of random numbers for which each call draws a key from `ts.random`:
    `("dropout",)`. A linen module, and a function, gets them as its `rngs`, a function of Haiku the
    first as `rng`, a model of Equinox as `key`; a call may give its own instead. All other
    arguments of a call are the model's. Raises UsageError if `model` is none of these, or if one of
    the names of its weights is an attribute of modules.
    """
    if not is_list(rngs, lambda name: isinstance(name, str)):
        raise unfit(CALLER, "rngs", rngs, 'give names of streams, such as ("dropout",)')
    found = next((read for fits, read in _LIBRARIES if fits(model)), None)
    if found is None:
        raise unfit(CALLER, "the model", model, "give a model of Flax, Equinox or Haiku, or apply")

    def read(*tree: Any) -> Form:
        return found(model, rngs, *tree)

    form = read(params, state)
    for leaf in form.leaves:
        if hasattr(Module, str(leaf.path[0])):
            raise UsageError(
                f"{CALLER}: {leaf.path[0]!r} is an attribute of modules, not a name of a weight",
                weight=path_name(leaf.path),
                fix="rename it, or give the tree one level more: {'model': params}",
            )
    made = JaxModel(form, read, len(rngs))
    form.arrays = []  # the module has them
    return made


def _library(name: str, *classes: str) -> Callable[[Any], bool]:
    """Returns whether a value is of one of these classes of a library that was imported."""

    def fits(x: Any) -> bool:
        module = sys.modules.get(name)
        return module is not None and isinstance(x, tuple(getattr(module, c) for c in classes))

    return fits


def _named(tree: Any, trained: bool, prefix: Path = ()) -> tuple[list[Leaf], list[Any], Any]:
    """(The arrays of a tree with their paths, all leaves with None for arrays, the structure)."""
    leaves, spec = flatten(tree)
    at = [(*prefix, *p) or ("params",) for p in spec_paths(spec)]
    found = [Leaf(p, x, trained) for p, x in zip(at, leaves, strict=True) if is_array(x)]
    return found, [None if is_array(x) else x for x in leaves], spec


def _filled(fixed: Sequence[Any], arrays: Sequence[Any], spec: Any) -> Any:
    rest = iter(arrays)
    return unflatten(spec, [next(rest) if x is None else x for x in fixed])


def _of_linen(module: Any, rngs: Sequence[str], variables: Any, _: Any = None) -> Form:
    linen: Any = sys.modules["flax.linen"]
    if variables is None or not hasattr(variables, "items") or "params" not in variables:
        fix = "give those of module.init(key, x), with 'params' among them"
        raise unfit(CALLER, "the variables", variables, fix)
    given: Any = linen.meta.unbox(variables)
    plain = {k: _as_dict(v) for k, v in given.items()}
    parts = {k: _named(v, k == "params", () if k == "params" else (k,)) for k, v in plain.items()}
    changing = [k for k in parts if k != "params"]

    def tree(arrays: Sequence[Any]) -> dict[str, Any]:
        out, at = {}, 0
        for k, (leaves, fixed, spec) in parts.items():
            out[k] = _filled(fixed, arrays[at : at + len(leaves)], spec)
            at += len(leaves)
        return out

    def call(arrays: list[Any], key: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        if key is not None and "rngs" not in kwargs:
            kwargs = {**kwargs, "rngs": _streams(rngs, key)}
        out = module.apply(tree(arrays), *args, mutable=changing or False, **kwargs)
        if not changing:
            return out, [None] * len(arrays)
        out, new = out
        made = [[None] * len(leaves) if k == "params" else flatten(_as_dict(new[k]))[0]
                for k, (leaves, _, _) in parts.items()]  # fmt: skip
        return out, [x for part in made for x in part]

    return Form([x for leaves, _, _ in parts.values() for x in leaves], call, tree)


def _streams(rngs: Sequence[str], key: Any) -> dict[str, Any]:
    return {name: key[i] for i, name in enumerate(rngs)}


def _as_dict(tree: Any) -> Any:
    """Nested mappings as dicts."""
    return {k: _as_dict(v) for k, v in tree.items()} if hasattr(tree, "items") else tree


def _of_nnx(model: Any, rngs: Sequence[str], other: Any = None, _: Any = None) -> Form:
    nnx: Any = sys.modules["flax.nnx"]
    if rngs:
        fix = "leave rngs out: the model holds its random keys, which a call moves on"
        raise unfit(CALLER, "rngs of a model of nnx", rngs, fix)
    definition, state = nnx.split(model if other is None else other)
    rows = list(nnx.to_flat_state(state))
    leaves = [Leaf(path, v.get_value(), isinstance(v, nnx.Param)) for path, v in rows]

    def tree(arrays: Sequence[Any]) -> Any:
        new = [(path, v.replace(x)) for (path, v), x in zip(rows, arrays, strict=True)]
        return nnx.merge(definition, nnx.from_flat_state(new))

    def call(arrays: list[Any], key: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        m = tree(arrays)
        out = m(*args, **kwargs)
        after = dict(nnx.to_flat_state(nnx.state(m)))
        return out, [None if leaf.trained else after[leaf.path].get_value() for leaf in leaves]

    return Form(leaves, call, tree)


def _of_equinox(model: Any, rngs: Sequence[str], other: Any = None, _: Any = None) -> Form:
    leaves, fixed, spec = _named(model if other is None else other, True)

    def tree(arrays: Sequence[Any]) -> Any:
        return _filled(fixed, arrays, spec)

    def call(arrays: list[Any], key: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        if key is not None and "key" not in kwargs:
            kwargs = {**kwargs, "key": key[0]}
        return tree(arrays)(*args, **kwargs), [None] * len(arrays)

    return Form(leaves, call, tree)


def _of_apply(
    apply: Callable[..., Any], rngs: Sequence[str], params: Any, state: Any = None,
    takes_key: bool = False,
) -> Form:  # fmt: skip
    if params is None:
        raise unfit(CALLER, "params", params, "give the tree of weights beside the function")
    leaves, fixed, spec = _named(params, True)
    more, fixed_state, state_spec = _named(state, False, ("state",))
    count = len(leaves)

    def tree(arrays: Sequence[Any]) -> Any:
        weights = _filled(fixed, arrays[:count], spec)
        if state is None:
            return weights
        return weights, _filled(fixed_state, arrays[count:], state_spec)

    def call(arrays: list[Any], key: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        given = tree(arrays) if state is not None else (tree(arrays),)
        if takes_key:
            args = (kwargs.get("rng", None if key is None else key[0]), *args)
            kwargs = {k: v for k, v in kwargs.items() if k != "rng"}
        elif key is not None and "rngs" not in kwargs:
            kwargs = {**kwargs, "rngs": _streams(rngs, key)}
        out = apply(*given, *args, **kwargs)
        if state is None:
            return out, [None] * count
        out, new = out
        after = [x for x, f in zip(flatten(new)[0], fixed_state, strict=True) if f is None]
        return out, [*[None] * count, *after]

    return Form([*leaves, *more], call, tree)


def _of_haiku(model: Any, rngs: Sequence[str], params: Any, state: Any = None) -> Form:
    return _of_apply(model.apply, rngs, params, state, takes_key=True)


_LIBRARIES: list[tuple[Callable[[Any], bool], Callable[..., Form]]] = [
    (_library("flax.linen", "Module"), _of_linen),
    (_library("flax.nnx", "Module"), _of_nnx),
    (_library("equinox", "Module"), _of_equinox),
    (_library("haiku", "Transformed", "TransformedWithState"), _of_haiku),
    (callable, _of_apply),
]


def jax_rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a function the rule for primitives of JAX, by their names.

    The function gets the operands as tensors and the primitive's params by name, and returns a
    tensor, or a list of them where the primitive has several results. It replaces a rule of the
    same name.

    >>> import tessera as ts
    >>> @ts.interop.jax_rule("lgamma")
    ... def lgamma(x, **params):  # Stirling's series, for large x
    ...     return (x - 0.5) * ts.log(x) - x + 0.9189385 + 1 / (12 * x)
    """
    return rule(*names)
