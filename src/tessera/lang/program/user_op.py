"""`ts.op`: a user's JAX function as an op, with an index string for its splits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ...core.checks import function_of, string, unfit, whole
from ...core.contexts import above
from ...core.dtypes import DType, dtype_of
from ...core.errors import ShapeError, UsageError
from ...core.tracebacks import boundary
from ...ops.user import Groups, add_function, parse_groups
from ..jit.guards import variables
from ..record.operands import as_tensor, emit, emit_many
from ..record.recorder import current
from ..record.variables import mark_of
from ..value.checks import bound, signature_of

__all__ = ["UserOp", "user_op"]


class UserOp:
    """A user's JAX function as a function on tensors, made by `ts.op`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        grad: Callable[..., Any] | None,
        name: str,
        groups: Groups,
        dtypes: tuple[DType | None, ...],
        told: dict[str, Any],
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        code = getattr(fn, "__code__", None)
        at = f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else ""
        name = name or getattr(fn, "__name__", "user")
        self._function = add_function(name, fn, grad, at)
        self._groups, self._dtypes, self._told = groups, dtypes, told
        self._last_variables: dict[Any, Any] | None = None  # the outer variables of its functions
        self._changes = 0

    def __repr__(self) -> str:
        return f"<op {self._function.name}: {self._groups.text()}>"

    @boundary
    def __call__(self, *xs: Any, **named: Any) -> Any:
        name = self._function.name
        if named:
            fn = self._function.fn
            bound_args = bound(name, signature_of(name, fn), xs, named)
            if bound_args.kwargs:
                raise UsageError(
                    f"{name}: {next(iter(bound_args.kwargs))} is no argument of its index",
                    index=self._groups.text(),
                    fix="give one tensor per group; the function reads what else it needs from"
                    " around it, or has it from functools.partial",
                )
            xs = bound_args.args
        if len(xs) != len(self._groups.args):
            raise ShapeError(
                f"{name}: {len(xs)} arguments for the {len(self._groups.args)} of its index",
                index=self._groups.text(),
                fix="give one tensor per group",
            )
        ts = [as_tensor(x, name=name) for x in xs]
        dtypes = tuple(d or ts[0].dtype for d in self._dtypes)
        attrs = {"name": name, "index": self._groups.text(), "dtypes": dtypes, **self._told}
        if current() is None and (turn := self._change_count()):
            attrs["turn"] = turn
        results = (
            emit_many("user", *ts, **attrs) if len(dtypes) > 1 else [emit("user", *ts, **attrs)]
        )
        return tuple(results) if len(results) > 1 else results[0]

    def _change_count(self) -> int:
        """The number of changes of the functions' outer variables between eager calls. Eager
        programs have these variables as constants, so the number is part of their cache key.
        (`ts.jit` compares the variables itself.)"""
        functions = [f for f in (self._function.fn, self._function.grad) if f is not None]
        found = {p.name: mark_of(p.now()) for p in variables(functions)}
        if found != self._last_variables:
            self._changes += self._last_variables is not None
            self._last_variables = found
        return self._changes


def user_op(
    index: str,
    *,
    whole: str = "",
    reduces: str | None = None,
    dtype: Any = None,
    sizes: Mapping[str, int] | None = None,
    grad: Callable[..., Any] | None = None,
    flops: int | None = None,
    name: str = "",
) -> Callable[[Callable[..., Any]], UserOp]:
    """A decorator that makes an op of a JAX function: `@ts.op(index="b s d, d -> b s d")`.

    The function gets jax arrays (on a mesh: one device's blocks) and returns an array, or a tuple
    if the index names several results. A letter that every result has may be split over devices as
    the arguments are split. A letter that a result lacks is reduced, so its dim is gathered first,
    unless `reduces="sum"` says that the results of blocks add up.

    - `whole` lists further letters that must not be split.
    - `dtype` is the dtype of the results (a tuple for several); default: that of the first
      argument.
    - `sizes` gives the sizes of letters that no argument has.
    - `grad(g, *args)` is a JAX function that returns one gradient per argument (None: zero);
      default: `jax.vjp` of the function.
    - `flops` counts one call on whole arrays; default: one per point of all letters, two if some
      are reduced.
    - `name` names the op in graphs; the parser and the NumPy oracle find it by this name only.

    Raises UsageError if an option is unknown or names a letter that the index does not have,
    ShapeError if the arguments of a call do not fit the index, DTypeError if `dtype` does not
    exist.
    """
    string("op", "name", name)
    caller = name or "op"
    if not isinstance(whole, str):
        raise unfit(caller, "whole", whole, "give letters")
    if reduces not in (None, "sum"):
        raise unfit(
            caller,
            "reduces",
            reduces,
            '"sum" where the results of blocks add up, None where they do not',
        )
    fresh = _fresh(caller, sizes)
    groups = parse_groups(caller, index, dict(fresh))
    letters = {k for side in (groups.args, groups.outs) for g in side for k in g}
    lost = [k for k in _words(whole) if k not in letters]
    if lost:
        raise UsageError(
            f"{caller}: whole names {lost[0]!r}, which is no letter of {index!r}",
            fix="list letters of the index",
        )
    result_dtypes = dtype if isinstance(dtype, (tuple, list)) else (dtype,) * len(groups.outs)
    if len(result_dtypes) != len(groups.outs):
        raise UsageError(
            f"{caller}: {len(result_dtypes)} dtypes for {len(groups.outs)} results",
            fix="give one dtype, or one per result",
        )
    if grad is not None:
        function_of(caller, "grad", grad)
    dtypes = tuple(None if d is None else dtype_of(d) for d in result_dtypes)
    told = {
        "whole": tuple(_words(whole)),
        "reduces": reduces,
        "sizes": fresh,
        "flops": None if flops is None else _count(caller, flops),
    }
    told = {k: v for k, v in told.items() if v not in (None, ())}

    def decorate(fn: Callable[..., Any]) -> UserOp:
        return UserOp(function_of(caller, "the function", fn), grad, name, groups, dtypes, told)

    return above("ts.op", decorate)


def _words(letters: str) -> list[str]:
    rest = letters.replace("...", " ")
    return [*(["..."] if "..." in letters else []), *(k for k in rest if k.isalpha())]


def _count(caller: str, flops: object) -> int:
    return whole(caller, "flops", flops, 0)


def _fresh(caller: str, sizes: object) -> tuple[tuple[str, int], ...]:
    if sizes is None:
        return ()
    if not isinstance(sizes, Mapping) or not all(isinstance(k, str) and len(k) == 1 for k in sizes):
        raise unfit(caller, "sizes", sizes, 'give sizes of letters, e.g. {"k": 4}')
    return tuple((k, whole(caller, f"the size of {k!r}", n, 1)) for k, n in sizes.items())
