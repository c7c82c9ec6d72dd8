"""Random bits that depend on the global index of an element, not on the device that computes it.

The generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC11): a bijection of a 64-bit counter under a 64-bit key. The counter is the element's
index in the whole tensor; the key consists of the seed, the call and the op's stream number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.dtypes import uint32
from ..core.errors import ShapeError
from ..core.layout import TensorType
from .create import check_numbers, created, levels, line
from .op import Array, Attrs, Call, Inferred, Op, define

# The constants of Threefry-2x32, and 2**32 divided by the golden ratio, which spreads the bits of
# stream numbers.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
GOLDEN = 0x9E3779B9


def threefry(xp: Any, key: tuple[Array, Array], counter: tuple[Array, Array]) -> Array:
    """Both output words of Threefry-2x32-20 for u32 arrays `counter` under the u32 `key`."""

    def word(value: int) -> Array:
        return xp.full((), value & 0xFFFFFFFF, uint32)

    k0, k1 = key
    keys = (k0, k1, xp.bit_xor(xp.bit_xor(k0, k1), word(PARITY)))
    x0, x1 = xp.add(counter[0], k0), xp.add(counter[1], k1)
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            x0 = xp.add(x0, x1)
            x1 = xp.bit_or(xp.shift_left(x1, word(r)), xp.shift_right(x1, word(32 - r)))
            x1 = xp.bit_xor(x1, x0)
        x0 = xp.add(x0, keys[(group + 1) % 3])
        x1 = xp.add(xp.add(x1, keys[(group + 2) % 3]), word(group + 1))
    return x0, x1


def _rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    key, *numbers = ins
    if key.shape != (2,) or key.dtype is not uint32:
        raise ShapeError("random_bits: the key is u32[2]", key=key, fix="see ts.seed")
    check_numbers("random_bits", numbers, attrs)
    wants = tuple(t.replicated() for t in ins)
    return Inferred(wants, (created("random_bits", uint32, attrs, key.mesh),))


def _linear(c: Call, dims: range, whole: Sequence[int], numbers: Sequence[Array]) -> Array:
    """The row-major index over `dims` of every local element, u32, broadcast to the block."""
    xp, t = c.xp, c.out
    total = xp.full((1,) * t.rank, 0, uint32)
    stride = 1
    for d in reversed(dims):
        shape = tuple(c.shape[d] if i == d else 1 for i in range(t.rank))
        step = xp.mul(xp.reshape(line(c, d, numbers), shape), xp.full((), stride, uint32))
        total = xp.add(total, step)
        stride *= whole[d]
    return total


def _local(c: Call, key: Array, *numbers: Array) -> Array:
    """32 random bits per element, from its global index as the counter (Salmon et al. 2011), the
    key, and the stream number."""
    xp, t = c.xp, c.out
    whole = list(t.shape)
    for d, count, _ in levels(c.attrs):
        whole[d] *= count
    # Trailing dims fill the low word of the counter; leading dims go to the high word, so that
    # neither overflows.
    cut = t.rank
    while cut > 0 and math.prod(whole[cut - 1 :]) <= 2**32:
        cut -= 1
    low, high = (_linear(c, d, whole, numbers) for d in (range(cut, t.rank), range(cut)))
    stream = xp.full((), (c.attrs["stream"] * GOLDEN) & 0xFFFFFFFF, uint32)
    k0 = xp.reshape(xp.slice(key, (0,), (1,), (1,)), ())
    k1 = xp.bit_xor(xp.reshape(xp.slice(key, (1,), (2,), (1,)), ()), stream)
    bits = threefry(xp, (k0, k1), (low, high))[0]
    return xp.broadcast_to(bits, c.shape)


random_bits = define(
    Op(
        "random_bits",
        _rule,
        _local,
        flops=lambda ins, outs, attrs: 80 * outs[0].size,
        creates=True,
        attrs="shape stream layout? blocks?",
        memory="expensive",
    )
)
