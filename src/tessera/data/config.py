"""The data keys of a training configuration, and their legal values.

>>> read_config({"batch_size": 8, "sequence_length": 128, "learning_rate": 1e-4}).packing
'concat'
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core import value_checks as kinds
from ..core.checks import MOST, axes_of, mapping, shown
from ..core.errors import UsageError
from ..core.peers import fix_for
from .sources import Reading


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The data keys of a configuration; `create_dataloader` has the table of their meanings."""

    sequence_length: int
    batch_size: int | None = None
    global_batch_size: int | None = None
    batch_size_per_gpu: int | None = None
    data: Any = None
    seed: int = 0
    shuffle: bool = True
    packing: str = "concat"
    sequence_buckets: tuple[int, ...] | None = None
    segment_ids: bool = False
    tokenizer: Any = None
    eos_token: int | None = None
    pad_token: int | None = None
    epochs: float | None = None
    drop_last: bool = True
    prefetch: int = 2
    validation_fraction: float = 0.0
    hosts: tuple[int, int] = (0, 1)
    data_axes: tuple[str, ...] | None = None
    data_dtype: str | None = None
    data_column: str | None = None
    data_split: str | None = None
    data_cache: str | Path = "runs/.cache"

    @property
    def buckets(self) -> tuple[int, ...]:
        """The lengths that a batch of documents may have; () if there is only one."""
        if self.packing != "padded":
            return ()
        return tuple(sorted({*(self.sequence_buckets or ()), self.sequence_length}))

    @property
    def reading(self) -> Reading:
        """The settings for reading its files."""
        return Reading(
            self.data_dtype, self.data_column, self.data_split, self.tokenizer, self.eos_token,
            self.data_cache,
        )  # fmt: skip


KEYS = tuple(field.name for field in fields(DataConfig))


def read_config(config: Any) -> DataConfig:
    """The data keys of `config`, checked. Other keys are ignored, except misspelt data keys and
    those of peer libraries. Raises UsageError, which names all that is wrong."""
    mapping("dataloader", "the config", config, 'give a dict, e.g. {"sequence_length": 2048}')
    meant = {key: _meant(key) for key in config if isinstance(key, str)}
    if "sequence_length" in config:
        # These keys may be sizes of a model. ("rank" may be LoRA's; a configuration with ranks of
        # processes also has their number.)
        meant = {k: m for k, m in meant.items() if fix_for("loader", k) != "sequence_length"}
    unknown = {key: m for key, m in meant.items() if m}
    if unknown:
        raise UsageError(
            "dataloader: unknown data keys " + ", ".join(map(repr, unknown)),
            rows=[
                (key, f"is {m!r} meant?" if m in KEYS else m)
                for key, m in unknown.items()
                if m != "unknown"
            ],
            fix="the data keys are " + ", ".join(KEYS),
        )
    values = {key: config[key] for key in KEYS if key in config}
    wrong = [(key, value) for key, value in values.items() if not _legal(key, value)]
    if wrong:
        raise UsageError(
            "dataloader: " + ", ".join(f"{key} cannot be {shown(value)}" for key, value in wrong),
            fix="; ".join(f"{key} is {LEGAL[key][0]}" for key, _ in wrong),
        )
    if "sequence_length" not in values:
        raise UsageError(
            "dataloader: the config has no sequence_length",
            fix='say how many tokens a row has, e.g. "sequence_length": 2048',
        )
    if buckets := values.get("sequence_buckets"):
        values["sequence_buckets"] = tuple(map(int, buckets))
        if values.get("packing") != "padded" or max(buckets) > values["sequence_length"]:
            raise UsageError(
                "dataloader: sequence_buckets are lengths of padded documents, sequence_length at"
                " most",
                rows=[
                    (key, values.get(key))
                    for key in ("packing", "sequence_buckets", "sequence_length")
                ],
                fix='say "packing": "padded", and let sequence_length be the longest',
            )
    for key in ("hosts", "data_axes"):
        if values.get(key) is not None:
            values[key] = (
                axes_of("", values[key]) if key == "data_axes" else tuple(map(int, values[key]))
            )
    # NumPy's numbers become Python's, because a state must be plain.
    plain = {key: value.item() for key, value in values.items() if isinstance(value, np.generic)}
    return DataConfig(**(values | plain))


def _meant(key: str) -> str:
    """The data key that `key` misspells or that it is called in a peer library, or a fix in place
    of it; "unknown" if it only begins like a data key; "" for legal keys and keys about other
    things."""
    if key in KEYS:
        return ""
    if found := fix_for("loader", key):
        return str(found)
    near = difflib.get_close_matches(key, [k for k in KEYS if abs(len(k) - len(key)) <= 2], 1, 0.85)
    if near:
        return near[0]
    return "unknown" if key.startswith("data_") and not key.startswith("data_parallel") else ""


_ROWS = kinds.whole_numbers(1, 2**24)
_TOKEN: kinds.Kind = ("a token", kinds.or_none(kinds.whole_numbers(0, MOST))[1])
LEGAL: dict[str, kinds.Kind] = {
    "sequence_length": kinds.whole_numbers(1, MOST),
    "batch_size": _ROWS,
    "global_batch_size": _ROWS,
    "batch_size_per_gpu": _ROWS,
    "seed": kinds.whole_numbers(),
    "shuffle": kinds.FLAG,
    "packing": kinds.choices("concat", "documents", "padded"),
    "sequence_buckets": ("a list of whole numbers from 1", lambda v: v is None or (
        kinds.is_list(v, kinds.whole_numbers(1, MOST)[1]) and len(v) > 0)),
    "segment_ids": kinds.FLAG,
    "eos_token": _TOKEN,
    "pad_token": _TOKEN,
    "epochs": ("a whole number from 1, or math.inf", lambda v: v is None or (
        kinds.is_number(v) and v >= 1 and (math.isinf(v) or v == int(v)))),
    "drop_last": kinds.FLAG,
    "prefetch": kinds.whole_numbers(0, MOST),
    "validation_fraction": kinds.numbers(least=0, below=1),
    "hosts": ("a pair (which, of how many), e.g. (0, 1)",
              lambda v: kinds.is_list(v, kinds.is_whole, 2) and 0 <= v[0] < v[1]),
    "data_axes": ("a mesh axis, or a tuple of them",
                  lambda v: v is None or kinds.is_string(v) or kinds.is_list(v, kinds.is_string)),
    "data_dtype": kinds.or_none(kinds.choices("uint8", "uint16", "uint32", "int32")),
    "data_column": ("the name of a column", kinds.or_none(kinds.STRING)[1]),
    "data_split": ("the name of a split", kinds.or_none(kinds.STRING)[1]),
    "data_cache": ("a path", lambda v: isinstance(v, (str, Path))),
}  # fmt: skip


def _legal(key: str, value: Any) -> bool:
    return key not in LEGAL or LEGAL[key][1](value)
