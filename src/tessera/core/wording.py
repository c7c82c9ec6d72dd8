"""Numbers and lists in words, as errors say them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> ranks_text([0]), ranks_text([1, 2, 5, 6, 7])
    ('rank 0', 'ranks 1, 2, 5 to 7')
    """
    runs: list[list[int]] = []
    for r in ranks:
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    texts = [f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


DUMP_VERSION = 1  # of what the flight recorder writes


def record_text(program: str, step: str, what: str, at: str) -> str:
    """What a rank did, in words.

    >>> record_text("train", "s3", "all_reduce", "train.py:7")
    's3 of train: all_reduce at train.py:7'
    """
    return (f"{step} of " if step else "") + f"{program}: {what}" + (f" at {at}" if at else "")


def nearest(word: str, names: Iterable[str], count: int = 8) -> str:
    """The `names` that exist, those most like `word` first, `count` of them.

    >>> nearest(r"heed\\.weight$", ["embed.weight", "blocks.up", "head.weight"], 2)
    'head.weight, embed.weight, … of 3'
    """
    plain = "".join(c for c in word if c.isalnum() or c in "._")
    every = list(names)
    first = sorted(every, key=lambda n: -SequenceMatcher(None, plain, n).ratio())[:count]
    more = f", … of {len(every)}" if len(every) > count else ""
    return ", ".join(first) + more if first else "none"


def nth(n: int) -> str:
    """An ordinal number.

    >>> nth(1), nth(12), nth(23)
    ('1st', '12th', '23rd')
    """
    last = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{last}"


def columns(rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """Rows of cells as lines: the first `left` cells stand to the left of their columns, the others
    to the right.

    >>> columns([("op", "bytes"), ("add", "8")], 1)
    ['op   bytes', 'add      8']
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = "<" * left + ">" * (len(widths) - left)
    return [
        "  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in table
    ]
