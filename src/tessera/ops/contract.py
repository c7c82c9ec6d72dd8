"""`contract`, a sum of products: matmul, linear, einsum and all their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from ..core.errors import ShapeError
from ..core.layout import TensorType
from ..core.tensor_checks import one_dtype
from .elementwise import FIELD, need
from .index_string import Index, contraction_flops, letter_sizes, parse_index, propagate
from .op import Array, Attrs, Batched, Build, Call, Inferred, Op, define


def index_of(ins: Sequence[TensorType], attrs: Attrs) -> Index:
    return parse_index(attrs["index"], tuple(t.rank for t in ins))


def _rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """Requires equal sizes of each letter; the layout follows from the index string."""
    need("contract", ins, FIELD)
    index = index_of(ins, attrs)
    sizes: dict[str, int] = {}
    for letters, t in zip(index.args, ins, strict=True):
        for k, n in zip(letters, t.shape, strict=True):
            if sizes.setdefault(k, n) != n:
                raise ShapeError(
                    f"contract {attrs['index']!r}: sizes {sizes[k]} and {n} of dim {k!r} differ",
                    rows=[(f"arg {i}", t) for i, t in enumerate(ins)],
                    fix="make the two dims equal",
                )
    one_dtype("contract", ins)
    return propagate("contract", index, ins, attrs.get("dtype", ins[0].dtype), linear="each")


def _local(c: Call, *args: Array) -> Array:
    index = index_of(c.ins, c.attrs)
    return c.xp.contract(index.args, index.out, args, c.out.dtype)


def _grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    """The gradient of each argument: the contraction of `g` with all other arguments."""
    index = index_of([a.type for a in n.args], n.attrs)
    if g.type.dtype is not n.args[0].type.dtype:
        g = b("cast", g, dtype=n.args[0].type.dtype)
    sizes = letter_sizes("contract", index, [a.type for a in n.args])
    out = []
    for i, (arg, letters) in enumerate(zip(n.args, index.args, strict=True)):
        others = [(a, x) for j, (a, x) in enumerate(zip(n.args, index.args, strict=True)) if j != i]
        available = set(index.out).union(*(x for _, x in others))
        # A letter of this argument alone was summed, so the gradient is constant along it.
        summed_first = tuple(k for k in letters if k in available)
        text = Index((index.out, *(x for _, x in others)), summed_first)
        d = b("contract", g, *(a for a, _ in others), index=spell(text), dtype=arg.type.dtype)
        if summed_first != letters:
            shape = tuple(sizes[k] if k in available else 1 for k in letters)
            d = b("broadcast_to", b("reshape", d, shape=shape), shape=arg.type.shape)
        out.append(d)
    return out


def spell(index: Index) -> str:
    """The index as text with one character per letter (dims of `...` get unused ones)."""
    names = dict.fromkeys(k for group in (*index.args, index.out) for k in group)
    free = iter(c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in names)
    one = {k: k if len(k) == 1 else next(free) for k in names}
    text = Index(
        tuple(tuple(one[k] for k in arg) for arg in index.args), tuple(one[k] for k in index.out)
    )
    return text.text()


def _flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    index = index_of(ins, attrs)
    return contraction_flops(index, letter_sizes("contract", index, ins))


def _batch(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched:
    """The index with one more letter, in front of each batched argument and of the result."""
    given, _, out = attrs["index"].partition("->")
    letter = next(k for k in ascii_letters if k not in attrs["index"])
    parts = zip(given.split(","), which, strict=True)
    text = ",".join(f"{letter} {part}" if has else part for part, has in parts)
    return Batched({**attrs, "index": f"{text}->{letter} {out}"})


contract = define(
    Op("contract", _rule, _local, _grad, flops=_flops, attrs="index dtype?", batch=_batch,
       memory="product", invariance="sums", linear="product")
)  # fmt: skip
MATMUL = "... m k, k n -> ... m n"
BATCHED_MATMUL = "... m k, ... k n -> ... m n"
