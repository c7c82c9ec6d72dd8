"""Cases from PyTorch's samples: tensors, call and expected result.

A case can be recorded whole (every tensor on one device), or with each tensor in a random layout of
eight devices: split over any dims, also unevenly, or as a partial sum or maximum.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

import tessera as ts
from tessera.core.dtypes import dtype_of
from tessera.core.layout import Factor, TensorType, plain
from tessera.core.mesh import Mesh
from tessera.lang.math.functions import relayout
from tessera.lang.value.tensor import Tensor
from tests.peer.rows import Row

Array = np.ndarray[Any, Any]
TORCH = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32,
    "u8": torch.uint8, "i8": torch.int8, "bool": torch.bool, "i64": torch.int64,
}  # fmt: skip
# Its 64-bit types are our 32-bit ones.
OURS = {v: k for k, v in TORCH.items()} | {torch.int64: "i32", torch.float64: "f32"}
MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


# -- between PyTorch and us -----------------------------------------------------------------------
def host(t: torch.Tensor) -> Array:
    """The values of `t` in NumPy; 64-bit integers, which are ids, in 32 bits."""
    t = t.detach()
    if t.dtype is torch.bfloat16:
        return t.float().numpy().astype(ml_dtypes.bfloat16)
    x: Array = t.contiguous().numpy()
    return x.astype(np.int32) if x.dtype == np.int64 else x


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of a sample or a result, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for part in tree for t in leaves(part)]
    return [t for part in tree.values() for t in leaves(part)] if isinstance(tree, dict) else []


def swapped(tree: Any, by: Callable[[torch.Tensor], Any]) -> Any:
    """Returns `tree` with each tensor t replaced by `by(t)`, in the order of `leaves`."""
    if isinstance(tree, torch.Tensor):
        return by(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([swapped(part, by) for part in tree])
    if isinstance(tree, dict):
        return {k: swapped(v, by) for k, v in tree.items()}
    return dtype_of(OURS[tree]) if isinstance(tree, torch.dtype) else tree


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for part in tree for t in tensors(part)]


# -- a case ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Answer:
    """PyTorch's result in the sample's dtype, and from the same values in f64."""

    dtype: torch.dtype
    own: Array
    wide: Array


@dataclass(frozen=True, eq=False)
class Case:
    """One sample of the op of `row` in one dtype.

    Each result is multiplied by its array in `weights` before the sum, so that the sum has a
    gradient with respect to each tensor of `by` (by position).
    """

    row: Row
    dtype: str
    number: int
    sample: Any
    given: tuple[Array, ...]
    answers: tuple[Answer, ...]
    by: tuple[int, ...]
    weights: tuple[Array | None, ...]
    gradients: tuple[Answer, ...]

    @property
    def name(self) -> str:
        return f"{self.row.op} {self.dtype} sample {self.number}"

    def text(self) -> str:
        """A short text of the sample."""
        shown = swapped(self.parts, lambda t: f"{OURS[t.dtype]}{list(t.shape)}")
        args, kwargs = shown
        return ", ".join([*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())])

    @property
    def parts(self) -> tuple[Any, Any]:
        return ((self.sample.input, *self.sample.args), self.sample.kwargs)

    def run(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Tessera's results and gradients for the tensors of the sample."""
        it = iter(given)
        args, kwargs = swapped(self.parts, lambda t: next(it))
        dropped = {k for k in kwargs if k in self.row.lacks}
        outs = tensors(
            self.row.call(*args, **{k: v for k, v in kwargs.items() if k not in dropped})
        )
        if not self.by:
            return outs, []
        loss = None
        for out, w in zip(outs, self.weights, strict=True):
            if w is not None:
                part = ts.sum(out.to(ts.f32) * ts.tensor(w))
                loss = part if loss is None else loss + part
        found: list[Tensor] = ts.grad(loss, [given[i] for i in self.by])
        return outs, found


NONE = (type(None), bool, int, float)  # a false value of these types leaves the argument unset


def wide_of(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double() if t.dtype.is_floating_point else t.detach()


def answered(
    row: Row, op: Any, dtype: str, number: int, sample: Any, gradient: bool, wide: bool
) -> Case | None:
    """Returns the case of one sample, with f64 answers if `wide`. Returns None if the row does not
    offer an argument of the sample, or if PyTorch's result is complex or sparse."""
    if any(not isinstance(v := sample.kwargs.get(k), NONE) or v for k in row.lacks):
        return None
    parts = ((sample.input, *sample.args), sample.kwargs)
    given = leaves(parts)
    if any(t.dtype not in OURS or t.layout is not torch.strided for t in given):
        return None

    def run(way: Callable[[torch.Tensor], torch.Tensor], ask: bool) -> tuple[list[Any], list[Any]]:
        made = [way(t) for t in given]
        if ask:
            for i in by:
                made[i] = made[i].clone().requires_grad_(True)
        it = iter(made)
        args, kwargs = swapped_torch(parts, lambda t: next(it))
        found = op(*args, **kwargs)
        outs = leaves(found) if not isinstance(found, (bool, int, float)) else [torch.tensor(found)]
        outs = outs if row.same is None else [outs[i] for i in row.same]
        reached = [
            (o, w) for o, w in zip(outs, weighted(outs)) if w is not None and o.requires_grad
        ]
        if not ask or not reached:
            return outs, []
        loss = sum((o.double() * torch.from_numpy(w)).sum() for o, w in reached)
        grads = torch.autograd.grad(loss, [made[i] for i in by], allow_unused=True)
        return outs, [torch.zeros_like(made[i]) if g is None else g for i, g in zip(by, grads)]

    by = [i for i, t in enumerate(given) if t.dtype.is_floating_point]
    ask = gradient and bool(by)
    own, grads = exact, exact_grads = run(torch.Tensor.detach, ask)
    if wide:
        with contextlib.suppress(RuntimeError, TypeError):  # dtypes that the sample passes
            exact, exact_grads = run(wide_of, ask)
    if any(o.dtype.is_complex for o in own):
        return None
    reached = bool(grads)
    return Case(
        row, dtype, number, sample, tuple(map(host, given)),
        tuple(map(answer, own, exact)),
        tuple(by) if reached else (),
        tuple(weighted(own)),
        tuple(map(answer, grads, exact_grads)) if reached else (),
    )  # fmt: skip


def swapped_torch(tree: Any, by: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return by(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([swapped_torch(part, by) for part in tree])
    return {k: swapped_torch(v, by) for k, v in tree.items()} if isinstance(tree, dict) else tree


def weighted(outs: Sequence[torch.Tensor]) -> list[Array | None]:
    draw = np.random.default_rng(5)
    made = [draw.uniform(0.5, 1.5, tuple(o.shape)).astype(np.float32) for o in outs]
    return [w if o.dtype.is_floating_point else None for o, w in zip(outs, made, strict=True)]


def answer(own: torch.Tensor, wide: torch.Tensor) -> Answer:
    return Answer(own.dtype, as_f64(host(own)), as_f64(host(wide)))


def as_f64(x: Array) -> Array:
    return x.astype(np.float64)


# -- layouts --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Laid:
    """A tensor of a case on the mesh: the array to place and its type.

    With `fold`, the tensor is the reduction of its blocks along `axis`, and so partial over it.
    """

    placed: Array
    type: TensorType
    fold: str = ""

    def made(self, x: Tensor) -> Tensor:
        if self.fold == "moved":
            return relayout(x, x.type.with_partial((("tp", "sum"),)))
        if self.fold:
            return ts.sum(x, 0) if self.fold == "sum" else ts.max(x, 0)
        return x


def laid_out(x: Array, draw: random.Random) -> Laid:
    """Returns `x` in a random layout: each axis splits a dim, evenly or not, or makes it partial,
    or is unused."""
    t = plain(dtype_of(x.dtype), x.shape, MESH)
    split: dict[int, list[str]] = {}
    fold, folded = "", ""
    for axis in draw.sample(MESH.axes, 2):
        choices: list[Any] = [None, *range(x.ndim), *range(x.ndim)]
        if t.dtype.kind != "bool" and not folded:
            choices += ["sum"]
            choices += ["max"] if not np.isnan(as_f64(x)).any() else []
        where = draw.choice(choices)
        if isinstance(where, int):
            split.setdefault(where, []).append(axis)
        elif where:
            fold, folded = where, axis
    dims = tuple((Factor(n, tuple(split.get(i, ()))),) for i, n in enumerate(x.shape))
    t = t.with_dims(dims)
    if not fold:
        return Laid(x, t)
    if t.dtype.is_int and t.dtype.bytes < 4:
        # The sum of these has a wider dtype.
        free = "tp" not in t.split_axes and fold == "sum"
        return Laid(x, t, "moved" if free else "")
    parts = in_parts(x, MESH.sizes[folded], fold, draw.randrange(4))
    lead = (Factor(len(parts), (folded,)),)
    return Laid(parts, TensorType(t.dtype, (lead, *dims), (), MESH), fold)


def in_parts(x: Array, n: int, fold: str, turn: int) -> Array:
    """Returns [n, ...] with the sum or maximum `x` along the first dim, and no part equal to
    `x`."""
    parts = np.zeros((n, *x.shape), x.dtype)
    if fold == "max":
        low = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
        parts[...] = low
        at = (np.arange(x.size).reshape(x.shape) + turn) % n
        return np.where(np.arange(n).reshape(n, *(1,) * x.ndim) == at, x, parts).astype(x.dtype)
    if x.dtype.kind in "iu":
        some = (np.arange(x.size).reshape(x.shape) % 3 + 1).astype(x.dtype)
    else:
        bits = {2: 4, 4: 12}[x.dtype.itemsize]
        m, e = np.frexp(np.where(np.isfinite(as_f64(x)), as_f64(x), 0))
        some = np.ldexp(np.trunc(m * 2**bits) / 2**bits, e).astype(x.dtype)
        some = np.where(np.isfinite(as_f64(x)), some, x)
    parts[turn % n] = some
    with np.errstate(invalid="ignore"):
        rest = np.where(as_f64(some) == as_f64(x), np.zeros_like(x), x - some)
    parts[(turn + 1) % n] = np.where(np.isnan(as_f64(rest)), np.zeros_like(x), rest)
    return parts.astype(x.dtype)


# -- is it the same? ------------------------------------------------------------------------------
STEP = {"f32": 2.0**-23, "bf16": 2.0**-7, "f16": 2.0**-10}
NEAR = 8.0


def difference(got: Array, want: Answer, dtype: str, loose: float) -> str:
    """Returns the first difference between `got` and PyTorch's results as text, or "".

    An element is right if it is near the f64 result or PyTorch's own, within `NEAR` steps of the
    narrowest float used, relative to itself or to the largest element; or if its error against f64
    is at most twice PyTorch's.
    """
    if got.shape != want.own.shape:
        return f"shape {got.shape}, PyTorch {want.own.shape}"
    if not got.size:
        return ""
    x = as_f64(got)
    if got.dtype.kind in "biu" or want.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        right = x == want.own
    else:
        step = max(STEP.get(dtype, 0.0), STEP[OURS[want.dtype]]) * NEAR * loose
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = as_f64(want.wide.astype(got.dtype))
            finite = np.abs(want.wide[np.isfinite(want.wide)])
            room = step * np.maximum(np.abs(want.wide), finite.max(initial=0.0) / 4)
            room = np.maximum(np.maximum(room, step), 2 * np.abs(want.own - want.wide))
            right = np.zeros(got.shape, np.bool_)
            for target in (rounded, want.wide, want.own):
                right |= (np.abs(x - target) <= room) | (x == target)
                right |= np.isnan(x) & np.isnan(target)
    if right.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~right)[0])
    return f"{(~right).sum()} of {right.size} differ, at {list(at)}: {x[at]:.7g}, " + (
        f"PyTorch {want.own[at]:.7g}, in f64 {want.wide[at]:.7g}"
    )
