"""Index arithmetic between blocks of our weights and tensors of a file, in both directions.

One of our weights consists of pieces of tensors in a file. Dims are named by letters, so that two
strings describe the difference of layouts: the q of a Llama is ("hs", "d") in the file, with heads
and their size in one dim, and is at "d0hs" in our qkv [d, 3, h, s], index 0 of dim 1.

>>> q = Piece("q", ("hs", "d"), "d0hs", {"h": 2, "s": 2, "d": 3})
>>> file = np.arange(12).reshape(4, 3)
>>> out = np.zeros((3, 3, 1, 2), int)  # the block of head 1 alone
>>> q.read(lambda at: file[at], (slice(0, 3), slice(0, 3), slice(1, 2), slice(0, 2)), out)
>>> out[:, 0, 0].tolist()
[[6, 9], [7, 10], [8, 11]]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Block = tuple[slice, ...]
Get = Callable[[Block], Array]


@dataclass(frozen=True, eq=False)
class Piece:
    """The tensor `name` of a file, dims `theirs`, as a part of our weight, dims `ours`.

    A number in `ours` is the index of the piece in that dim. If one tensor of the file has several
    pieces, `places` are this one's indices in the dim that ends in `ending`, which is `total` long.
    """

    name: str
    theirs: tuple[str, ...]
    ours: Sequence[str]
    sizes: Mapping[str, int]
    places: Array | None = None
    total: int = 0
    ending: str = "s"

    def _fused(self, letters: str) -> bool:
        return self.places is not None and letters.endswith(self.ending)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the file's tensor."""
        return tuple(
            self.total if self._fused(d) else prod(self.sizes[c] for c in d) for d in self.theirs
        )

    def _grid(self, letters: str) -> Array:
        """For each index in our dims `letters`, the index in the file's dim."""
        if self.places is not None and self._fused(letters):
            return self.places
        shape = tuple(self.sizes[c] for c in letters)
        return np.arange(prod(shape)).reshape(shape)

    def read(self, get: Get, block: Block, out: Array) -> None:
        """Copies the piece's part of our `block` into `out`; `get` reads only that part."""
        where: dict[str, slice] = {}
        at: list[Any] = []
        for c, cut in zip(self.ours, block, strict=True):
            if c.isdigit():
                if not cut.start <= int(c) < cut.stop:
                    return
                at.append(int(c) - cut.start)
            else:
                where[c] = cut
                at.append(slice(None))
        grids = [self._grid(d)[tuple(where[c] for c in d)] for d in self.theirs]
        parts = [_runs(g.ravel()) for g in grids]
        if all(len(runs) == 1 for runs in parts):
            piece_values = get(tuple(runs[0][0] for runs in parts))
        else:
            piece_values = np.empty([g.size for g in grids], out.dtype)
            for runs in product(*parts):
                piece_values[tuple(to for _, to in runs)] = get(tuple(frm for frm, _ in runs))
        shaped = piece_values.reshape([n for g in grids for n in g.shape])
        out[tuple(at)] = shaped.transpose(self._order())

    def write(self, value: Array, file: Array) -> None:
        """Copies the piece's part of our whole `value` into the file's tensor."""
        mine = value[tuple(int(c) if c.isdigit() else slice(None) for c in self.ours)]
        back = mine.transpose(np.argsort(self._order()))
        grids = [self._grid(d).ravel() for d in self.theirs]
        file[np.ix_(*grids)] = back.reshape([g.size for g in grids])

    def _order(self) -> list[int]:
        letters = "".join(self.theirs)
        return [letters.index(c) for c in self.ours if not c.isdigit()]


def _runs(places: Array) -> list[tuple[slice, slice]]:
    """`places` as (slice of the file, slice of the result), each as long as possible."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    bounds = [0, *map(int, ends), len(places)]
    return [
        (slice(int(places[a]), int(places[a]) + b - a), slice(a, b)) for a, b in pairwise(bounds)
    ]
