"""Rules for PyTorch's ops on functions: conditions, loops, checkpoints, contexts.

A function among the operands takes a list of arguments and returns a list of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core.dtypes import bf16
from ...lang.autodiff.branches import cond
from ...lang.autodiff.regions import chosen, region
from ...lang.autodiff.scan import scan
from ...lang.autodiff.while_loop import while_loop
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
    """A region that the gradient computes again, as PyTorch does."""
    return list(region("checkpoint", lambda: body(args), *chosen("checkpoint", "nothing")))


@rule("cond")
def _cond(which: Any, then: Body, other: Body, operands: Sequence[Any] = ()) -> list[Any]:
    pick = which.reshape(()) if isinstance(which, Tensor) else bool(which)
    return list(cond(pick, then, other, list(operands)))


@rule("while_loop")
def _while(
    goes_on: Body, body: Body, carried: Sequence[Any], more: Sequence[Any] = ()
) -> list[Any]:
    start = [as_tensor(x) for x in carried]

    def condition(values: Sequence[Any]) -> Any:
        return goes_on([*values, *more])[0].reshape(())

    end: Sequence[Any] = while_loop(condition, lambda values: body([*values, *more]), start)
    return list(end)


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
