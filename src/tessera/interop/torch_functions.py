"""`torch.autograd.Function` in exported programs.

`torch.export` follows `forward` and forgets `backward`. So while it runs, `apply` here calls both:
`backward` with cotangents that are results of an op of ours, and a second op that binds values,
cotangents and gradients. The reader of the graph then takes the calls that lead from the
cotangents to the gradients as a program of their own, the backward of `custom_gradient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from ..core.checks import library
from ..lang.autodiff.custom import custom_gradient
from ..lang.foreign.program import Call, Program, Ref
from .aten import rule

BOUND = "tessera.with_gradient.default"


@cache
def _ops() -> Any:
    torch = library("from_torch", "torch", "torch")
    lib = torch.library.Library("tessera", "FRAGMENT")
    lib.define("cotangent(Tensor value) -> Tensor")
    lib.define(
        "with_gradient(Tensor[] values, Tensor[] cotangents, Tensor[] inputs, Tensor[] gradients)"
        " -> Tensor[]"
    )
    for key, new in (
        ("CompositeExplicitAutograd", lambda x: x.clone()),
        ("Meta", torch.empty_like),
    ):
        lib.impl("cotangent", new, key)
        lib.impl("with_gradient", lambda values, *_, new=new: [new(x) for x in values], key)
    return lib, torch.ops.tessera


# -- while PyTorch exports ------------------------------------------------------------------------
class Context:
    """The `ctx` of `forward` and `backward`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: tuple[Any, ...] = ()
        self.materialize = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Of use to `jvp` alone."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value

    def mark_dirty(self, *tensors: Any) -> None:
        raise RuntimeError("a torch.autograd.Function that changes its arguments in place")


@contextmanager
def followed_functions() -> Iterator[None]:
    """Inside, `apply` of every `torch.autograd.Function` records its backward beside its values."""
    torch = library("from_torch", "torch", "torch")
    base = torch.autograd.Function.__base__  # which `Function.apply` hands over to

    def apply(cls: Any, *args: Any) -> Any:
        # PyTorch's private ones are the gradients of ops, for which there are rules.
        if cls.__module__.startswith("torch._") or not torch.is_grad_enabled():
            return super(base, cls).apply(*args)
        return _applied(torch, cls, args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


def _applied(torch: Any, cls: Any, args: tuple[Any, ...]) -> Any:
    def is_float(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and bool(x.is_floating_point())

    ctx = Context(tuple(map(is_float, args)))
    if cls.setup_context is torch.autograd.Function.setup_context:
        found = cls.forward(ctx, *args)
    else:
        found = cls.forward(*args)
        cls.setup_context(ctx, args, found)
    outs = list(found) if isinstance(found, (tuple, list)) else [found]
    lib = _ops()[1]
    trained = [is_float(y) and not any(y is c for c in ctx.constant) for y in outs]
    values = [y for y, t in zip(outs, trained, strict=True) if t]
    cotangents = [lib.cotangent(y) for y in values]
    rest = iter(cotangents)
    given = [next(rest) if t else _nothing(torch, ctx, y)
             for y, t in zip(outs, trained, strict=True)]  # fmt: skip
    gradients = cls.backward(ctx, *given)
    gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    pairs = [(x, g) for x, g in zip(args, gradients, strict=False) if is_float(x) and g is not None]
    bound = iter(lib.with_gradient(values, cotangents, *map(list, zip(*pairs, strict=True)))
                 if pairs else [y.detach() for y in values])  # fmt: skip
    result = [next(bound) if t else y for y, t in zip(outs, trained, strict=True)]
    return type(found)(result) if isinstance(found, (tuple, list)) else result[0]


def _nothing(torch: Any, ctx: Context, y: Any) -> Any:
    """The cotangent of a result without a gradient."""
    tensor = isinstance(y, torch.Tensor)
    return torch.zeros_like(y) if tensor and ctx.materialize else None


# -- reading --------------------------------------------------------------------------------------
def cut_backward(program: Program, call: Call) -> Call:
    """`call` of `with_gradient` with a program for the gradients. The calls that need a cotangent
    leave `program` for it; the other values that it reads become operands."""
    values, cotangents, inputs, gradients = call.args
    needing = {c.index for c in cotangents}
    inside: list[Call] = []
    outside: list[Call] = []
    for earlier in program.calls:
        if earlier.outs[0] in needing:
            continue  # the cotangent itself
        if any(r in needing for r in _refs((earlier.args, earlier.params))):
            needing.update(earlier.outs)
            inside.append(earlier)
        else:
            outside.append(earlier)
    program.calls[:] = outside
    read = [r for c in inside for r in _refs((c.args, c.params))] + [*_refs(gradients)]
    captured = list(dict.fromkeys(r for r in read if r not in needing))
    numbers = {c.index: i for i, c in enumerate(cotangents)}
    for r in (*captured, *(out for c in inside for out in c.outs)):
        numbers.setdefault(r, len(numbers))
    calls = [
        c._replace(
            args=_renumbered(c.args, numbers), params=_renumbered(c.params, numbers),
            outs=tuple(numbers[i] for i in c.outs),
        )
        for c in inside
    ]  # fmt: skip
    body = Program(len(cotangents) + len(captured), calls, _renumbered(gradients, numbers))
    return call._replace(args=[values, inputs, [Ref(r) for r in captured], body])


def _refs(x: Any) -> Iterator[int]:
    """The numbers of the values that operands read."""
    match x:
        case Ref():
            yield x.index
        case dict():
            yield from _refs(list(x.values()))
        case list() | tuple():
            for v in x:
                yield from _refs(v)


def _renumbered(x: Any, numbers: dict[int, int]) -> Any:
    match x:
        case Ref():
            return Ref(numbers[x.index])
        case dict():
            return {k: _renumbered(v, numbers) for k, v in x.items()}
        case list() | tuple():
            return type(x)(_renumbered(v, numbers) for v in x)
    return x


@rule(BOUND)
def _with_gradient(
    values: Sequence[Any], inputs: Sequence[Any], captured: Sequence[Any], backward: Any
) -> list[Any]:
    @custom_gradient
    def function(*inputs: Any) -> tuple[list[Any], Any]:
        return list(values), lambda gs: tuple(backward([*gs, *captured]))

    return function(*inputs)
