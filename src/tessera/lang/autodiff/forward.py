"""Forward-mode derivatives: `ts.jvp`, computed as the gradient of a gradient.

The first gradient is linear in its cotangent, so its gradient by the cotangent is the jvp. A user's
backward function that is not linear raises GraphError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...core.checks import instance
from ...core.errors import GraphError
from ...ir.graph.node import Graph, Node, reachable
from ...ops.control import item, scan
from ...ops.create import full
from ...ops.custom import custom
from ...ops.elementwise import stop_gradient
from ...ops.redistribute import NAMES
from ..math import functions as F
from ..record.recorder import current
from ..record.tree import fitted, flatten, unflatten
from ..value.tensor import Tensor
from .custom import along, pulled_back, tensors, under_no_grad
from .grad import separate
from .tape import history


@under_no_grad
def jvp(
    fn: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    """(`fn(*primals)`, its directional derivative along `tangents`), as in `jax.jvp`.

    `tangents` are like `primals`, as in `torch.func.jvp`. Computed by two gradients, of which only
    the parts needed for the derivative run; so `fn` needs second gradients. Raises UsageError if
    `primals` is not a tuple or the value holds anything but float tensors, ShapeError if the
    tangents are not like the primals, and GraphError if the value depends on none of them.

    >>> import tessera as ts
    >>> x, along = ts.tensor([1.0, 2.0]), ts.tensor([1.0, 0.5])
    >>> y, slope = ts.jvp(lambda x: x**3, (x,), (along,))
    >>> y.numpy().tolist(), slope.numpy().tolist()
    ([1.0, 8.0], [3.0, 6.0])
    """
    fix = "give a tuple with one for each argument: ts.jvp(fn, (x,), (along,))"
    for label, given in (("primals", primals), ("tangents", tangents)):
        instance("jvp", label, given, (tuple, list), fix)  # type: ignore[arg-type]
    xs, spec = flatten(tensors(tuple(primals)))
    moved, moved_spec = flatten(tensors(tuple(tangents)))
    moved = fitted(
        "jvp: the tangents are not like the primals", ("primals", "tangents"),
        spec, xs, moved_spec, moved,
        "give a tensor like each of the primals, in the same structure", dtypes=False,
    )  # fmt: skip
    xs = [separate(x) if x.dtype.is_float else x for x in xs]  # the history begins at these
    value, pull = pulled_back("jvp", fn, unflatten(spec, xs))
    _need_linear(flatten(value)[0], xs)
    # The pulled-back gradients are linear in their cotangents, so these may have any values.
    # The outputs themselves have the right layout and need no new memory.
    outs, out_spec = flatten(value)
    given_back = [F.stop_gradient(t) for t in outs]
    if current() is None:  # without a history, as no gradient leads behind them
        given_back = [Tensor(t.stored, t.type) for t in given_back]
    pulled = flatten(pull(unflatten(out_spec, given_back)))[0]
    slopes = along([p * t.to(p.dtype) for p, t in zip(pulled, moved, strict=True)], given_back)
    return value, unflatten(out_spec, slopes)


def _need_linear(outs: list[Tensor], xs: list[Tensor]) -> None:
    """Raises GraphError if a user's backward function between `xs` and `outs` is not linear in its
    cotangent."""
    recorder = current()
    ops: list[tuple[str, Any]]
    if recorder is not None:
        ends = {recorder.node(x) for x in xs}
        between = reachable([recorder.node(t) for t in outs], ends)
        ops = [(n.op, n.attrs) for n in between]
    else:
        stop = set(map(id, xs))
        histories = [t._history for out in outs for t in history(out, stop) if id(t) not in stop]
        ops = [(m.op, m.attrs) for m in histories if m is not None]
    while ops:
        op, attrs = ops.pop()
        if op == custom.name and not _slopes(attrs["backward"], attrs["values"]):
            raise GraphError(
                f"jvp: the backward function {attrs['backward'].name} is not linear in the gradient"
                " that it is given, so it tells no slope",
                fix="take the slope of the function without its own gradient; or ts.vjp",
            )
        for body in attrs.values():
            if isinstance(body, Graph):
                ops += [(n.op, n.attrs) for n in body.nodes]


def _slopes(backward: Graph, values: int) -> bool:
    """Returns whether `backward` is linear in its last `values` inputs, the gradients of the
    values."""
    found = _linear(backward, backward.inputs[len(backward.inputs) - values :])
    return found is not None and all(
        on or _zero(n) for on, n in zip(found, backward.outputs, strict=True)
    )


def _zero(n: Node) -> bool:
    while len(n.args) == 1 and (n.op in NAMES or n.kind.hands_on):
        n = n.args[0]
    return n.op == full.name and n.attrs["value"] == 0


def _linear(body: Graph, inputs: Iterable[Node]) -> list[bool] | None:
    """Returns for each output of `body` whether it depends on `inputs`. None if an op on the way is
    not known to be linear in them."""
    on: set[Node] = set(inputs)
    parts: dict[Node, list[bool]] = {}  # the dependent results of each loop
    for n in body.nodes:
        places = [i for i, a in enumerate(n.args) if a in on]
        if n.op == item.name:
            known = parts.get(n.args[0])
            on.update([n] if (places if known is None else known[n.attrs["index"]]) else ())
            continue
        if not places:
            continue
        through = n.op in NAMES or (n.kind.grad is not None and n.op != stop_gradient.name)
        match n.kind.degree if through else "":
            case "each":
                linear = True
            case "product":
                linear = len(places) == 1
            case "quotient":
                linear = places == [0]
            case "alone":
                linear = len(places) == 1 and n.args[places[0]].type.dtype.is_float
            case "joint":
                linear = all(a in on or _zero(a) for a in n.args if a.type.dtype.is_float)
            case _ if n.op == scan.name:
                places_out = _linear_loop(n, places)
                parts[n] = places_out or []
                linear = places_out is not None
            case _:
                linear = n.op in NAMES
        if not linear:
            return None
        if n not in parts:
            on.add(n)
    return [n in on for n in body.outputs]


def _linear_loop(n: Node, places: list[int]) -> list[bool] | None:
    """`_linear` for the loop `n`, whose arguments at `places` depend on the inputs. A sum that
    begins at 0 is linear in its terms."""
    body, first, carries = n.attrs["body"], n.attrs["consts"], n.attrs["carries"]
    starts = n.args[first : first + carries]
    sums = [first + i for i, a in enumerate(starts) if a.type.dtype.is_float and _zero(a)]
    found = _linear(body, [body.inputs[i] for i in {*places, *sums}])
    if found is None:
        return None
    for i in range(carries):  # a carry must depend on the inputs in every iteration, or in none
        if (first + i in places or first + i in sums) != found[i] and not _zero(body.outputs[i]):
            return None
    return found
