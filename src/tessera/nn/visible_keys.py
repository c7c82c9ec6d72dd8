"""Attention masks and positions of a batch whose sequences are padded, or packed several to a row.

>>> from tessera.lang.math.create import tensor
>>> told = token_masks("GPT", (1, 4), tensor([[0, 1, 1, 1]]), None)
>>> told["there"].numpy().tolist(), told["positions"].numpy().tolist()
([[False, True, True, True]], [[0, 0, 1, 2]])
>>> told = token_masks("GPT", (1, 5), None, tensor([[0, 1, 2, 0, 1]]))
>>> told["documents"].numpy().tolist()
[[0, 0, 0, 1, 1]]
"""

from __future__ import annotations

from ..core.dtypes import bool_, int32
from ..core.errors import DTypeError, ShapeError
from ..core.tensor_checks import integers
from ..lang.math import functions as F
from ..lang.record.index_bounds import check_ids
from ..lang.record.operands import as_tensor
from ..lang.value.tensor import Like, Tensor

Told = dict[str, Tensor]
"""Facts about the tokens of a batch [B, S]: "there" bool [B, S], False for padding; "documents"
i32[B, S], with one number per document; "positions" i32[B, S]; "scores" [B, H, S, S], any of them 1
but the last, a mask of all scores that replaces all others."""


def token_masks(
    name: str,
    shape: tuple[int, ...],
    attention_mask: Like | None,
    position_ids: Like | None,
    size: int | None = None,
) -> Told:
    """The masks and positions of tokens [B, S] from `attention_mask` and `position_ids`, as in
    transformers.

    A mask [B, S] is 0 or False for padding, 1 or True for a token; positions then count the tokens.
    A mask [B, H, S, S] is that of `nn.attention`, and replaces all other masks. Without a mask, a
    position that does not follow its predecessor begins a new document. Raises ShapeError or
    DTypeError if they do not fit; ShapeError also if the host knows that a position is not below
    `size`, or a mask's number not 0 or 1.
    """
    told: Told = {}
    at = None if position_ids is None else _positions(name, as_tensor(position_ids), shape, size)
    if attention_mask is not None:
        m = as_tensor(attention_mask)
        scores = (shape[0], m.shape[1] if m.ndim == 4 else 1, shape[1], shape[1])
        if m.shape == shape:
            check_token_mask(name, m)
            told["there"] = m if m.dtype is bool_ else m != 0
            if at is None:
                token_mask = told["there"].to(int32)
                at = (F.cumsum(token_mask, 1) - 1) * token_mask
        elif m.ndim == 4 and all(n in (1, s) for n, s in zip(m.shape, scores, strict=True)):
            told["scores"] = m
        else:
            raise ShapeError(
                f"{name}: the attention mask fits neither the tokens nor their scores",
                attention_mask=m.type,
                tokens=shape,
                fix=f"give {shape}, 0 for padding, or (B, 1, S, S), the keys that each query sees",
            )
    elif at is not None:
        told["documents"] = F.pad(F.cumsum((at[:, 1:] - at[:, :-1] != 1).to(int32), 1), (1, 0))
    return told if at is None else {**told, "positions": at}


def check_token_mask(name: str, m: Tensor) -> None:
    """Raises DTypeError or ShapeError if `m`, a mask per token, may have another meaning."""
    if m.dtype.is_float:  # of one that is added to scores, 0 would be padding
        raise DTypeError(
            f"{name}: a float attention mask of tokens may be one that is added to scores",
            attention_mask=m.type,
            fix="give truths: mask != 0 where 0 is padding, mask == 0 where -inf is",
        )
    if m.dtype is not bool_:
        check_ids(name, "attention mask", m, 2)


def _positions(name: str, at: Tensor, shape: tuple[int, ...], size: int | None) -> Tensor:
    integers(name, "the position ids", at.type)
    if at.shape not in (shape, (1, shape[1]), shape[1:]):
        raise ShapeError(
            f"{name}: the position ids do not fit the tokens",
            position_ids=at.type,
            tokens=shape,
            fix=f"give the place of each token, {shape}, or {shape[1:]} for all rows alike",
        )
    if size is not None:
        check_ids(name, "position", at, size)
    return F.broadcast_to(at.to(int32), shape)


def mask_of(told: Told, places: Tensor) -> Tensor | None:
    """The mask of scores besides causality; None if there is none. `places` i32[S] are the
    positions of the tokens in their rows; a layer with a "window" sees that far."""
    if "scores" in told:
        return told["scores"]
    seen = []
    if "window" in told:
        seen.append(_each(places, 0) - _each(places, 1) < told["window"])
    if "documents" in told:
        seen.append(_each(told["documents"], 0) == _each(told["documents"], 1))
    if "there" in told:
        seen.append(_each(told["there"], 1))
    mask = None
    for m in seen:
        mask = m if mask is None else mask & m
    return mask


def _each(x: Tensor, side: int) -> Tensor:
    """`x` [B, S] or [S], by query (side 0) or by key (side 1), reshaped to broadcast over the
    scores."""
    by = (1, 1) if x.ndim == 2 else ()
    seq = (x.shape[-1], 1) if side == 0 else (1, x.shape[-1])
    return x.reshape(*x.shape[:-1], *by[1:], *seq)
