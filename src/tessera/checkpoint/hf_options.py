"""What does a config.json say? Its keys read with their defaults; what we cannot do is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.checks import shown, unfit
from ..core.errors import TesseraError, UsageError, fail
from ..core.kinds import is_whole
from ..nn.positions import Rope

ROPES = ("default", "linear", "llama3")


class Options:
    """The keys of a config.json; null is as good as absent. Raises UsageError."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number; without a default the key must be there."""
        value = self.get(key, default)
        if value is None:
            raise fail(
                UsageError,
                f"load_hf: config.json lacks {key!r}",
                fix="save the model's configuration anew with transformers",
            )
        if not is_whole(value) or value < 1:
            raise _wrong(key, value, "a whole number of at least 1")
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, known: Mapping[str, str]) -> str:
        """Our word for the value of `key`."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise unsupported(key, value, known)
        return known[value]

    def only(self, key: str, value: Any) -> None:
        """The one value of `key` that is supported, which is its default too."""
        if self.get(key, value) != value:
            raise unsupported(key, self.get(key), [value])

    def window(self, key: str, most: int, on: bool = True) -> int:
        """Tokens within which attention to the last `key` tokens is attention to all."""
        return min(most, self.size(key)) if on and self.get(key) is not None else most

    def rope(self) -> Rope:
        """The rates of rotary embeddings, in either form: rope_parameters, or rope_scaling."""
        found = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(found, dict) or any(isinstance(v, dict) for v in found.values()):
            raise unsupported("rope_parameters", found, ["one set for all layers"])
        inner = Options({"rope_theta": self.get("rope_theta"), **found})
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind not in ROPES:
            raise unsupported("rope_type", kind, ROPES)
        for options in (self, inner):
            options.only("partial_rotary_factor", 1.0)
        base = inner.number("rope_theta", 10000.0)
        if kind == "default":
            return Rope(base)
        factor = inner.number("factor", 1.0)
        if kind == "linear":
            return Rope(base, kind, factor)
        low, high = inner.number("low_freq_factor", 1.0), inner.number("high_freq_factor", 4.0)
        most = self.size("max_position_embeddings", 8192)
        original = inner.size("original_max_position_embeddings", most)
        return Rope(base, kind, factor, low, high, original)


def rope_options(rope: Rope) -> dict[str, Any]:
    """`rope` as rope_parameters."""
    out: dict[str, Any] = {"rope_theta": rope.base, "rope_type": rope.scaling}
    if rope.scaling != "default":
        out["factor"] = rope.factor
    if rope.scaling == "llama3":
        out |= {
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
            "original_max_position_embeddings": rope.original,
        }
    return out


def unsupported(key: str, value: object, known: Any) -> UsageError:
    return fail(
        UsageError,
        f"load_hf: config.json: {key!r} is {shown(value)}, which is not supported",
        fix="load a model with " + " or ".join(map(str, known)),
    )


def _wrong(key: str, value: object, wanted: str) -> TesseraError:
    return unfit("load_hf", f"config.json: {key!r}", value, f"give {wanted}")
