"""Rules for PyTorch's ops on functions: conditions, loops, checkpoints, contexts.

A function among the operands takes a list of arguments and returns a list of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core.dtypes import bf16
from ...lang.autodiff.scan import scan
from ...lang.autodiff.while_loop import while_loop
from ...lang.math import functions as F
from ...lang.math.elementwise import stop_gradient
from ...lang.record.contexts import autocast
from ...lang.record.operands import as_tensor
from ...lang.value.tensor import Tensor
from .table import rule

Body = Callable[[Sequence[Any]], list[Any]]


@rule("wrap_with_set_grad_enabled")
def _with_gradient(enabled: bool, body: Body, *args: Any) -> list[Any]:
    found = body(args)
    return found if enabled else [stop_gradient(x) if isinstance(x, Tensor) else x for x in found]


@rule("wrap_with_autocast")
def _with_autocast(
    device: str, dtype: Any, enabled: bool, cache: bool, body: Body, *args: Any
) -> list[Any]:
    with autocast(dtype or bf16, enabled=enabled):
        return body(args)


@rule("tag_activation_checkpoint", "wrap_activation_checkpoint")
def _checkpoint(body: Body, *args: Any, **options: Any) -> list[Any]:
    """The plan of memory decides what is computed again."""
    return body(args)


@rule("cond")
def _cond(chosen: Any, then: Body, other: Body, operands: Sequence[Any] = ()) -> list[Any]:
    """Both sides are computed, if which one counts is a value of the program."""
    if not isinstance(chosen, Tensor):
        return (then if chosen else other)(operands)
    pick = chosen.reshape(())
    pairs = zip(then(operands), other(operands), strict=True)
    return [a if a is None else F.where(pick, a, b) for a, b in pairs]


@rule("while_loop")
def _while(
    goes_on: Body, body: Body, carried: Sequence[Any], more: Sequence[Any] = ()
) -> list[Any]:
    start = [as_tensor(x) for x in carried]

    def condition(values: Sequence[Any]) -> Any:
        return goes_on([*values, *more])[0].reshape(())

    return list(while_loop(condition, lambda values: body([*values, *more]), start))


@rule("scan")
def _scan(
    body: Body, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()
) -> list[Any]:
    n = len(init)

    def step(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = body([*carry, *rows, *more])
        return found[:n], found[n:]

    last, stacked = scan(step, list(init), list(xs))
    return [*last, *stacked]
