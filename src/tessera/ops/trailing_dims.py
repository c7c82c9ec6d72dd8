"""Layouts of ops whose last dims must be whole: pixels of an image, rows of a matrix.

The leading dims follow an index, as in `propagate`; the last dims (the tail) are whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtypes import DType
from ..core.layout import Factor, TensorType
from .index_string import Index, propagate
from .op import Inferred


def propagate_heads(
    name: str,
    index: Index,
    ins: Sequence[TensorType],
    outs: Sequence[tuple[DType, tuple[int, ...]]],
    linear: str = "",
) -> Inferred:
    """`propagate` over the leading dims that `index` names; `outs` are (dtype, tail) per result.

    The dims of an argument after its letters are its tail, which is gathered if it is split.
    """
    heads = tuple(t.with_dims(t.dims[: len(k)]) for t, k in zip(ins, index.args, strict=True))
    got = propagate(name, index, heads, outs[0][0], linear=linear)
    wants = tuple(_with_tail(w, t.shape[w.rank :]) for w, t in zip(got.wants, ins, strict=True))
    head = got.outs[0]
    made = tuple(_with_tail(head.with_dtype(dtype), tail) for dtype, tail in outs)
    return Inferred(wants, made, got.reduces)


def _with_tail(head: TensorType, tail: Sequence[int]) -> TensorType:
    return head.with_dims((*head.dims, *((Factor(n),) for n in tail)))


def leading(ranks: Sequence[int]) -> Index:
    """The index of arguments with `ranks` leading dims each, which broadcast as in NumPy."""
    letters = tuple(f"_{i}" for i in range(max(ranks, default=0)))
    return Index(tuple(letters[len(letters) - r :] for r in ranks), letters)
