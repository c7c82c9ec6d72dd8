"""Texts of a generation: prompts as ids or as text, the ends of a text, and what a caller gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.checks import unfit
from ..core.errors import UsageError
from ..core.value_checks import is_whole

TOKENIZER = "give tokenizer=, an object with encode(text) and decode(ids)"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Ends the text of ids whose last character has further bytes."""


@dataclass(slots=True)
class Text:
    """One text: its prompt as `ids`, and as `text` if it came as one; the ids that are `new`.

    It is `closed` before the first of the strings `stops`.
    """

    ids: list[int]
    text: str | None
    tokenizer: Any
    stops: tuple[str, ...]
    new: list[int] = field(default_factory=list)
    closed: bool = False
    ended: str | None = None  # the continuation before a stop string
    told: int = 0  # ids or characters that `piece` has returned

    def add(self, ids: Sequence[int]) -> None:
        """Adds the ids `ids`; the text is closed by the first with which it has a stop string."""
        if not self.stops:
            self.new += ids
            return
        for i in ids:
            self.new.append(i)
            so_far = self._continuation(len(self.new))
            found = [at for s in self.stops if (at := so_far.find(s)) >= 0]
            if found:
                self.ended, self.closed = so_far[: min(found)], True
                self.new = self.new[: self._count(min(found))]
                return

    def piece(self, last: bool) -> list[int] | str:
        """Returns the ids, or the text, added since the last call. Until the `last` call it holds
        back a possible beginning of a character or of a stop string."""
        if self.text is None and not self.stops:
            part: list[int] | str = self.new[self.told :]
            self.told = len(self.new)
            return part
        so_far = self.continuation
        most = len(so_far)
        if not last and not self.closed:
            most = len(so_far.rstrip(INCOMPLETE))
            begun = (n for s in self.stops for n in range(len(s)) if so_far.endswith(s[:n]))
            most = max(min(most, len(so_far) - max(begun, default=0)), 0)
        if self.text is None:
            most = len(self.new) if most == len(so_far) else self._count(most)
        part = (self.new if self.text is None else so_far)[self.told : max(most, self.told)]
        self.told = max(most, self.told)
        return part

    @property
    def result(self) -> list[int] | str:
        """The prompt and its continuation, as ids or as text."""
        return self.ids + self.new if self.text is None else self.text + self.continuation

    @property
    def continuation(self) -> str:
        """The text of the new ids, up to a stop string."""
        return self._continuation(len(self.new)) if self.ended is None else self.ended

    def _continuation(self, count: int) -> str:
        """The text of the first `count` new ids. It is decoded behind the prompt, as the text of an
        id may depend on those before it."""
        before = len(self.tokenizer.decode(self.ids))
        text: str = self.tokenizer.decode(self.ids + self.new[:count])
        return text[before:]

    def _count(self, length: int) -> int:
        """The number of new ids whose text has at most `length` characters."""
        count = len(self.new)
        while count and len(self._continuation(count)) > length:
            count -= 1
        return count


def texts_of(prompt: Any, tokenizer: Any, stops: tuple[str, ...], most: int) -> list[Text] | Text:
    """The prompt, or a list of several, as texts. A str is one text; so is a sequence of ids. A
    sequence of texts or of sequences is several. Raises UsageError if it is anything else, if an id
    is not from 0 to `most`, or if there is no tokenizer for a text."""
    kind = f"the ids of one text, from 0 to {most}, or a list of those of several"
    if is_several(prompt):
        return [
            _text(f"prompt {i}", p, tokenizer, stops, most, f"give {kind}")
            for i, p in enumerate(prompt)
        ]
    return _text("the prompt", prompt, tokenizer, stops, most, f"give {kind}")


def is_several(prompt: Any) -> bool:
    """Returns whether `prompt` is a sequence of texts or of sequences."""
    if isinstance(prompt, (list, tuple)):
        return bool(prompt) and (isinstance(prompt[0], str) or hasattr(prompt[0], "__len__"))
    return getattr(prompt, "ndim", 1) == 2


def _text(
    name: str, value: Any, tokenizer: Any, stops: tuple[str, ...], most: int, fix: str
) -> Text:
    text = value if isinstance(value, str) else None
    if text is not None and tokenizer is None:
        raise unfit("generate", name, value, f"{TOKENIZER}, or {fix.removeprefix('give ')}")
    ids = ids_of(name, value if text is None else encoded(tokenizer, text), most, fix)
    if not ids:
        raise UsageError(f"generate: {name} has no token", fix="give at least one")
    return Text(ids, text, tokenizer, stops)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The ids of `text`: what `encode` returns, or its `ids`."""
    found = tokenizer.encode(text)
    return [int(i) for i in getattr(found, "ids", found)]


def stops_of(stop: Any, tokenizer: Any, most: int) -> tuple[list[int], tuple[str, ...]]:
    """(The ids, the strings) before which a text ends. `stop` is an id, a string, or several of
    both. Raises UsageError if it is anything else, or if there is no tokenizer for a string."""
    several = list(stop) if isinstance(stop, (list, tuple)) else [stop]
    strings = tuple(s for s in several if isinstance(s, str))
    fix = f"give an id from 0 to {most}, or several"
    if strings and (tokenizer is None or "" in strings):
        raise unfit("generate", "stop", stop, f"{fix}; for the text of an end {TOKENIZER}")
    rest: Any = stop
    if stop is None or strings:
        rest = [s for s in several if s is not None and not isinstance(s, str)]
    return ids_of("stop", rest, most, fix, one=True), strings


def ids_of(argument: str, value: Any, most: int, fix: str, one: bool = False) -> list[int]:
    """The ids in `value`, which may be a single id if `one`. Raises UsageError if one of them is no
    whole number from 0 to `most`."""
    try:
        is_one = hasattr(value, "__array__") or is_whole(value)
        found = np.asarray(value if is_one else list(value))
    except (TypeError, ValueError):  # not of several, or of lists that differ in length
        raise unfit("generate", argument, value, fix) from None
    if found.ndim not in ((0, 1) if one else (1,)) or (found.size and found.dtype.kind not in "iu"):
        raise unfit("generate", argument, value, fix)
    ids = [int(i) for i in found.reshape(-1)]
    for at, i in enumerate(ids):
        if not 0 <= i <= most:
            raise UsageError(f"generate: {argument} has the id {i} at [{at}]", fix=fix)
    return ids


__all__ = ["Text", "stops_of", "texts_of"]
