"""Literal collectives of local bodies, built from changes of layout.

The devices' blocks are read as a split dim or as the terms of a sum, the layout changes, and the
result is read as blocks again (ops/local.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ....core.checks import divides
from ....core.errors import LayoutError
from ....core.layout import Digit, Factor, TensorType, digits, grouped, shard_count
from ....core.mesh import Mesh
from ....core.reshard import completed, gathered
from ....ops.local import joined, joined_dim, with_dim
from ...math import functions
from ...math.shape import reshape
from ...record.local_view import View, view
from ...record.recorder import Recorder, current, symbolic
from ...value.tensor import Tensor


def reduced(x: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
    """all_reduce: the devices' blocks become the terms of a sum, which is completed. The gradient
    of a maximum or minimum goes to the devices that have it, in equal parts."""
    recorder = recorder_now()
    if op == "mean":
        return reduced(x, axes, "sum") * (1.0 / shard_count(axes, mesh_of(x).sizes))
    if op == "sum":
        return folded(recorder, x, axes, op)
    best = folded(recorder, functions.stop_gradient(x), axes, op)
    # 1 on each device that has the extreme value; divided by their number below.
    hit = functions.cast(functions.stop_gradient(x) == best, x.dtype)
    share = hit / folded(recorder, hit, axes, "sum")
    if not x.dtype.is_float:
        return best
    return functions.straight_through(
        best, folded(recorder, x * functions.stop_gradient(share), axes, "sum")
    )


def folded(recorder: Recorder, x: Tensor, axes: tuple[str, ...], kind: str) -> Tensor:
    t = as_varying(x, axes).type
    partial = (*t.partial, *((a, kind) for a in axes))
    node = recorder.node(as_varying(x, axes))
    to = TensorType(t.dtype, t.dims, partial, t.mesh, (a for a in t.varying if a not in axes))
    made = recorder.builder("reinterpret", node, layout=to)
    return symbolic(recorder.builder.redistribute(made, completed(to, axes)), recorder)


def scattered(x: Tensor, axes: tuple[str, ...], dim: int, op: str) -> Tensor:
    """reduce_scatter: like `reduced`, but completed into a split dim, of which each device keeps
    its part."""
    recorder, x = recorder_now(), as_varying(x, axes)
    n = divided("reduce_scatter", x, dim, axes)
    t = x.type
    left = tuple(a for a in t.varying if a not in axes)
    pending = TensorType(t.dtype, t.dims, (*t.partial, *((a, "sum") for a in axes)), t.mesh, left)
    made = recorder.builder("reinterpret", recorder.node(x), layout=pending)
    done = completed(pending, axes)
    # The axes become the major digits of the dim, so that each device gets a contiguous part.
    parts = _below(t, dim, n)
    split = with_dim(done, dim, joined_dim(axes, parts, t))
    node = recorder.builder.redistribute(made, split)
    node = recorder.builder("reinterpret", node, layout=with_dim(t, dim, grouped(parts)))
    out = symbolic(node, recorder)
    return out * (1.0 / n) if op == "mean" else out


def collected(x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    recorder, x = recorder_now(), as_varying(x, axes)
    node = recorder.builder("reinterpret", recorder.node(x), layout=joined(x.type, axes, dim))
    return symbolic(recorder.builder.redistribute(node, gathered(node.type, axes)), recorder)


def sent(x: Tensor, axes: tuple[str, ...], root: int) -> Tensor:
    """broadcast: the block of the device at `root` along `axes`, on each of them."""
    recorder = recorder_now()
    x = as_varying(x, axes)
    if not set(axes) & set(x.type.varying):  # axes of one device each
        return x
    return symbolic(recorder.builder("broadcast", recorder.node(x), axes=axes, root=root), recorder)


def only(x: Tensor, axes: tuple[str, ...], root: int) -> Tensor:
    """Returns `x` on the device at `root` along `axes`, zeros on the others."""
    here = rank_along(axes) == root
    return functions.where(here, x, functions.zeros(x.shape, x.dtype))


def exchanged(x: Tensor, axes: tuple[str, ...], split: int, concat: int) -> Tensor:
    """all_to_all: the dim of source devices is joined into dim `concat`, and the parts of dim
    `split` are split over the devices instead."""
    recorder, shape = recorder_now(), x.shape
    n = divided("all_to_all", x, split, axes)
    # A dim for the parts of `split`, and a dim of size 1 before `concat` for the source device.
    x = reshape(x, (*shape[:split], n, shape[split] // n, *shape[split + 1 :]))
    at = concat + (concat > split)  # the number of dim `concat` in the reshaped tensor
    source = split if concat == split else at
    x = reshape(x, (*x.shape[:source], 1, *x.shape[source:]))
    parts = split + (source <= split)
    x = as_varying(x, axes)
    t = joined(x.type, axes, source)
    to = with_dim(gathered(t, axes), parts, (Factor(n, axes),))
    node = recorder.builder("reinterpret", recorder.node(x), layout=t)
    node = recorder.builder.redistribute(node, to)
    dims = [*to.dims]
    dims[parts] = (Factor(1),)
    back = TensorType(to.dtype, dims, to.partial, to.mesh, (*to.varying, *axes))
    node = recorder.builder("reinterpret", node, layout=back)
    out = list(shape)
    out[split] //= n
    out[concat] *= n
    return reshape(symbolic(node, recorder), tuple(out))


def permuted(x: Tensor, axes: tuple[str, ...], pairs: tuple[tuple[int, int], ...]) -> Tensor:
    recorder, x = recorder_now(), as_varying(x, axes)
    if not set(axes) & set(x.type.varying):  # axes of one device each
        return x if pairs else functions.zeros(x.shape, x.dtype)
    return symbolic(recorder.builder("permute", recorder.node(x), axes=axes, pairs=pairs), recorder)


def recorder_now() -> Recorder:
    recorder = current()
    assert recorder is not None
    return recorder


def view_now() -> View:
    seen = view()
    assert seen is not None
    return seen


def mesh_of(x: Tensor) -> Mesh:
    """The mesh of `x`, or else the mesh of the body."""
    return x.type.mesh or view_now().mesh


def rank_along(axes: tuple[str, ...]) -> Tensor:
    """This device's place along `axes`, as a symbolic number."""
    seen, recorder = view_now(), recorder_now()
    whole = View(seen.mesh, axes)
    return whole.symbol(recorder)


def as_varying(x: Tensor, axes: Sequence[str]) -> Tensor:
    """Returns `x` as a value that varies along `axes`, also if all devices have the same."""
    t = x.type if x.type.mesh is not None else x.type.on(mesh_of(x))
    return functions.relayout(x, t.with_varying((*t.varying, *axes)))


def divided(name: str, x: Tensor, dim: int, axes: Sequence[str]) -> int:
    n = shard_count(axes, mesh_of(x).sizes)
    text = f"dim {dim} of {{count}} does not divide by {{parts}} devices"
    divides(name, x.shape[dim], n, text, "pad it, or choose another dim", x=x.type)
    return n


def _below(t: TensorType, dim: int, n: int) -> list[Digit]:
    """Returns the digits of `dim` without its first `n` parts. Raises LayoutError if the dim begins
    with split digits."""
    run = digits(t.dims[dim], t.sizes)
    if n == 1:
        return run
    head = run[0]
    if head.axes or head.size % n:
        raise LayoutError(
            f"dim {dim} cannot be cut into {n} parts: it is split over other axes",
            x=t,
            fix="gather it over those axes first",
        )
    rest = head.size // n
    return [*([Digit(rest, (), rest)] if rest > 1 else []), *run[1:]]
