"""How fast does a value change along a direction? `ts.jvp`, by two gradients.

The second is by what the first is given, in which it is linear, but for a gradient function of the
user's own that does more with its argument than sums and products: nothing tells a slope there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..core.checks import instance
from ..core.errors import GraphError
from ..ir.graph.node import Graph, Node, reachable
from ..ops.control import item, scan
from ..ops.create import full
from ..ops.custom import custom
from ..ops.elementwise import stop_gradient
from ..ops.redistribute import NAMES
from . import functions as F
from .custom import along, pulled_back, tensors, under_no_grad
from .grad import apart
from .record import current
from .tape import history
from .tensor import Tensor
from .tree import fitted, flatten, unflatten


@under_no_grad
def jvp(
    fn: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    """(`fn(*primals)`, how fast it changes as each of `primals` moves along its tangent).

    `tangents` are like `primals`, as in `jax.jvp` and `torch.func.jvp`. Computed by two gradients,
    of which only what the slope needs runs; so `fn` needs second gradients. Raises UsageError if
    `primals` is not a tuple or the value holds anything but float tensors, ShapeError if the
    tangents are not like the primals, and GraphError if the value depends on none of them.

    >>> import tessera as ts
    >>> x, along = ts.tensor([1.0, 2.0]), ts.tensor([1.0, 0.5])
    >>> y, slope = ts.jvp(lambda x: x**3, (x,), (along,))
    >>> y.numpy().tolist(), slope.numpy().tolist()
    ([1.0, 8.0], [3.0, 6.0])
    """
    fix = "give a tuple with one for each argument: ts.jvp(fn, (x,), (along,))"
    for what, given in (("primals", primals), ("tangents", tangents)):
        instance("jvp", what, given, (tuple, list), fix)  # type: ignore[arg-type]
    xs, spec = flatten(tensors(tuple(primals)))
    moved, moved_spec = flatten(tensors(tuple(tangents)))
    moved = fitted(
        "jvp: the tangents are not like the primals", ("primals", "tangents"),
        spec, xs, moved_spec, moved,
        "give a tensor like each of the primals, in the same structure", dtypes=False,
    )  # fmt: skip
    xs = [apart(x) if x.dtype.is_float else x for x in xs]  # where the way to the value begins
    value, pull = pulled_back("jvp", fn, unflatten(spec, xs))
    _need_linear(flatten(value)[0], xs)
    # What is pulled back is linear in what is given: its slope by that, along the tangents. Any
    # values would do; these lie where they are needed, and zeros would be made anew there.
    outs, out_spec = flatten(value)
    given_back = [F.stop_gradient(t) for t in outs]
    if current() is None:  # without how they were made, to which nothing would lead back
        given_back = [Tensor(t.stored, t.type) for t in given_back]
    pulled = flatten(pull(unflatten(out_spec, given_back)))[0]
    slopes = along([p * t.to(p.dtype) for p, t in zip(pulled, moved, strict=True)], given_back)
    return value, unflatten(out_spec, slopes)


def _need_linear(outs: list[Tensor], xs: list[Tensor]) -> None:
    """Raises GraphError if between `xs` and `outs` there is a gradient of the user's own that is
    not linear in what it is given."""
    recorder = current()
    ops: list[tuple[str, Any]]
    if recorder is not None:
        ends = {recorder.node(x) for x in xs}
        between = reachable([recorder.node(t) for t in outs], ends)
        ops = [(n.op, n.attrs) for n in between]
    else:
        stop = set(map(id, xs))
        made = [t._made for out in outs for t in history(out, stop) if id(t) not in stop]
        ops = [(m.op, m.attrs) for m in made if m is not None]
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
    """Whether `backward` is linear in its last inputs, the gradients of as many `values`."""
    found = _linear(backward, backward.inputs[len(backward.inputs) - values :])
    return found is not None and all(
        on or _zero(n) for on, n in zip(found, backward.outputs, strict=True)
    )


def _zero(n: Node) -> bool:
    while len(n.args) == 1 and (n.op in NAMES or n.kind.hands_on):
        n = n.args[0]
    return n.op == full.name and n.attrs["value"] == 0


def _linear(body: Graph, inputs: Iterable[Node]) -> list[bool] | None:
    """Which outputs of `body` follow from these `inputs` of it, where all that does is linear in
    them as far as its ops tell; None where it is not."""
    on: set[Node] = set(inputs)
    parts: dict[Node, list[bool]] = {}  # of a loop, which results
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
                found = _linear_loop(n, places)
                parts[n] = found or []
                linear = found is not None
            case _:
                linear = n.op in NAMES
        if not linear:
            return None
        if n not in parts:
            on.add(n)
    return [n in on for n in body.outputs]


def _linear_loop(n: Node, places: list[int]) -> list[bool] | None:
    """`_linear` of the loop `n`, whose arguments at `places` are given. A sum that begins at 0 is
    linear in its terms."""
    body, first, carries = n.attrs["body"], n.attrs["consts"], n.attrs["carries"]
    starts = n.args[first : first + carries]
    sums = [first + i for i, a in enumerate(starts) if a.type.dtype.is_float and _zero(a)]
    found = _linear(body, [body.inputs[i] for i in {*places, *sums}])
    if found is None:
        return None
    for i in range(carries):  # what is carried on is linear in every turn, or in none
        if (first + i in places or first + i in sums) != found[i] and not _zero(body.outputs[i]):
            return None
    return found
