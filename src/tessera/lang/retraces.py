"""Why is a function recorded again and again? Which argument changes, and what is done about it."""

from __future__ import annotations

from collections.abc import Sequence

from .cache_entry import Entry

_FEW = 3


def changing(entries: Sequence[Entry], names: Sequence[str]) -> str:
    """What differs between `entries`, the oldest first, whose leaves bear `names`; and the fix."""
    seen: dict[int, dict[str, bool]] = {}
    for e in entries:
        leaves = [(i, str(t), True) for i, t in zip(e.dynamic, e.types, strict=True)]
        leaves += [(i, _text(v), False) for i, v in zip(e.static, e.values, strict=True)]
        for i, text, is_tensor in leaves:
            seen.setdefault(i, {}).setdefault(text, is_tensor)
    rows = [(i, texts) for i, texts in sorted(seen.items()) if len(texts) > 1 and i < len(names)]
    if not rows:
        return (
            "its settings, or something that it finds outside of itself, keep changing; give it"
            " what changes as an argument, a number as a tensor, ts.tensor(x)"
        )
    said = " and ".join(f"{names[i]} was {', then '.join(texts)}" for i, texts in rows[:_FEW])
    if len(rows) > _FEW:
        said += f", and {len(rows) - _FEW} more"
    if all(t for _, texts in rows for t in texts.values()):
        return f"{said}; give tensors of few shapes, such as lengths that are padded"
    return f"{said}; pass a number that changes as a tensor, ts.tensor(x)"


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
