"""Which keys of a training configuration are about data, and what may they be?

>>> read_config({"batch_size": 8, "sequence_length": 128, "learning_rate": 1e-4}).packing
'concat'
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..core.checks import axes_of, is_whole, mapping, shown
from ..core.errors import UsageError, fail
from .sources import Reading


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The data keys of a configuration; `create_dataloader` has the table of what they mean."""

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
        """The lengths that a batch of documents may have; () where it has one."""
        if self.packing != "padded":
            return ()
        return tuple(sorted({*(self.sequence_buckets or ()), self.sequence_length}))

    @property
    def reading(self) -> Reading:
        """How its files are read."""
        return Reading(
            self.data_dtype, self.data_column, self.data_split, self.tokenizer, self.eos_token,
            self.data_cache,
        )  # fmt: skip


KEYS = tuple(field.name for field in fields(DataConfig))


def read_config(config: Any) -> DataConfig:
    """The data keys of `config`, checked. Other keys are passed over, but for those that look as if
    a data key was meant. Raises UsageError, which names all that is wrong."""
    mapping("dataloader", "the config", config, 'give a dict, e.g. {"sequence_length": 2048}')
    unknown = [key for key in config if isinstance(key, str) and _meant(key)]
    if unknown:
        raise fail(
            UsageError,
            "dataloader: unknown data keys " + ", ".join(map(repr, unknown)),
            [(key, f"is {_meant(key)!r} meant?") for key in unknown if _meant(key) in KEYS],
            fix="the data keys are " + ", ".join(KEYS),
        )
    given = {key: config[key] for key in KEYS if key in config}
    wrong = [(key, value) for key, value in given.items() if not _legal(key, value)]
    if wrong:
        raise fail(
            UsageError,
            "dataloader: " + ", ".join(f"{key} cannot be {shown(value)}" for key, value in wrong),
            fix="; ".join(f"{key} is {LEGAL[key][0]}" for key, _ in wrong),
        )
    if "sequence_length" not in given:
        raise fail(
            UsageError,
            "dataloader: the config has no sequence_length",
            fix='say how many tokens a row has, e.g. "sequence_length": 2048',
        )
    if buckets := given.get("sequence_buckets"):
        given["sequence_buckets"] = tuple(map(int, buckets))
        if given.get("packing") != "padded" or max(buckets) > given["sequence_length"]:
            raise fail(
                UsageError,
                "dataloader: sequence_buckets are lengths of padded documents, sequence_length at"
                " most",
                [
                    (key, given.get(key))
                    for key in ("packing", "sequence_buckets", "sequence_length")
                ],
                fix='say "packing": "padded", and let sequence_length be the longest',
            )
    for key in ("hosts", "data_axes"):
        if given.get(key) is not None:
            given[key] = (
                axes_of("", given[key]) if key == "data_axes" else tuple(map(int, given[key]))
            )
    # NumPy's numbers too, but a state must be plain.
    whole = {key: int(value) for key, value in given.items() if key != "data" and is_whole(value)}
    return DataConfig(**(given | whole))


def _meant(key: str) -> str:
    """The data key that `key` misspells; "unknown" if it begins like one and none is near; "" for
    keys that are right or are not about data."""
    if key in KEYS:
        return ""
    near = difflib.get_close_matches(key, [k for k in KEYS if abs(len(k) - len(key)) <= 2], 1, 0.85)
    if near:
        return near[0]
    return "unknown" if key.startswith("data_") and not key.startswith("data_parallel") else ""


Check = Callable[[Any], bool]


def _from(least: int, most: int = 2**31 - 1) -> Check:
    return lambda v: is_whole(v) and least <= v <= most


def _one_of(*words: str) -> Check:
    return lambda v: _text(v) and v in words


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(check: Check) -> Check:
    return lambda v: v is None or check(v)


def _pair(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(is_whole(x) for x in value)
        and 0 <= value[0] < value[1]
    )


def _axes(value: Any) -> bool:
    return _text(value) or (isinstance(value, (tuple, list)) and all(map(_text, value)))


def _number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, float)


LEGAL: dict[str, tuple[str, Check]] = {
    "sequence_length": ("a whole number from 1", _from(1)),
    "batch_size": ("a whole number from 1 to 2**24", _from(1, 2**24)),
    "global_batch_size": ("a whole number from 1 to 2**24", _from(1, 2**24)),
    "batch_size_per_gpu": ("a whole number from 1 to 2**24", _from(1, 2**24)),
    "seed": ("a whole number", is_whole),
    "shuffle": ("True or False", _flag),
    "packing": (
        '"concat", "documents" or "padded"', _one_of("concat", "documents", "padded"),
    ),
    "sequence_buckets": ("a list of whole numbers from 1", _or_none(
        lambda v: isinstance(v, (tuple, list)) and len(v) > 0 and all(map(_from(1), v)))),
    "segment_ids": ("True or False", _flag),
    "eos_token": ("a token", _or_none(_from(0))),
    "pad_token": ("a token", _or_none(_from(0))),
    "epochs": ("a whole number from 1, or math.inf", _or_none(
        lambda v: _number(v) and v >= 1 and (math.isinf(v) or v == int(v)))),
    "drop_last": ("True or False", _flag),
    "prefetch": ("a whole number from 0", _from(0)),
    "validation_fraction": ("from 0 up to, not including, 1", lambda v: _number(v) and 0 <= v < 1),
    "hosts": ("a pair (which, of how many), e.g. (0, 1)", _pair),
    "data_axes": ("a mesh axis, or a tuple of them", _or_none(_axes)),
    "data_dtype": (
        '"uint8", "uint16", "uint32" or "int32"',
        _or_none(_one_of("uint8", "uint16", "uint32", "int32")),
    ),
    "data_column": ("the name of a column", _or_none(_text)),
    "data_split": ("the name of a split", _or_none(_text)),
    "data_cache": ("a path", lambda v: isinstance(v, (str, Path))),
}  # fmt: skip


def _legal(key: str, value: Any) -> bool:
    return key not in LEGAL or LEGAL[key][1](value)
