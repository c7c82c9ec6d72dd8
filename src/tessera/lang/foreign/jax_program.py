"""JAX functions on tensors: traced for the types of a call, and played by the rules.

>>> import jax.numpy as jnp, tessera as ts
>>> f = ts.from_jax_function(lambda x, y: {"sum": jnp.tanh(x) + y})
>>> f(ts.tensor([0.0, 0.5]), 2)["sum"].numpy().round(3).astype(str).tolist()
['2.0', '2.462']
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from ...core.tracebacks import boundary
from ..record.operands import as_tensor
from ..record.tree import Spec, flatten, unflatten
from ..value.checks import asked_function
from ..value.engine import engine
from ..value.host_data import is_array
from ..value.tensor import Tensor
from . import jax_rules_control as jax_rules_control
from . import jax_rules_elementwise as jax_rules_elementwise
from . import jax_rules_index as jax_rules_index
from . import jax_rules_product as jax_rules_product
from . import jax_rules_reduce as jax_rules_reduce
from . import jax_rules_shape as jax_rules_shape
from .jax_rules import RULES, tensor
from .program import Program, play

KEPT = 64  # programs of a function, one for each structure and types of arguments


def as_ops(caller: str, fn: Callable[..., list[Any]], args: Sequence[Tensor]) -> list[Tensor]:
    """The results of the JAX function `fn`, which returns a list of arrays, on tensors.

    Raises UsageError, in the name of `caller`, if the function has a primitive without a rule.
    """
    types = [(t.shape, t.dtype.numpy, "") for t in args]
    program = engine().program_of(caller, fn, types)
    return list(map(tensor, play(program, args, RULES, caller)))


def from_jax_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a function of JAX arrays, as a function of tensors.

    Its arguments and results are trees of tensors; Python numbers, strings and other objects among
    the arguments are given to `fn` as they are. `fn` is traced once for each combination of them
    and of the shapes and dtypes of tensors; its operations become ops, so that the function has
    gradients, is recorded by `ts.jit`, and takes tensors in any layout, which the results follow. A
    gradient rule of `jax.custom_vjp` or `jax.custom_jvp` is kept. A random key is its data, u32
    [2], and draws the numbers of JAX. Shardings are left out; 64-bit dtypes become those of 32
    bits. Raises UsageError if `fn` fails for these arguments or has an operation without a rule.
    """
    fn = asked_function("from_jax_function", "the function", fn)
    traced = Traced("from_jax_function", fn)

    @boundary
    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs)

    return run


class _Kept(NamedTuple):
    """A traced function, and the structure of its results."""

    program: Program
    spec: Spec


class Traced:
    """A JAX function with its programs by the structure and types of its arguments."""

    def __init__(self, caller: str, fn: Callable[..., Any]) -> None:
        self.caller, self.fn = caller, fn
        self.kept: dict[Hashable, _Kept] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        given: list[Tensor] = []
        types: list[Any] = []
        fixed: list[Any] = []  # what is no array, and None for each that is
        for x in leaves:
            if not isinstance(x, Tensor) and not is_array(x):
                fixed.append((type(x), x))
                continue
            data, impl = (x, "") if isinstance(x, Tensor) else engine().key_data(x)
            t = as_tensor(data)
            given.append(t)
            types.append((t.shape, t.dtype.numpy, impl))
            fixed.append(None)
        kept = self._program(spec, types, fixed)
        outs = play(kept.program, given, RULES, self.caller)
        return unflatten(kept.spec, map(tensor, outs))

    def _program(self, spec: Spec, types: list[Any], fixed: list[Any]) -> _Kept:
        shapes = tuple((shape[: len(shape) - bool(impl)], str(d), impl) for shape, d, impl in types)
        key = (spec, shapes, tuple(fixed))
        try:
            found = self.kept.get(key)
        except TypeError:  # an argument that cannot be compared: traced at each call
            return self._trace(spec, types, fixed)
        if found is None:
            found = self._trace(spec, types, fixed)
            if len(self.kept) >= KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = found
        return found

    def _trace(self, spec: Spec, types: list[Any], fixed: list[Any]) -> _Kept:
        found: list[Spec] = []

        def flat(*arrays: Any) -> list[Any]:
            rest = iter(arrays)
            leaves = [next(rest) if x is None else x[1] for x in fixed]
            args, kwargs = unflatten(spec, leaves)
            outs, out_spec = flatten(self.fn(*args, **kwargs))
            found[:] = [out_spec]
            return outs

        program = engine().program_of(self.caller, flat, types)
        return _Kept(program, found[0])
