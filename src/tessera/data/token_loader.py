"""`TokenLoader`: batches of tokens; `create_dataloader` makes one.

>>> from tessera.data import create_dataloader
>>> loader = create_dataloader({"data": np.arange(100), "batch_size": 4, "sequence_length": 8})
>>> batch = next(loader)
>>> batch["input_ids"].shape, batch["labels"].dtype
((4, 8), i32)
>>> loader.state_dict()["sample"], len(loader)
(4, 3)
>>> loader.close()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..core.errors import UsageError
from ..lang.value.tensor import Tensor
from .config import DataConfig
from .loader import Loader, Made, Settings, in_order
from .packing import Packed, Rows, Samples, Windows
from .sources import TokenSource
from .split import Split


class TokenLoader(Loader[dict[str, Tensor]]):
    """Batches of tokens, for some epochs or without end; `create_dataloader` makes one.

    One `for` loop is one epoch unless the config sets `epochs`. If a loop is left early, the next
    one continues there, so a run loses no data; over validation data it restarts. A loop over a
    loader that has ended raises UsageError; a loop that continues without shuffling gives a
    LoaderWarning once. Use it in a `with`, or `close` it, to end its thread early.
    """

    _begin_again = "loader.validation() gives a loader that begins again each time"
    _unmade = "are the files still there and whole?"

    def __init__(
        self,
        source: TokenSource,
        config: DataConfig,
        batch_size: int,
        split: Split,
        part: str = "training",
    ) -> None:
        self._config = config
        cut = _cut(source, config)
        used = source.part(cut, source.size) if part == "validation" else source.part(0, cut)
        pad = config.pad_token
        if pad is None:
            pad = 0 if source.eos is None else source.eos
        how = (used, config.sequence_length, pad, config.segment_ids)
        self._samples: Samples = (
            Windows(*how) if config.packing == "concat" else Packed(*how, config.buckets)
        )
        count = self._samples.count
        if count < (batch_size if config.drop_last else 1):
            raise UsageError(
                f"dataloader: the {part} data hold {count} rows of "
                f"{config.sequence_length} tokens, a batch takes {batch_size}",
                data=source,
                fix="take more data, a smaller batch or shorter rows, or say drop_last=False",
            )
        # The facts that determine the order of samples. The batch size is not one of them.
        facts = {
            "data": used.fingerprint(),
            "tokens": used.size,
            "samples": count,
            "part": part,
            "packing": config.packing,
            "sequence_length": config.sequence_length,
            "shuffle": config.shuffle,
            "seed": config.seed if config.shuffle else None,
        }
        settings = Settings(
            batch_size, config.shuffle, config.seed, config.epochs, config.drop_last,
            config.prefetch, begins_anew=part == "validation",
        )  # fmt: skip
        super().__init__(source, count, settings, split, facts)

    def _made(self) -> Iterator[Made]:
        samples, rows = self._samples, self._split.rows(self.batch_size)
        return in_order(
            lambda batch: samples.rows(batch[rows], batch), samples.count, self._settings,
            self._epoch, self._sample,
        )  # fmt: skip

    def _place(self, rows: Rows) -> dict[str, Tensor]:
        return {name: self._split.tensor(x, self.batch_size) for name, x in rows.items()}

    def __repr__(self) -> str:
        return (
            f"TokenLoader({self._rows_text()} × {self._config.sequence_length} tokens, "
            f"{len(self):,} batches an epoch, {self._place_text()})"
        )

    def validation(self) -> TokenLoader:
        """A loader of the part that `validation_fraction` sets aside, in the order of the data.

        Each `for` loop is one pass from the beginning; the last batch is filled up with rows whose
        labels are all -100. Raises UsageError if nothing is set aside.
        """
        if not self._config.validation_fraction:
            raise UsageError(
                "dataloader: no data are set aside for validation",
                fix='say how much in the config, e.g. "validation_fraction": 0.05',
            )
        config = replace(self._config, shuffle=False, drop_last=False, epochs=None)
        return TokenLoader(self._source, config, self.batch_size, self._split, "validation")


def _cut(source: TokenSource, config: DataConfig) -> int:
    """The token at which validation begins: the end of a document, if ends are known."""
    if not config.validation_fraction:
        return source.size
    cut = int(source.size * (1.0 - config.validation_fraction))
    if source.ends is None and config.packing == "concat":
        return cut
    ends = source.document_ends()
    return int(ends[min(int(np.searchsorted(ends, cut)), ends.size - 1)])
