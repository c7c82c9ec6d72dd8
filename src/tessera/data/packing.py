"""Rows of batches from documents: cut from one stream, packed, or one document per row.

`Windows` reads the tokens as one stream and cuts it every `length` tokens. `Packed` packs whole
documents so that few places stay empty, and no label crosses into the next document; with `buckets`
each document has its own row, and a batch has the shortest bucket length that holds it.

>>> source = TokenSource([np.array([5, 6, 0, 7, 8, 9, 0, 4, 0])], eos=0)
>>> Windows(source, 4).rows(np.array([0, 1]))["labels"].tolist()
[[6, 0, 7, 8], [9, 0, 4, 0]]
>>> rows = Packed(source, 6, segments=True).rows(np.array([0, 1]))
>>> rows["input_ids"].tolist()
[[5, 6, 0, 0, 0, 0], [7, 8, 9, 0, 4, 0]]
>>> rows["labels"].tolist()
[[6, 0, -100, -100, -100, -100], [8, 9, 0, -100, 0, -100]]
>>> rows["segment_ids"].tolist()
[[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 2, 2]]
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from .sources import TokenSource

Rows = dict[str, NDArray[np.int32]]
IGNORED = -100
"""The label of a place without a label, which `nn.cross_entropy` ignores."""


class Samples(Protocol):
    """A numbered set of rows; those of one batch have the same length."""

    count: int

    def rows(self, which: NDArray[np.int64], batch: NDArray[np.int64] | None = None) -> Rows:
        """The samples `which`, as int32 [len(which), length]; -1 is an empty row. `batch` are all
        samples of the batch, including those of other loaders; None: `which`."""


class Windows:
    """The stream cut every `length` tokens; a label is the token after its input.

    With `segments`, documents are separated by the source's `eos`, which belongs to the document
    that it closes.
    """

    def __init__(
        self, source: TokenSource, length: int, pad: int = 0, segments: bool = False
    ) -> None:
        self.source, self.length, self.pad, self.segments = source, length, pad, segments
        self.count = max(0, (source.size - 1) // length)
        if segments and source.eos is None:
            raise UsageError(
                "dataloader: segment_ids needs to know where documents end",
                data=source.name,
                fix="give eos_token, the token that closes a document",
            )

    def rows(self, which: NDArray[np.int64], batch: NDArray[np.int64] | None = None) -> Rows:
        """The rows of the samples `which` (-1: an empty row): `length` tokens each, with the next
        tokens as labels; with `segments` also the number of the document and the position in it."""
        read, length = self.source.read, self.length
        ids, labels = _empty(which.size, length, self.pad)
        row = np.empty(length + 1, np.int32)
        for i, sample in enumerate(which.tolist()):
            if sample >= 0:
                read(sample * length, row)
                ids[i], labels[i] = row[:-1], row[1:]
        if not self.segments:
            return {"input_ids": ids, "labels": labels}
        place = np.arange(length, dtype=np.int32)
        opens = np.zeros(ids.shape, bool)
        opens[:, 1:] = ids[:, :-1] == self.source.eos
        segments = np.cumsum(opens, 1, dtype=np.int32) + np.int32(1)
        positions = place - np.maximum.accumulate(np.where(opens, place, 0), 1)
        filled = which[:, None] < 0
        return {
            "input_ids": ids,
            "labels": labels,
            "segment_ids": np.where(filled, 0, segments).astype(np.int32),
            "positions": np.where(filled, 0, positions).astype(np.int32),
        }


class Packed:
    """Whole documents in as few rows as best-fit-decreasing finds; a longer one is cut first.

    The last token of a document has no label. Every other token has, even before a cut, so each
    token but a document's first is the label of exactly one place. Unused places hold `pad` and
    have segment 0. (After Krell et al., 2021: documents of equal length are packed at once, so the
    time grows with the number of lengths.) With `buckets`, lengths of which the largest is
    `length`, nothing is packed.
    """

    def __init__(
        self,
        source: TokenSource,
        length: int,
        pad: int = 0,
        segments: bool = False,
        buckets: tuple[int, ...] = (),
    ) -> None:
        self.source, self.length, self.pad, self.segments = source, length, pad, segments
        self.buckets = np.array(sorted(buckets), np.int64)
        starts, sizes, closes = _pieces(source.document_ends(), length)
        window = np.arange(sizes.size) if buckets else best_fit(sizes, length)
        # Rows are in the order of their first document, and the documents of a row in data order.
        _, first = np.unique(window, return_index=True)
        window = np.argsort(np.argsort(first))[window] if window.size else window
        order = np.argsort(window, kind="stable")
        self._starts, self._sizes, self._closes = starts[order], sizes[order], closes[order]
        self.count = len(first)
        self._bounds = np.searchsorted(window[order], np.arange(self.count + 1))

    def _length(self, batch: NDArray[np.int64]) -> int:
        if not self.buckets.size:
            return self.length
        longest = self._sizes[batch[batch >= 0]].max(initial=0)
        return int(self.buckets[np.searchsorted(self.buckets, longest)])

    def rows(self, which: NDArray[np.int64], batch: NDArray[np.int64] | None = None) -> Rows:
        """The rows of the samples `which` (-1: an empty row): each sample's documents side by side,
        padded to the length of the batch. A label never crosses into the next document."""
        length = self._length(which if batch is None else batch)
        ids, labels = _empty(which.size, length, self.pad)
        segments, positions = np.zeros_like(ids), np.zeros_like(ids)
        counting = np.arange(length, dtype=np.int32)
        row = np.empty(length + 1, np.int32)
        for i, sample in enumerate(which.tolist()):
            at = 0
            if sample < 0:
                continue
            first, last = self._bounds[sample : sample + 2].tolist()
            for k in range(first, last):
                n, closes = int(self._sizes[k]), bool(self._closes[k])
                piece = row[: n + (not closes)]
                self.source.read(int(self._starts[k]), piece)
                ids[i, at : at + n] = piece[:n]
                labels[i, at : at + piece.size - 1] = piece[1:]
                if self.segments:
                    segments[i, at : at + n] = k - first + 1
                    positions[i, at : at + n] = counting[:n]
                at += n
        if not self.segments:
            return {"input_ids": ids, "labels": labels}
        return {
            "input_ids": ids, "labels": labels, "segment_ids": segments, "positions": positions,
        }  # fmt: skip


def _empty(rows: int, length: int, pad: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return np.full((rows, length), pad, np.int32), np.full((rows, length), IGNORED, np.int32)


def _pieces(
    ends: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """(start, size, True if a document ends there) of documents cut into at most `length`."""
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    cuts = -(-(ends - begins) // length)
    of = np.repeat(np.arange(ends.size), cuts)
    nth = np.arange(of.size) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    starts = begins[of] + nth * length
    sizes = np.minimum(length, ends[of] - starts)
    closes = starts + sizes == ends[of]
    used = ~(closes & (sizes == 1))  # a single last token has no label
    return starts[used], sizes[used], closes[used]


def best_fit(sizes: NDArray[Any], length: int) -> NDArray[np.int64]:
    """A row for each piece: longest first, into the row with the least remaining room.

    >>> best_fit(np.array([3, 5, 2, 4, 6]), 8).tolist()
    [1, 1, 0, 2, 0]
    """
    window = np.empty(sizes.size, np.int64)
    room: dict[int, list[NDArray[np.int64]]] = {}
    open_rooms = 0  # bit r: there are rows with room for r more
    made = 0
    order = np.argsort(-sizes, kind="stable")
    cuts = np.flatnonzero(np.diff(sizes[order])) + 1
    for alike in np.split(order, cuts) if sizes.size else []:
        size = int(sizes[alike[0]])
        while alike.size:
            fitting = open_rooms >> size
            if fitting:
                r = size + (fitting & -fitting).bit_length() - 1
                rows = np.concatenate(room.pop(r))
                open_rooms ^= 1 << r
            else:
                r = length
                rows = np.arange(made, made - (-alike.size // (length // size)))
                made = int(rows[-1]) + 1
            each = r // size  # having taken one piece, a row is still the tightest for the next
            used, rest = rows[: -(-alike.size // each)], rows[-(-alike.size // each) :]
            taken = min(alike.size, used.size * each)
            window[alike[:taken]] = np.repeat(used, each)[:taken]
            alike = alike[taken:]
            in_last = taken - each * (used.size - 1)
            for left, part in (
                (r, rest), (r - each * size, used[:-1]), (r - in_last * size, used[-1:]),
            ):  # fmt: skip
                if left and part.size:
                    room.setdefault(left, []).append(part)
                    open_rooms |= 1 << left
    return window
