"""`ts.kernel`: a kernel of Tile IR written in Python, as a function on tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any

from ...core.checks import MOST, function_of, string, taken, whole
from ...core.contexts import above, within
from ...core.declared import Mapped, String
from ...core.dtypes import DType, dtype_of, f32
from ...core.errors import DTypeError, ShapeError, TesseraError, UsageError, caller
from ...core.tracebacks import boundary
from ...core.wording import nearest
from ...ir.tile.body import (
    Enter,
    Put,
    Quiet,
    Wait,
    located,
)
from ...ir.tile.kernel import Kernel
from ..autodiff.custom import custom_gradient
from ..record.kernel_op import kernel_op, with_options
from ..record.operands import as_tensor
from ..value.checks import bound, signature_of
from ..value.eager import current_trace
from ..value.tensor import Tensor
from .kernel_declared import Declared, declared
from .kernel_references import Place
from .kernel_trace import KernelTrace


# ---- the function ------------------------------------------------------------------------------
class TileKernel:
    """A kernel written in Python, made by `ts.kernel`: a function on tensors.

    A call takes a tensor for each input, in their order or by name, and returns a tensor for each
    output. Sizes of dims come from the tensors' shapes, the others by name.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        read: Declared,
        grad: Callable[..., Any] | None,
        chosen: Mapping[str, int],
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._declared, self._grad, self._chosen = fn, read, grad, chosen
        self._made: dict[Any, Kernel] = {}

    def __repr__(self) -> str:
        return f"<kernel {self._declared.name}>"

    @boundary
    def kernel(self, **sizes: Any) -> Kernel:
        """The `Kernel` at these sizes, recorded and verified; its `text` is Tile IR.

        Each dim needs its size; tile sizes, speeds and axes of the mesh may have others than those
        of the decorator. A reference without a dtype gets one in the same way: `x=ts.bf16` (default
        f32). Raises UsageError for unknown or missing names, ShapeError, DTypeError or GraphError,
        with the line, for mistakes in the kernel.
        """
        d = self._declared
        free = {r.name for r, dtype in d.refs if dtype is None}
        dtypes = {n: dtype_of(sizes.pop(n)) for n in [*sizes] if n in free}
        known = {**dict([*d.tune, *d.speed, *d.mesh]), **self._chosen}
        _bound(f"{d.name}.kernel", (), (*known, *free), (), sizes, d.dims)
        given = {n: whole(d.name, n, v, 1, MOST) for n, v in (known | sizes).items()}
        kinds = tuple(dtype or dtypes.get(r.name, f32) for r, dtype in d.refs)
        key = tuple(given.items()), kinds
        if key not in self._made:
            self._made[key] = d.trace(self._fn, self._head(given, kinds))
        return self._made[key]

    def _head(self, sizes: Mapping[str, int], dtypes: tuple[DType, ...]) -> Kernel:
        """The kernel without its body."""
        d = self._declared
        groups = (d.mesh, [(n, 0) for n in d.dims], d.tune, d.speed)
        mesh, dims, tune, speed = (tuple((n, sizes[n]) for n, _ in group) for group in groups)
        refs = tuple(replace(r, dtype=t) for (r, _), t in zip(d.refs, dtypes, strict=True))
        try:
            return Kernel(d.name, mesh, dims, tune, speed, d.grid, refs, d.signals)
        except TesseraError as error:
            raise located(error, at=caller()) from None

    @boundary
    def under(self, **sizes: int) -> TileKernel:
        """The same kernel with other sizes of tiles, or speeds. Raises UsageError for a name that
        is neither."""
        d = self._declared
        _bound(f"{d.name}.under", (), [n for n, _ in (*d.tune, *d.speed)], (), sizes)
        given = {n: whole(f"{d.name}.under", n, v, 1, MOST) for n, v in sizes.items()}
        return TileKernel(self._fn, d, self._grad, {**self._chosen, **given})

    @boundary
    def __call__(self, *xs: Any, **named: Any) -> Any:
        d = self._declared
        names = [r.name for r, _ in d.refs if r.kind == "in"]
        of_inputs = {e.text for r, _ in d.refs if r.kind == "in" for e in r.shape}
        needed = [n for n in d.dims if n not in of_inputs]
        given = _bound(d.name, names, [n for n in d.dims if n in of_inputs], xs, named, needed)
        named = {n: v for n, v in given.items() if n in d.dims}
        ts = [as_tensor(given[n], name=d.name) for n in names]
        sizes = self._sizes_of(ts, named)
        free = [r.name for r, dtype in d.refs if dtype is None]
        have = {n: t.dtype for n, t in zip(names, ts, strict=True)}
        first = next(iter(have.values()), f32)
        kernel = self.kernel(**sizes, **{n: have.get(n, first) for n in free})
        return self._emitted(kernel, ts)

    def _sizes_of(self, ts: list[Tensor], named: Mapping[str, int]) -> dict[str, int]:
        """The sizes for these inputs: those of dims and axes are theirs. Raises ShapeError or
        DTypeError for inputs that do not fit."""
        d = self._declared
        ins = [(r, dtype) for r, dtype in d.refs if r.kind == "in"]
        rows = [(r.name, t.type) for (r, _), t in zip(ins, ts, strict=True)]
        meshes = [t.mesh.sizes for t in ts if t.mesh is not None]
        sizes = {**with_options(dict([*d.tune, *d.speed])), **self._chosen, **named}
        sizes |= {a: n for have in meshes for a, n in have.items() if a in dict(d.mesh)}
        for (r, dtype), t in zip(ins, ts, strict=True):
            if dtype not in (None, t.dtype):
                fix = f"cast it: {r.name}.to(ts.{dtype})"
                raise DTypeError(f"{d.name}: {r.name} is {dtype}", rows=rows, fix=fix)
            if t.ndim != len(r.shape):
                fix = f"give {r.name} the dims {list(r.shape)}"
                raise ShapeError(f"{d.name}: {r.name} has {len(r.shape)} dims", rows=rows, fix=fix)
            for e, n in zip(r.shape, t.shape, strict=True):
                if e.text in d.dims:
                    sizes.setdefault(e.text, n)
        for (r, _), t in zip(ins, ts, strict=True):
            for e, n in zip(r.shape, t.shape, strict=True):
                if e.names <= sizes.keys() and e.value(sizes) != n:
                    what = f"{d.name}: {e} is {e.value(sizes)}, in {r.name} it is {n}"
                    fix = "give inputs whose dims of one name have one size"
                    raise ShapeError(what, rows=rows, fix=fix)
        return sizes

    def _emitted(self, kernel: Kernel, ts: list[Tensor]) -> Any:
        d, axes = self._declared, tuple(axis for axis, _ in kernel.mesh)

        def run(*xs: Tensor) -> Any:
            outs = kernel_op(kernel, *xs, split=d.split, axes=axes, chosen=self._chosen)
            return tuple(outs) if len(outs) > 1 else outs[0]

        if self._grad is None:
            return run(*ts)
        grad = self._grad
        return custom_gradient(lambda *xs: (run(*xs), lambda g: grad(g, *xs)))(*ts)


def _bound(
    name: str,
    first: Sequence[str],
    others: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    needed: Sequence[str] = (),
) -> dict[str, Any]:
    """The arguments of a call by name: `first` may be given by place; `others` may be left out."""
    kinds = inspect.Parameter
    by_place = [kinds(n, kinds.POSITIONAL_OR_KEYWORD) for n in first]
    by_name = [kinds(n, kinds.KEYWORD_ONLY) for n in needed]
    free = [kinds(n, kinds.KEYWORD_ONLY, default=None) for n in others]
    return bound(name, inspect.Signature([*by_place, *by_name, *free]), args, kwargs).arguments


# ---- the decorator -----------------------------------------------------------------------------
Sized = Annotated[Mapping[str, int], Mapped('give sizes by name, e.g. {"BM": 64}')]


def tile_kernel(
    *,
    grid: String = "",
    tune: Sized | None = None,
    speed: Sized | None = None,
    mesh: Sized | None = None,
    split: String = "",
    grad: Callable[..., Any] | None = None,
    **references: str,
) -> Callable[[Callable[..., Any]], TileKernel]:
    """A decorator that makes a kernel of Tile IR of a function on tiles.

    Each of `references` is memory that is cut into tiles: `x="in f32[M, K] tiles [BM, BK]"`, so
    with `out`, and on a mesh with `sym` (memory that other devices put to); `got="sig [n]"` has
    slots to wait for. Without a dtype an input has that of its argument, an output that of the
    first input. A tile size written as 1 makes a dim that is only an index.

    - `grid` has the steps, which have no order: "i=M//BM j=N//BN".
    - `tune` are the sizes of tiles, `speed` those that never change bits, such as warps.
    - `mesh` has the axes of a kernel that communicates, with their sizes.
    - `split` names the dims that devices may split: the body treats their elements independently.
      An output without such a dim is the sum of those of the devices.
    - `grad(g, *inputs)` returns a gradient for each input (None: none), for the gradient of the
      output, a tuple for several. Without it the kernel has no gradient.

    The function's parameters are matched by name: references, signals, indices of the grid, sizes,
    and `rank_x` on a mesh with the axis x. `x[i, k]` is a tile, `y[i, j] = value` stores one.
    Values have the ops of tensors; a product is in f32 (of i8 in i32). The function returns
    nothing. It is recorded once for each set of sizes; all else that it reads is constant.

    Raises UsageError if an argument or a parameter is unknown; the call raises ShapeError,
    DTypeError or GraphError, with the line, for a kernel that is wrong.

    >>> import tessera as ts
    >>> @ts.kernel(grid="i=M//BM", x="in f32[M] tiles [BM]", y="out f32[M] tiles [BM]",
    ...            tune={"BM": 4}, split="M")
    ... def double(x, y, i):
    ...     y[i] = x[i] * 2.0
    >>> print(double.kernel(M=8))
    kernel double  v1
      dims M=8
      tune BM=4
      grid i=M//BM
      in x : f32[M] tiles [BM]
      out y : f32[M] tiles [BM]
      %0 = load x[i]
      %1 = mul %0 2.0
      store y[i] = %1
    """
    if grad is not None:
        function_of("kernel", "grad", grad)
    at = caller()
    read = functools.partial(
        declared, texts=references, grid=grid, split=split, at=at,
        tune=tune, speed=speed, mesh=mesh,
    )  # fmt: skip
    try:
        read("kernel")
    except TesseraError as error:
        raise located(error, at=at) from None

    def decorate(fn: Callable[..., Any]) -> TileKernel:
        fn = function_of("kernel", "the function", fn)
        signature, d = signature_of("kernel", fn), read(getattr(fn, "__name__", "kernel"))
        for p in signature.parameters.values():
            if p.name not in d.parameters and p.default is p.empty:
                speeds = dict(d.speed)
                why = "is a speed: it does not change what is computed" if p.name in speeds else ""
                raise UsageError(
                    f"{d.name}: the parameter {p.name!r} {why or 'has no meaning'}",
                    fix=f"use some of {nearest(p.name, d.parameters)}",
                )
        return TileKernel(fn, d, grad, {})

    return above("ts.kernel", decorate)


# ---- statements --------------------------------------------------------------------------------
def _trace(name: str) -> KernelTrace:
    trace = current_trace()
    if isinstance(trace, KernelTrace):
        return trace
    fix = "write it in a function below @ts.kernel(...)"
    raise UsageError(f"kernel.{name}: it is for the body of a kernel", fix=fix)


def loop(n: Any, body: Callable[..., Any], *carries: Any) -> Any:
    """A loop in a kernel: `body(k, *carries)` for each k from 0 to `n` - 1, or from low to high - 1
    for a pair `(low, high)`.

    Bounds are sizes and indices. Carries are tiles or numbers; the body returns their next values,
    each of the type of the first, and the loop the last ones: one, a tuple, or None without
    carries. Raises UsageError outside of a kernel or for another number of values, ShapeError or
    DTypeError if a type changes.
    """
    return _trace("loop").loop(n, function_of("kernel.loop", "the body", body), carries)


@within("ts.kernel.when")
def when(condition: Any) -> AbstractContextManager[None]:
    """A context in a kernel whose statements run if `condition`, on indices, holds.

    Conditions are comparisons, joined by `&`, `|` and `~`. Raises UsageError for a condition on
    tiles: choose with `ts.where`.
    """
    return _trace("when").when(condition)


def enter(*axes: str) -> None:
    """Waits, in a kernel on a mesh, until all devices along the axes have come here."""
    trace = _trace("enter")
    names = tuple(string("kernel.enter", "an axis", axis) for axis in axes)
    trace.block.append(Enter(names, line=trace.line()))


def put(src: Place, dst: Place, *, at: Any, sig: Place) -> None:
    """Starts the copy of a tile to another device, and sets a slot there when it has arrived:
    `put(a.at(i), b.at(j), at=(rank_x + 1) % x, sig=got[s])`.

    `at` has the device's coordinate along each axis of the mesh, a tuple for several. Raises
    UsageError if `src` and `dst` are no places of references, or `sig` is no slot.
    """
    trace = _trace("put")
    fix = "write ts.kernel.put(a.at(i), b.at(j), at=..., sig=got[s])"
    a, b, s = (taken("kernel.put", x, Place, fix) for x in (src, dst, sig))
    rank = trace.indices("kernel.put", at if isinstance(at, tuple) else (at,))
    trace.block.append(Put(a.name, a.at, b.name, b.at, rank, s.name, s.at, line=trace.line()))


def wait(sig: Place) -> None:
    """Waits, in a kernel, until the own slot `sig` is set: `wait(got[s])`."""
    trace = _trace("wait")
    slot = taken("kernel.wait", sig, Place, "name a slot: wait(got[s])")
    trace.block.append(Wait(slot.name, slot.at, line=trace.line()))


def quiet() -> None:
    """Waits, in a kernel, until all own puts have arrived."""
    trace = _trace("quiet")
    trace.block.append(Quiet(line=trace.line()))
