"""`ts.remat`: a function or module whose values the backward pass computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar, cast

from ..core.tracebacks import boundary
from ..ir.graph.node import Node
from ..lang.autodiff.regions import Chosen, chosen, region
from ..lang.record.parameter import Parameter
from ..lang.record.tree import flatten, unflatten
from ..lang.value.checks import asked_function
from ..lang.value.tensor import Tensor
from .module import Module
from .module_state import changed_tensors, set_tensors, values_of

F = TypeVar("F", bound=Callable[..., Any])


def remat(fn: F, policy: str | Callable[[Node], bool] = "nothing") -> F:
    """`fn`, a function of tensors or a module, whose values the backward pass computes again.

    Between the two passes only the arguments of a call stay in memory, and the tensors that `fn`
    reads from outside, and what `policy` saves:

    - "nothing": nothing else, except values that are marked by `ts.save_for_backward`.
    - "dots": also the results of matrix products, of convolutions and of loops.
    - "everything": the values that the gradient reads, or the fewest bytes from which they follow
      elementwise.
    - "offload": the results of "dots", in the memory of the host until the gradient needs them. On
      a CPU, which has one memory, that is "dots".
    - a function: also the results of the operations for which it returns True. It gets a
      `graph.Node`, which has `op`, `type`, `args`, `flops`, `scope` and `loc`.

    The values, the random numbers and the gradients are those of `fn`. A call records one region of
    the program: the second computation starts after a gradient of its results exists, so the
    compiler does not merge it with the first. For a module, the result is a module of the same
    class with the same parameters, names and state. `fn` returns a tree of tensors. Raises
    UsageError if `policy` has another value or `fn` cannot be called.

    >>> import tessera as ts
    >>> block = ts.remat(lambda x, w: ts.tanh(x @ w) @ w, policy=lambda n: n.op == "tanh")
    >>> x, w = ts.ones((2, 3)), ts.ones((3, 3))
    >>> ts.grad(ts.sum(block(x, w)), w).shape
    (3, 3)
    """
    how = chosen("remat", policy)
    module: Any = fn
    if isinstance(module, Module):
        made, kind = copy(module), cast(Any, type(module))
        object.__setattr__(made, "__class__", recomputing(kind, how))
        return cast(F, made)
    name = getattr(fn, "__name__", "function")
    asked_function("remat", "the function", fn)

    @boundary
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return region(name, lambda: fn(*args, **kwargs), *how)

    return run  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def recomputing(kind: Any, how: Chosen) -> Any:
    """A subclass of the module class `kind` with the same name, whose calls are regions."""

    class Recomputing(kind):  # type: ignore[misc]
        def __reduce__(self) -> Any:
            return _revived, (bare(kind), how), self.__dict__

        recomputed = kind, how

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten(self)
        state = any(isinstance(x, Tensor) and not isinstance(x, Parameter) for x in leaves)
        written: list[Any] = []

        def run() -> Any:
            inner = unflatten(spec, leaves) if state else self
            before = values_of(inner) if state else []
            out = kind.__call__(inner, *args, **kwargs)
            found = changed_tensors("remat", inner, before) if state else {}
            written[:] = found
            return out, tuple(found.values())

        out, new = region(kind.__name__.lower(), run, *how)
        set_tensors(self, zip(written, new, strict=True))
        return out

    Recomputing.__name__, Recomputing.__qualname__ = kind.__name__, kind.__qualname__
    Recomputing.__module__, Recomputing.__doc__ = kind.__module__, kind.__doc__
    Recomputing.__call__ = functools.wraps(kind.__call__)(call)
    return Recomputing


def _revived(of: Module, how: Chosen) -> Any:
    kind: Any = type(of)
    return bare(recomputing(kind, how))


def bare(kind: Any) -> Any:
    """A module of class `kind` without attributes: pickle writes a class that was made here by what
    it was made of."""
    return object.__new__(kind)
