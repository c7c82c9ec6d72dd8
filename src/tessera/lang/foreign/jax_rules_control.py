"""Rules for JAX's loops, branches, recomputation, own gradients, and random bits.

The shards that a program asks of its loops and branches are those that their ops give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..autodiff.branches import cond, switch
from ..autodiff.custom import custom_gradient
from ..autodiff.regions import chosen, region
from ..autodiff.scan import scan
from ..autodiff.while_loop import while_loop
from ..math import functions as F
from ..record.operands import scalar
from ..value.tensor import Tensor
from .jax_rules import rule, tensor

Body = Callable[[list[Any]], list[Any]]


@rule("scan")
def _scan(
    *args: Tensor, jaxpr: Body, length: int, reverse: bool, num_consts: int, num_carry: int
) -> list[Tensor]:
    consts, start = args[:num_consts], list(args[num_consts : num_consts + num_carry])
    rows = list(args[num_consts + num_carry :])

    def step(carry: list[Tensor], row: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        out = list(map(tensor, jaxpr([*consts, *carry, *(row if rows else ())])))
        return out[:num_carry], out[num_carry:]

    ends, ys = scan(step, start, rows or [F.arange(length)], reverse=bool(reverse))
    return [*ends, *ys]


@rule("while")
def _while(
    *args: Tensor, cond_jaxpr: Body, body_jaxpr: Body, cond_nconsts: int, body_nconsts: int,
    **_: Any,
) -> list[Tensor]:  # fmt: skip
    of_cond, rest = args[:cond_nconsts], args[cond_nconsts:]
    of_body, start = rest[:body_nconsts], list(rest[body_nconsts:])
    out = while_loop(
        lambda v: tensor(cond_jaxpr([*of_cond, *v])[0]),
        lambda v: list(map(tensor, body_jaxpr([*of_body, *v]))),
        start,
    )
    return list(out)


@rule("cond")
def _branches(which: Tensor, *args: Tensor, branches: Any, **_: Any) -> list[Tensor]:
    calls = [lambda *xs, b=branch: list(map(tensor, b(list(xs)))) for branch in branches]
    if which.dtype.kind == "bool":
        return cond(which, calls[1], calls[0], *args)  # type: ignore[no-any-return]
    return switch(which, calls, *args)  # type: ignore[no-any-return]


@rule("remat2")
def _again(*args: Tensor, jaxpr: Body, policy: str) -> list[Tensor]:
    how = chosen("checkpoint", _POLICIES.get(policy, "nothing"))
    out: list[Tensor] = region("checkpoint", lambda: list(map(tensor, jaxpr(list(args)))), *how)
    return out


# By the names of JAX's functions; one of a user gets equations of JAX, so it is left out.
_POLICIES = {
    "everything_saveable": "everything",
    "dots_saveable": "dots",
    "checkpoint_dots": "dots",
    "dots_with_no_batch_dims_saveable": "dots",
    "checkpoint_dots_with_no_batch_dims": "dots",
}


@rule("custom_gradient")
def _custom(*args: Tensor, backward: Body, smooth: Any, values: int) -> tuple[Tensor, ...]:
    """Values with the gradient of JAX's rule by the arguments `smooth`."""
    outs, xs = args[:values], args[values:]

    @custom_gradient
    def jax_function(*floats: Tensor) -> tuple[Any, Callable[..., Any]]:
        def pull(g: Any) -> tuple[Any, ...]:
            given = list(xs)
            for i, x in zip(smooth, floats, strict=True):
                given[i] = x
            return tuple(map(tensor, backward([*given, *g])))

        return tuple(outs), pull

    return jax_function(*(xs[i] for i in smooth))  # type: ignore[no-any-return]


# -- random bits ----------------------------------------------------------------------------------
_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


@rule("threefry2x32")
def _threefry(k1: Tensor, k2: Tensor, x1: Tensor, x2: Tensor, **_: Any) -> list[Tensor]:
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011): the numbers of JAX."""
    keys = (k1, k2, k1 ^ k2 ^ scalar(0x1BD11BDA, k1.dtype))
    x1, x2 = x1 + k1, x2 + k2
    for i in range(5):
        for turn in _TURNS[i % 2]:
            x1 = x1 + x2
            x2 = x1 ^ ((x2 << turn) | (x2 >> (32 - turn)))
        x1 = x1 + keys[(i + 1) % 3]
        x2 = x2 + keys[(i + 2) % 3] + scalar(i + 1, k1.dtype)
    return [x1, x2]
