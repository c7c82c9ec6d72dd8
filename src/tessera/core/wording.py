"""Numbers and lists in words, for errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from zlib import crc32


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks in words.

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


DUMP_VERSION = 1  # of the flight recorder's file format


def record_text(program: str, step: str, operation: str, at: str) -> str:
    """Returns the text of a flight record.

    >>> record_text("train", "s3", "all_reduce", "train.py:7")
    's3 of train: all_reduce at train.py:7'
    """
    return (f"{step} of " if step else "") + f"{program}: {operation}" + (f" at {at}" if at else "")


def differences(facts: Mapping[int, Mapping[str, object]]) -> list[tuple[str, str]]:
    """Returns the facts in which processes differ, by rank: a row for each group of equal
    processes.

    >>> differences({0: {"seed": 1, "at": 4}, 1: {"seed": 2, "at": 4}, 2: {"seed": 1, "at": 4}})
    [('ranks 0, 2', 'seed: 1'), ('rank 1', 'seed: 2')]
    """
    keys = dict.fromkeys(key for said in facts.values() for key in said)
    wrong = [k for k in keys if any(said.get(k) != next(iter(facts.values())).get(k)
                                    for said in facts.values())]  # fmt: skip
    alike: dict[str, list[int]] = {}
    for rank, said in facts.items() if wrong else ():
        alike.setdefault(", ".join(f"{k}: {said.get(k)}" for k in wrong), []).append(rank)
    return [(ranks_text(ranks), text) for text, ranks in alike.items()]


def digest(texts: Sequence[str]) -> str:
    """Returns the first three of `texts`, and a checksum of all.

    >>> digest(["a", "b", "c", "d"])
    '4: a, b, c, … (checksum e96019e2)'
    """
    few = ", ".join([*texts[:3], "…"] if len(texts) > 3 else texts)
    return f"{len(texts)}: {few} (checksum {crc32(json.dumps(texts).encode()):08x})"


def nearest(word: str, names: Iterable[str], count: int = 8) -> str:
    """Returns `count` of `names`, those most like `word` first, as text.

    >>> nearest(r"heed\\.weight$", ["embed.weight", "blocks.up", "head.weight"], 2)
    'head.weight, embed.weight, … of 3'
    """
    plain = "".join(c for c in word if c.isalnum() or c in "._")
    every = list(names)
    first = sorted(every, key=lambda n: -SequenceMatcher(None, plain, n).ratio())[:count]
    more = f", … of {len(every)}" if len(every) > count else ""
    return ", ".join(first) + more if first else "none"


def nth(n: int) -> str:
    """Returns an ordinal number.

    >>> nth(1), nth(12), nth(23)
    ('1st', '12th', '23rd')
    """
    last = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{last}"


def columns(rows: Iterable[Sequence[str]], left_aligned: int) -> list[str]:
    """Returns rows of cells as aligned lines: the first `left_aligned` columns to the left, the
    others to the right.

    >>> columns([("op", "bytes"), ("add", "8")], 1)
    ['op   bytes', 'add      8']
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = "<" * left_aligned + ">" * (len(widths) - left_aligned)
    return [
        "  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in table
    ]
