"""`while_loop`: a loop whose number of iterations depends on its values.

It is a loop of lang/autodiff/iteration.py that carries its condition beside the user's values, and
stacks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...core.dtypes import bool_
from ...core.errors import ShapeError, UsageError
from ..math.functions import relayout
from ..record.operands import as_tensor
from ..record.tree import Spec, fitted, flatten, unflatten
from ..value.checks import asked_function
from ..value.tensor import Tensor
from .iteration import emitted, settled, tensors

C = TypeVar("C")


def while_loop(cond: Callable[[C], Any], body: Callable[[C], C], init: C) -> C:
    """Runs `value = body(value)` from `init` on as long as `cond(value)`, as `jax.lax.while_loop`.

    `init` and the results of `body` are trees of tensors of one structure, with the same shapes and
    dtypes; `cond` returns one bool. Both may use tensors from outside. Returns the first value for
    which `cond` is false. The devices of a mesh iterate together; in a local body each iterates by
    its own bool, and then the loop has no collectives. It has no gradient, as the number of
    iterations is unknown: `ts.scan` over the most iterations has one.

    Raises UsageError if `cond` or `body` is no function, draws random numbers, or shows a value;
    ShapeError if `cond` does not return one bool, or `body` changes a shape, a dtype or the
    structure; GraphError if a gradient of the result is taken.

    >>> import tessera as ts
    >>> collatz = lambda x: ts.where(x % 2 == 0, x // 2, 3 * x + 1)
    >>> n, steps = ts.while_loop(lambda v: v[0] != 1, lambda v: (collatz(v[0]), v[1] + 1),
    ...                          (ts.tensor(27), ts.tensor(0)))
    >>> steps.item()
    111
    """
    cond = asked_function("while_loop", "the condition", cond)
    body = asked_function("while_loop", "the body", body)
    start, spec = tensors(init)

    def one_iteration(
        carry: Sequence[Tensor], _: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[()]]:
        ends, new_spec = tensors(body(unflatten(spec, carry[1:])))
        ends = fitted(
            "while_loop: the body gives other shapes, dtypes or another structure than it takes",
            ("takes", "gives"), spec, carry[1:], new_spec, ends,
            "return values like those that came in, e.g. x.to(ts.f32) where a dtype differs",
        )  # fmt: skip
        return (_goes_on(cond, spec, ends), *ends), ()

    every = [_goes_on(cond, spec, start), *start]
    carry_spec = flatten(tuple(every))[1]
    iteration = settled("while_loop", one_iteration, carry_spec, every, (), decides=True)
    r = iteration.recorder
    for wrong, problem, fix in (
        (r.draws or r.key, "draws random numbers",
         "draw them before the loop, or use ts.scan over a number of turns"),
        (r.host_outputs, "shows or records a value",
         "carry the value out of the loop, or use ts.scan over a number of turns"),
    ):  # fmt: skip
        if wrong:
            raise UsageError(f"while_loop: its body or condition {problem}", fix=fix)
    ends, _, _ = emitted(iteration, every, (), None, False, "save")
    return unflatten(spec, ends[1:])  # type: ignore[no-any-return]


def _goes_on(cond: Callable[[Any], Any], spec: Spec, values: Sequence[Tensor]) -> Tensor:
    """Returns the complete bool of `cond`. Raises ShapeError if it is not one bool."""
    said = cond(unflatten(spec, values))
    go = as_tensor(said)
    if go.dtype is not bool_ or go.shape:
        raise ShapeError(
            "while_loop: the condition is not one bool",
            gave=go.type,
            fix="compare, and join several with ts.all or ts.any",
        )
    return relayout(go, go.type.complete())
