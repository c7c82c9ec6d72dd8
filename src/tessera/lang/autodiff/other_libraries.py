"""Errors for PyTorch and JAX usage of a tensor, with the replacement to write.

They cover attributes of PyTorch tensors, functions of PyTorch, and functions that JAX compiles.
`jnp.asarray` works and returns an array with the same split. (NumPy's functions work too:
`lang/autodiff/numpy_functions.py`.)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from ...core.errors import EngineWarning, TesseraError, UsageError, lines_up
from ...core.peers import SPACES, fix_for, no_name
from ..value.engine import engine
from ..value.tensor import Tensor, method
from . import tape as tape  # Tensor.data, which cannot be set

SPACES["x"] = vars(Tensor).keys()  # a live view: methods installed later count too


@method("__getattr__")
def _no_attribute(x: Tensor, name: str) -> Any:
    if hasattr(type(x), name):  # a property raised AttributeError: raise that error again
        return object.__getattribute__(x, name)
    shown = [("tensor", x.__dict__["type"])] if "type" in x.__dict__ else []
    raise no_name(f"{type(x).__name__!r} object", "Tensor", name, SPACES["x"], shown)


class _NotSet:
    """An attribute that PyTorch users set, and that would have no effect here: setting it raises
    UsageError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, x: Tensor | None, owner: type) -> Any:
        raise AttributeError(self.name)  # `_no_attribute` names the replacement

    def __set__(self, x: Tensor, value: object) -> None:
        raise UsageError(
            f"{type(x).__name__}.{self.name} cannot be set",
            tensor=x.type,
            fix=fix_for("set", self.name),
        )


for _name in ("data", "grad", "requires_grad", "shape", "dtype"):
    _not_set, _read = _NotSet(_name), vars(Tensor).get(_name)
    setattr(Tensor, _name, _not_set if _read is None else _read.setter(_not_set.__set__))


def _for_torch(kind: type, f: Any, types: Any, args: tuple[Any, ...] = (), how: Any = None) -> Any:
    rows = [a if isinstance(a, (list, tuple)) else (a,) for a in (*args, *(how or {}).values())]
    given = [a for row in rows for a in row if isinstance(a, Tensor)]
    if not given:
        return NotImplemented
    raise UsageError(
        f"torch.{getattr(f, '__name__', f)} does not compute with a Tensor of Tessera",
        tensor=given[0].type,
        fix="use a function of ts or nn, or the value, without a gradient: torch.as_tensor(x)",
    )


Tensor.__torch_function__ = classmethod(_for_torch)  # type: ignore[attr-defined]


def _for_jax(x: Tensor) -> Callable[[], Any]:
    """`__jax_array__`, which JAX reads before it takes a value. Raises AttributeError for the
    operators of `jax.Array`, which work without it, and TesseraError inside a function of JAX."""
    library = engine().asks(sys._getframe(1))
    if x._trace is not None:
        why, way = "take a tensor of a recorded function", "; instead of optax.apply_updates:"
        way += " jax.tree.map(lambda p, u: p + u, params, updates)"
    elif library == "compiled":
        why, way = "compute with a Tensor of Tessera", "; jnp.asarray(x) is the value alone"
    elif library == "array" and x.type.split_axes:
        return lambda: _array_of_jax(x)
    else:
        raise AttributeError("__jax_array__")
    raise TesseraError(  # not a TypeError, which JAX would replace by one of its own
        f"a function of JAX does not {why}",
        tensor=x.type,
        fix="use functions of ts; ts.op makes an op of a JAX function, optim.from_optax(tx) an"
        f" optimizer of one of optax{way}",
    )


def _array_of_jax(x: Tensor) -> Any:
    """Returns a copy of a split tensor as a JAX array with the same split. If JAX has no such
    layout, as for ZeRO or on a folded mesh, returns the whole value with an EngineWarning."""
    data = engine().alive(x.stored, x.type)
    if engine().adopt(data, None) == x.type:
        return data.copy()
    warnings.warn(
        f"jnp.asarray: no array of JAX has the layout of {x.type}, so it is whole on one device\n"
        "  fix : jax.tree.map(lambda p, u: p + u, params, updates) instead of optax.apply_updates"
        " keeps layouts, as optim.from_optax(tx) does; x.numpy() is the whole without this warning",
        EngineWarning,
        stacklevel=lines_up(),
    )
    return x.numpy()


Tensor.__jax_array__ = property(_for_jax)  # type: ignore[attr-defined]
