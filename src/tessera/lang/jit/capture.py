"""`graph.capture`: runs of a compiled call again, without recording or compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

from ...core.checks import shown
from ...core.declared import Called
from ...core.errors import UsageError
from ...core.layout import TensorType
from ...ir.graph.node import Graph
from ..record.operands import as_tensor, type_like
from ..record.recorder import current
from ..record.tree import call_paths, flatten, path_name
from ..value.checks import bound, signature_of
from ..value.host_data import is_array
from ..value.tensor import Tensor
from .jit import Jit

R = TypeVar("R")


class Capture(Generic[R]):
    """A function compiled for exactly the arguments of its capture, for replays."""

    def __init__(self, fn: Callable[..., R], args: Any, kwargs: Any) -> None:
        self._jit: Jit[..., R] = Jit(getattr(fn, "fn", fn), (), True)
        if isinstance(fn, Jit):
            self._jit.chosen = fn.chosen
        self._signature = signature_of("capture", self._jit.fn)
        args, kwargs = self._arguments = self._placed(args, kwargs)
        #: The function's result of the capture.
        self.result: R = self._jit.at_once(*args, **kwargs)
        if not self._jit.programs:
            raise UsageError(
                f"capture: {self._jit.name} reads a value, so it is no single program",
                fix="return the value and read it outside, or use ts.where; or use ts.jit",
            )
        self._leaves, self._spec = flatten(self._arguments)

    def replay(self, *args: Any, **kwargs: Any) -> R:
        """Runs the program on arguments of the same types; without any, on those of the capture. An
        array may stand for a tensor of its type.

        Raises UsageError, which lists all arguments that differ.
        """
        if not args and not kwargs:
            args, kwargs = self._arguments
        args, kwargs = self._placed(args, kwargs)
        leaves, spec = flatten((args, kwargs))
        if spec != self._spec:
            raise UsageError(
                f"capture: {self._jit.name} was captured with other arguments",
                captured=_shown(self._leaves),
                given=_shown(leaves),
                fix="give as many, in the same containers; or capture it anew",
            )
        names = call_paths(self._signature, spec)
        wrong = [
            (path_name(path), f"captured {_kind(a, b)}, given {_kind(b, a)}")
            for path, a, b in zip(names, self._leaves, leaves, strict=True)
            if not _same(a, b)
        ]
        if wrong:
            raise UsageError(
                f"capture: {self._jit.name} was captured with other types of arguments",
                rows=wrong,
                fix="give tensors of the types captured, or capture it anew",
            )
        return self._jit(*args, **kwargs)

    def _placed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments by position, whether they are given by position or by name, with
        tensors in place of arrays."""
        given = bound(self._jit.name, self._signature, args, kwargs)
        return _as_tensors(given.args), _as_tensors(given.kwargs)

    __call__ = replay

    @property
    def compiled(self) -> Jit[..., R]:
        """The compiled function (`ts.jit`) of the replays."""
        return self._jit

    @property
    def graph(self) -> Graph:
        """The graph of the program."""
        return self._jit.graph

    @property
    def text(self) -> str:
        """The graph as text."""
        return self.graph.text


def _as_tensors(x: Any) -> Any:
    """Returns `x` with tensors in place of arrays in dicts, lists and tuples: a replay needs the
    same structure for both."""
    if is_array(x):
        return as_tensor(x)
    if type(x) is dict:
        return {k: _as_tensors(v) for k, v in x.items()}
    return type(x)(map(_as_tensors, x)) if type(x) in (list, tuple) else x


def _type(x: Any) -> TensorType | None:
    known = isinstance(x, Tensor) or hasattr(x, "__array_interface__") or is_array(x)
    return type_like(x) if known else None


def _same(a: Any, b: Any) -> bool:
    have, got = _type(a), _type(b)
    if have is not None or got is not None:
        return have is got
    return type(a) is type(b) and bool(a == b)


def _kind(x: Any, other: Any = None) -> str:
    """Returns `x` in a few words; with its mesh if the type of `other` differs in nothing else."""
    t, that = _type(x), _type(other)
    if t is None:
        return shown(x)
    if that is None or str(that) != str(t):
        return str(t)
    return f"{t} on {t.mesh.text_beside(that.mesh) if t.mesh is not None else 'no mesh'}"


def _shown(leaves: list[Any]) -> str:
    return ", ".join(map(_kind, leaves)) or "nothing"


def capture(fn: Annotated[Callable[..., R], Called()], *args: Any, **kwargs: Any) -> Capture[R]:
    """Runs `fn(*args, **kwargs)` once and keeps its program for replays (guide 5, traces).

    A replay takes arguments of exactly the same types, so it compiles nothing. Values that the
    function reads from outside, such as weights, are read again at each replay. Raises UsageError
    if `fn` reads a value on the host, or inside of a recorded function.
    """
    if current() is not None:
        raise UsageError(
            "capture: a function is being recorded here already",
            fix="capture outside of ts.jit and its like",
        )
    return Capture(fn, args, kwargs)
