"""User-defined gradients (`custom_gradient`), and `value_and_grad` and `vjp`.

`custom_gradient` records the user's backward function as a graph of its own when the value is
computed. The `custom` node (ops/custom.py) holds that graph, so gradients work wherever nodes do:
inside a compiled function and outside, on a mesh, in loops, and a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from ...core.checks import shown, unfit, whole
from ...core.context import replaced, settings
from ...core.declared import Called, Flag
from ...core.errors import DTypeError, ShapeError, UsageError, caller
from ...core.tracebacks import boundary
from ..math import functions as F
from ..math.complex_numbers import real
from ..record.operands import as_tensor, emit, emit_many
from ..record.parameter import Parameter, need_trained
from ..record.recorder import Recorder, current, recording
from ..record.tree import (
    EMPTY,
    LEAF,
    Path,
    fitted,
    flatten,
    is_registered,
    opened,
    path_name,
    spec_paths,
    unflatten,
)
from ..value.checks import asked_function, bound, signature_of
from ..value.eager import history_entry
from ..value.host_data import is_array
from ..value.tensor import Tensor
from .grad import HasParameters, grad, grad_holding, held_constant, separate
from .iteration import body_of
from .tape import stop_gradient

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
M = TypeVar("M", bound=HasParameters)


def custom_gradient(
    fn: Annotated[Callable[P, tuple[R, Callable[..., Any]]], Called()],
) -> Callable[P, R]:
    """A decorator for a function with its own gradient: `fn` returns (value, backward).

    `backward(g)` gets the gradient of the value, in the structure of the value. It returns one
    gradient for each argument that holds tensors, in their order, however the call gives them: a
    tuple, or the gradient itself if there is one. None, also in place of a leaf, means no gradient.
    Keyword-only arguments, and all else that `fn` reads, such as a weight in its closure, are
    constants for gradients. Raises UsageError if `fn` does not return a float value and a function,
    or if `backward` returns another number of gradients or draws random numbers; ShapeError or
    DTypeError if a gradient does not fit its argument.

    >>> import tessera as ts
    >>> @ts.custom_gradient
    ... def clipped(x):  # the value is x, its gradient stays within 1
    ...     return x, lambda g: ts.minimum(ts.maximum(g, -1.0), 1.0)
    >>> x = ts.tensor([1.0, 2.0])
    >>> ts.grad(ts.sum(clipped(x) * 5.0), x).numpy().tolist()
    [1.0, 1.0]
    """
    signature = signature_of("custom_gradient", fn)
    name = getattr(fn, "__name__", "function")

    @boundary
    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        bound_args = bound(name, signature, args, kwargs)  # arguments by name get their positions
        result: Any = fn(*bound_args.args, **bound_args.kwargs)
        if not (isinstance(result, tuple) and len(result) == 2 and callable(result[1])):
            raise UsageError(
                f"custom_gradient: {name} gave {shown(result)}, not a value and a function",
                fix="return value, backward; backward(g) gives the arguments' gradients",
            )
        value, backward = result[0], asked_function("custom_gradient", "backward", result[1])
        outs, spec = flatten(value)
        fix = "return float tensors; compute the rest in another function"
        _floats(f"custom_gradient: {name}", outs, fix)
        r = Recorder(f"{name}_backward", current())
        with recording(r):
            gs = [r.input(t.type.complete(), f"g{i}") for i, t in enumerate(outs)]
            pairs = _pairs(name, bound_args.args, backward(unflatten(spec, gs)))
            gradients = [r.node(g) for _, g in pairs]
        if r.key is not None:
            raise UsageError(
                f"custom_gradient: the backward function of {name} draws random numbers",
                fix="draw them in the function itself",
            )
        body, extras = body_of(r, [r.node(g) for g in gs], gradients)
        if not pairs:
            return unflatten(spec, [F.stop_gradient(t) for t in outs])  # type: ignore[no-any-return]
        inputs = [*outs, *(x for x, _ in pairs), *extras]
        return unflatten(spec, passed(inputs, {"values": len(outs), "backward": body}))  # type: ignore[no-any-return]

    return run


def passed(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    """Returns the values as results of `custom`. Outside a recording they need no program: they are
    the same arrays, with another history."""
    values = attrs["values"]
    if current() is not None:
        if values == 1:
            return [emit("custom", *inputs, **attrs)]
        return emit_many("custom", *inputs, **attrs)
    outs, loc = [], caller()
    # The values lose their own history: the gradient is that of the user's backward.
    given = [Tensor(t.stored, t.type) for t in inputs[:values]] + [t.now() for t in inputs[values:]]
    for i, t in enumerate(given[:values]):
        out = Tensor(t.stored, t.type)
        if not settings().no_grad:
            out._history = history_entry("custom", given, attrs, i, loc)
        outs.append(out)
    return outs


def _pairs(name: str, args: tuple[Any, ...], gradients: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns (argument, its gradient) for each tensor that gets one."""
    leaves_of = [(a, flatten(a)[0]) for a in args]
    holders = [a for a, xs in leaves_of if any(isinstance(x, Tensor) for x in xs)]
    if isinstance(gradients, list) and not (len(holders) == 1 and isinstance(holders[0], list)):
        gradients = tuple(gradients)
    parts = gradients if isinstance(gradients, tuple) else (gradients,)
    # A single argument may itself be a tuple; its gradient is a tuple then, wrapped or not.
    alone = len(holders) == 1 and isinstance(holders[0], tuple)
    if alone and not (len(parts) == 1 and isinstance(parts[0], tuple)):
        parts = (gradients,)
    # An array is a constant here and a tensor of a compiled function, which the same `fn` may be.
    every = [a for a, xs in leaves_of if any(isinstance(x, Tensor) or is_array(x) for x in xs)]
    if len(parts) == len(every):
        holders = every
    if len(parts) != len(holders):
        raise UsageError(
            f"custom_gradient: backward of {name} gave {len(parts)} gradients for"
            f" {len(holders)} arguments of tensors",
            fix="return a tuple with one per positional argument that holds tensors, None for none",
        )
    pairs = []
    for i, (arg, part) in enumerate(zip(holders, parts, strict=True)):
        leaves, spec = flatten(arg)
        leaf_at = dict(zip(spec_paths(spec), leaves, strict=True))
        got, got_spec = flatten(part)
        for path, g in zip(spec_paths(got_spec), got, strict=True):
            x = leaf_at.get(path)
            label = path_name((i, *path))
            if is_array(x):
                continue
            if not isinstance(x, Tensor) or not x.dtype.is_float:
                raise UsageError(
                    f"custom_gradient: backward of {name} gave a gradient at {label!r}, where no"
                    " float tensor was given",
                    fix="give gradients in the structure of the arguments, None for the others",
                )
            g = as_tensor(g)
            if g.shape != x.shape or not g.dtype.is_float:
                raise (ShapeError if g.shape != x.shape else DTypeError)(
                    f"custom_gradient: backward of {name} gave a gradient that does not fit"
                    f" argument {label!r}",
                    argument=x.type,
                    gradient=g.type,
                    fix="a gradient has the shape of its argument",
                )
            pairs.append((x, g.to(x.dtype)))
    return pairs


def under_no_grad(run: Callable[P, R]) -> Callable[P, R]:
    """Returns `run`, which takes gradients also inside `ts.no_grad`. There its result is a constant
    for outer gradients, as with `torch.func.grad`."""

    @functools.wraps(run)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not settings().no_grad:
            return run(*args, **kwargs)
        with replaced(no_grad=False):
            leaves, spec = flatten(run(*args, **kwargs))
            floats = [isinstance(x, Tensor) and x.dtype.is_float for x in leaves]
            ends = [stop_gradient(x) if is_float else x for x, is_float in zip(leaves, floats)]
            return unflatten(spec, ends)  # type: ignore[no-any-return]

    return outside


def places_of(caller: str, argnums: int | Sequence[int]) -> tuple[Sequence[int], bool]:
    """(the positions `argnums`, whether they are a list). Raises UsageError in the name of `caller`
    if one is no whole number."""
    several = isinstance(argnums, (tuple, list)) and bool(argnums)
    places: Any = argnums if several else (argnums,)
    for n in places:
        whole(caller, "argnums", n)
    return places, several


@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fn: Callable[Concatenate[M, P], R], argnums: Literal[0] = 0, has_aux: bool = False
) -> Callable[Concatenate[M, P], tuple[R, dict[str, Tensor]]]: ...
@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fn: Callable[Concatenate[X, P], R], argnums: Literal[0] = 0, has_aux: bool = False
) -> Callable[Concatenate[X, P], tuple[R, X]]: ...
@overload
def value_and_grad(
    fn: Callable[P, R], argnums: int | Sequence[int], has_aux: bool = False
) -> Callable[P, tuple[R, Any]]: ...
def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: Flag = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns (the scalar of `fn`, its gradient by the first argument).

    That argument is a tensor or a tree of tensors; the gradient has its structure. For a module the
    gradient is a dict by name, of its trainable parameters, and `fn` gets the module itself.
    `argnums` are the positions of other arguments; for several there is a tuple of gradients. With
    `has_aux` `fn` returns the pair (scalar, anything), which is returned in place of the scalar.
    Raises UsageError if `fn` has no such arguments or does not return such a pair, or if a module
    is given at another position too; and the errors of `ts.grad`, at the call.

    >>> import tessera as ts
    >>> value, g = ts.value_and_grad(lambda x: ts.sum(x * x))(ts.tensor([1.0, 3.0]))
    >>> value.item(), g.numpy().tolist()
    (10.0, [2.0, 6.0])
    """
    caller = "value_and_grad"
    fn = asked_function(caller, "the function", fn)
    places, several = places_of(caller, argnums)

    @boundary
    @functools.wraps(fn)
    @under_no_grad
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if max(places) >= len(args) or min(places) < -len(args):
            far = max(places, key=lambda n: n if n >= 0 else -n - 1)
            fix = f"its gradient is by argument {far}: give that by place"
            raise unfit(caller, "the number of arguments by place", len(args), fix)
        by_place = {n % len(args) for n in places}
        given = [with_separate_leaves(x) if i in by_place else x for i, x in enumerate(args)]
        _see_twice(caller, given, by_place)
        with replaced(op_by_op=True):
            out = fn(*given, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise unfit(
                caller, "the function's result", out, "with has_aux=True it is (loss, more)"
            )
        by = [given[n] for n in places]
        loss = out[0] if has_aux else out
        if isinstance(loss, tuple):
            raise unfit(
                caller, "the scalar of the function", loss, "say has_aux=True of (loss, more)"
            )
        return out, grad(loss, tuple(by) if several else by[0])

    return run


def _see_twice(caller: str, arguments: Sequence[Any], by_place: set[int]) -> None:
    """Raises UsageError if a module with a gradient is given at another position too: it is one
    object, so the gradient would count both uses."""
    places: dict[int, int] = {}
    for i in sorted(range(len(arguments)), key=lambda i: i not in by_place):
        for x in flatten(arguments[i])[0]:
            if not isinstance(x, Parameter) or x.frozen:
                continue
            at = places.setdefault(id(x), i) if i in by_place else places.get(id(x), i)
            if at != i:
                raise UsageError(
                    f"{caller}: arguments {at} and {i} hold the same weight",
                    weight=x,
                    fix="give a copy of the other model: copy.deepcopy(model)",
                )


def _floats(caller: str, values: Iterable[Any], fix: str) -> None:
    """Raises UsageError unless all `values`, results of a function, are float tensors."""
    for t in values:
        if not isinstance(t, Tensor) or not t.dtype.is_float:
            value = t.type if isinstance(t, Tensor) else shown(t)
            said = f"{caller} gave a value that is no float tensor"
            raise UsageError(said, value=value, fix=fix)


@under_no_grad
def vjp(fn: Callable[..., Any], *xs: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns (`fn(*xs)`, pull); `pull(g)` returns a tuple with the gradient of each of `xs`.

    `g` is the gradient of the value, in the structure of the value, as in `jax.vjp`; the gradients
    of a tuple may be given one by one. Gradients of complex numbers are as in JAX. Raises
    UsageError if the value holds anything but float tensors or a module is given at two places, and
    ShapeError in `pull` if `g` does not have the structure and shapes of the value.

    >>> import tessera as ts
    >>> y, pull = ts.vjp(ts.sin, ts.tensor([0.0, 0.0]))
    >>> pull(ts.tensor([1.0, 2.0]))[0].numpy().tolist()
    [1.0, 2.0]
    """
    return pulled_back("vjp", fn, xs)


def pulled_back(
    caller: str, fn: Callable[..., Any], xs: tuple[Any, ...]
) -> tuple[Any, Callable[[Any], Any]]:
    """`vjp(fn, *xs)`, whose errors name `caller`."""
    fn = asked_function(caller, "the function", fn)
    xs = with_separate_leaves(xs)
    _see_twice(caller, xs, {*range(len(xs))})
    with replaced(op_by_op=True):
        value = fn(*xs)
    outs, spec = flatten(value)
    _floats(f"{caller}: the function", outs, "return float tensors")

    @under_no_grad
    def pull(*g: Any) -> Any:
        gs, g_spec = flatten(g[0] if len(g) == 1 else g)
        gs = fitted(
            "vjp: the gradient is not like the value", ("value", "given"),
            spec, outs, g_spec, [as_tensor(x) for x in gs],
            "give a tensor like each of the value's, in the same structure", dtypes=False,
        )  # fmt: skip
        gs = [held_constant(x, xs) for x in gs]
        terms = [t * x.to(t.dtype) for t, x in zip(outs, gs)]
        return along(terms, xs, gs)

    return value, pull


def along(terms: Sequence[Tensor], by: Any, held: Sequence[Tensor] = ()) -> Any:
    """The gradients by `by` of the real sum of all elements of `terms`; the tensors `held` are
    constants."""
    sums = [F.sum(real(t) if t.dtype.is_complex else t) for t in terms]
    return grad_holding(F.sum(F.stack([t.to("f32") for t in sums])), by, held)


def tensors(tree: Any) -> Any:
    """Returns `tree` with its leaves as tensors."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [as_tensor(x) for x in leaves])


def with_separate_leaves(tree: Any) -> Any:
    """Returns `tree` with its float leaves as separate tensors that nothing else refers to. A
    module stays itself: state that it sets in itself is kept, and its tensors are not checked."""
    named: list[tuple[str, Tensor]] = []
    made = _separate_leaves(tree, (), named)
    need_trained("grad", named)
    return made


def _separate_leaves(tree: Any, path: Path, named: list[tuple[str, Tensor]]) -> Any:
    if tree is None or is_registered(type(tree)):
        return tree
    found = opened(tree)
    if found is None:
        t = as_tensor(tree)
        named.append((path_name(path), t))
        return separate(t) if t.dtype.is_float else t
    kind, keys, values = found
    names = keys if isinstance(keys, tuple) else range(len(values))
    new = [_separate_leaves(x, (*path, name), named) for name, x in zip(names, values, strict=True)]
    spec = (kind, keys, tuple([EMPTY if x is None else LEAF for x in new]))
    return unflatten(spec, [x for x in new if x is not None])
