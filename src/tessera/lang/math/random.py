"""Random tensors, and their state: a seed and counts of calls, nothing else.

Values depend on the seed, the call and the element's global index; never on layout or devices.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from ...core.checks import shown, sizes, unfit, whole
from ...core.declared import Count, Flag, Integer, Real, Share, Whole
from ...core.dtypes import beyond, dtype_of, f32, int32, uint32
from ...core.errors import ShapeError, UsageError
from ...core.layout import TensorType, plain
from ...core.public import public
from ...core.tensor_checks import ranked
from ...core.value_checks import is_whole
from ...ops.local import as_local
from ...ops.random import GOLDEN
from ..record import recorder as recorder_module
from ..record.chunk import Draw
from ..record.local_view import view
from ..record.operands import as_tensor, emit, scalar
from ..record.recorder import KEY_TYPE
from ..value.checks import fitting
from ..value.engine import engine
from ..value.tensor import Like, Tensor
from . import functions

__all__ = [
    "bernoulli", "multinomial", "normal", "randint", "seed", "set_state", "state", "uniform",
]  # fmt: skip


class State:
    """The generator's whole state, which a checkpoint must keep."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.calls, self.created = seed, 0, 0


STATE = State()


def seed(value: Annotated[int, Whole(0, 2**32 - 1)]) -> None:
    """Restarts the random generator from `value`.

    Raises UsageError if `value` is not a whole number from 0 to 2**32 - 1, and inside a compiled
    function, where it would run only during the recording.
    """
    if recorder_module.current() is not None:
        raise UsageError(
            "seed: a compiled function runs it only when it is recorded",
            seed=value,
            fix="call it before the function; what is drawn inside follows from it",
        )
    STATE.seed, STATE.calls, STATE.created = value, 0, 0


def state() -> dict[str, int]:
    """The state of the random generator as a dict of numbers, for `set_state` and checkpoints."""
    return {"seed": STATE.seed, "calls": STATE.calls, "created": STATE.created}


def set_state(saved: dict[str, int]) -> None:
    """Sets the random generator to a state that `state()` returned.

    Raises UsageError if `saved` is not such a dict.
    """
    names = ("seed", "calls", "created")
    if not isinstance(saved, dict) or not all(is_whole(saved.get(n)) for n in names):
        raise UsageError(
            f"random: {shown(saved)} is not a state", fix="give what ts.random.state() gave"
        )
    STATE.seed, STATE.calls, STATE.created = (int(saved[n]) for n in names)


def next_key() -> np.ndarray[Any, Any]:
    """The key of the next call of a function that draws random numbers."""
    STATE.calls += 1
    return np.array([STATE.seed, STATE.calls], np.uint32)


def key_for(name: str) -> np.ndarray[Any, Any]:
    """The key of a new weight: from its name, or from the order of creation if it has none."""
    STATE.created += 1
    word = zlib.crc32(name.encode()) if name else STATE.created
    return np.array([STATE.seed ^ 0x5EED1E55, word], np.uint32)


_layout: ContextVar[TensorType | None] = ContextVar("tessera_random_layout", default=None)


@contextmanager
def laid_out(like: TensorType) -> Iterator[None]:
    """A context in which draws of the shape of `like` are made in its layout, each device its own
    block."""
    token = _layout.set(like)
    try:
        yield
    finally:
        _layout.reset(token)


def _keeper() -> recorder_module.Recorder | None:
    """The recording that provides the random keys here. A block of rows uses the keys of all
    rows."""
    recorder = recorder_module.current()
    while recorder is not None and recorder.chunk is not None and recorder.chunk.draws_around:
        recorder = recorder.parent
    return recorder


def _key() -> tuple[Tensor, int]:
    recorder = _keeper()
    if recorder is not None:
        return recorder.random_key()
    value = next_key()
    t = Tensor(None, KEY_TYPE)
    t._pending = lambda: engine().place(value, KEY_TYPE)
    return t, 0


def keys(count: int) -> Tensor:
    """Returns keys u32[count, 2]: the keys of the next `count` draws, in their order."""
    recorder = _keeper()
    if recorder is not None and recorder.draws is not None:
        return functions.reshape(recorder.random_keys(count), (count, 2))
    key, first = _key()
    if recorder is not None:
        recorder.streams += count - 1
    word = [emit("slice", key, starts=(i,), stops=(i + 1,), steps=(1,)) for i in (0, 1)]
    number = emit("add", emit("iota", dtype=uint32, shape=(count,), dim=0), scalar(first, uint32))
    stream = emit("bit_xor", word[1], emit("mul", number, scalar(GOLDEN, uint32)))
    pair = (emit("broadcast_to", word[0], shape=(count,)), stream)
    return emit("concat", *(functions.reshape(w, (count, 1)) for w in pair), dim=1)


def _draw(
    recorder: recorder_module.Recorder | None, size: tuple[int, ...], like: TensorType | None
) -> Draw:
    """The draw of shape `size` in `recorder`, in the layout of `like` if it is given."""
    while recorder is not None and recorder.chunk is None:
        recorder = recorder.parent
    if recorder is not None and recorder.chunk is not None:
        around = recorder.parent
        return recorder.chunk.draw(size, lambda: _draw(around, size, like))
    seen = view()
    if seen is None or not size:
        return Draw(size)
    # A draw like a device's own block is a block of the draw for all devices.
    along = () if like is None else like.varying
    return Draw(size, tuple(a for a in seen.axes if a in along))


def bits(shape: Sequence[int], like: TensorType | None = None) -> Tensor:
    """Uniform u32 values; `like` gives the layout (of a tensor of this shape)."""
    size = sizes("random", shape)
    if like is not None and (not isinstance(like, TensorType) or like.shape != size):
        raise unfit("random", "like", like, f"give the type of a tensor of shape {size}: t.type")
    key, stream = _key()
    draw = _draw(recorder_module.current(), size, like)
    seen, given = view(), (key, *draw.numbers)
    attrs: dict[str, Any] = {"shape": size, "stream": stream}
    if draw.blocks:
        attrs["blocks"] = draw.blocks
    if seen is not None and draw.along:
        t = plain(uint32, size) if like is None else like.complete().with_dtype(uint32)
        whole = seen.joined(t.on(seen.mesh), draw.along)[0].with_varying(())
        drawn = emit("random_bits", *given, **{**attrs, "shape": whole.shape, "layout": whole})
        return emit("reinterpret", drawn, layout=as_local(whole, draw.along))
    around = _layout.get()
    if like is None and around is not None and around.shape == size:
        like = around
    if like is not None:
        attrs["layout"] = like.complete().with_dtype(uint32)
    return emit("random_bits", *given, **attrs)


def uniform(
    shape: Sequence[int],
    *,
    low: Real = 0.0,
    high: Real = 1.0,
    dtype: object = f32,
    like: TensorType | None = None,
) -> Tensor:
    """Values of `shape`, uniform in [low, high), drawn in f32 with 24 random bits each.

    `like` is a TensorType whose layout the result takes; the values do not depend on the layout.
    """
    b = emit("shift_right", bits(shape, like), scalar(8, uint32))
    unit = b.to(int32).to(f32) * (1.0 / 2**24)
    kind = dtype_of(dtype)
    values = (unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low).to(kind)
    if not kind.is_float or low >= high or (kind is f32 and (low, high) == (0.0, 1.0)):
        return values
    end = np.asarray(high, kind.numpy)  # excluded, but the last values may round to it
    last = end if end < high else np.nextafter(end, np.asarray(low, kind.numpy))
    return functions.minimum(values, float(last))


def normal(
    shape: Sequence[int],
    *,
    mean: Real = 0.0,
    std: Real = 1.0,
    dtype: object = f32,
    like: TensorType | None = None,
) -> Tensor:
    """f32 values of `shape`, normal with `mean` and standard deviation `std` (Box & Muller 1958).

    `like` is a TensorType whose layout the result takes; the values do not depend on the layout.
    """
    radius = functions.sqrt(functions.log(1.0 - uniform(shape, like=like)) * -2.0)
    made = radius * _cos_2pi(uniform(shape, like=like))
    if (mean, std) != (0.0, 1.0):
        made = made * std + mean
    return made.to(dtype_of(dtype))


# Coefficients in t² of sin(2πt) / t, for t up to 1/4: a Chebyshev fit, accurate to 1.7e-7.
SINE = (
    6.283185280261415,
    -41.3416806680635,
    81.60248074288846,
    -76.58128455989063,
    39.760722079873,
)


def _cos_2pi(u: Tensor) -> Tensor:
    """cos(2πu) for u from 0 to 1. An engine's cosine accepts all numbers and takes ten times as
    long, and its argument 2πu is rounded."""
    t = functions.abs(u - 0.5) - 0.25  # no rounding: cos(2πu) is sin(2πt)
    square = t * t
    total = square * SINE[-1] + SINE[-2]
    for term in SINE[-3::-1]:
        total = total * square + term
    return total * t


def bernoulli(shape: Sequence[int], p: Share, like: TensorType | None = None) -> Tensor:
    """Bools of `shape`, each True with probability `p`. Raises UsageError if `p` is not in 0 to 1.

    `like` is a TensorType whose layout the result takes; the values do not depend on the layout.
    """
    limit = scalar(min(int(p * 2**32), 2**32 - 1), uint32)
    return emit("lt", bits(shape, like), limit)


def randint(
    shape: Sequence[int],
    low: Integer,
    high: int,
    dtype: object = int32,
    like: TensorType | None = None,
) -> Tensor:
    """Whole numbers of `shape`, from `low` to `high` - 1, equally likely up to 2**-32 of each.

    (PyTorch and NumPy take the shape last; here it is first, as in `uniform`.) `like` is a
    TensorType whose layout the result takes; the values do not depend on the layout. Raises
    UsageError if there is no number from `low` to `high` - 1, DTypeError if `dtype` does not hold
    them.
    """
    if hasattr(high, "__len__"):  # PyTorch's order
        raise unfit("randint", "high", high, "the order is randint(shape, low, high)")
    high = whole("randint", "high", high, low + 1)
    want = dtype_of(dtype)
    for end in (low, high - 1):
        fitting("randint", end, want)
        fitting("randint", end, int32)
    return (_below(bits(shape, like), high - low).to(int32) + low).to(want)


def _below(b: Tensor, count: int) -> Tensor:
    """Maps uniform u32 values to whole numbers below `count`, at most 2**32: the upper half of the
    64-bit product `b * count`, from products of 16 bits."""
    if count == 2**32:
        return b
    upper, lower = divmod(count, 2**16)
    half, mask = scalar(16, uint32), scalar(0xFFFF, uint32)
    b1, b0 = b >> half, b & mask
    middle = b1 * lower + ((b0 * lower) >> half)
    other = b0 * upper + (middle & mask)
    return b1 * upper + (middle >> half) + (other >> half)


def multinomial(probs: Like, count: Count, replacement: Flag = False) -> Tensor:
    """int32 ids [..., count] of classes drawn by their weights `probs` [..., K].

    A row of weights need not add up to 1. Without `replacement` no id is drawn twice (Gumbel top-k,
    Kool et al. 2019). If a weight is negative, NaN or infinite, or if too few weights of a row are
    above 0, the result is the lowest int32, which is no id. (PyTorch calls `count` num_samples.)
    Raises ShapeError if `probs` has no dim, or fewer than `count` classes without `replacement`.
    """
    t = as_tensor(probs)
    t = t if t.dtype is f32 else t.to(f32)
    ranked("multinomial", "probs", t.type, 1, "give [..., K]", more=True)
    classes = t.shape[-1]
    if not classes or (count > classes and not replacement):
        raise ShapeError(
            f"multinomial: {count} ids of {classes} classes",
            probs=t.type,
            fix="draw at most as many as there are classes, or with replacement=True",
        )
    bad = functions.any((t < 0) | ~functions.isfinite(t), -1, True)
    weights = functions.log(functions.maximum(t, 0.0))
    shape = (*t.shape[:-1], count, classes) if replacement else t.shape
    # Gumbel noise; it is finite, as the uniform values are neither 0 nor 1.
    drawn = functions.maximum(uniform(shape), 2.0**-25)
    noise = -functions.log(-functions.log1p(-drawn))
    if replacement:
        noisy = weights.reshape((*t.shape[:-1], 1, classes)) + noise
        ids, best = functions.argmax(noisy, -1), functions.max(noisy, -1)
    else:
        best, ids = functions.topk(weights + noise, count)
    return functions.where(bad | (best == -math.inf), beyond(int32), ids)


if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("ts.random", globals())
