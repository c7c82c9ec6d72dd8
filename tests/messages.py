"""Golden files of messages: `== name`, the text, an empty line.

`tests/golden/errors.txt` holds those of the table of mistakes, `tests/golden/errors/` has one file
for each test file that uses the fixture `golden`.
"""

from __future__ import annotations

import fcntl
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[[object], None]  # the fixture `golden`
HEAD = re.compile(r"^== (.*)\n", re.M)


def messages(file: Path) -> dict[str, str]:
    """The messages in a golden file by their names."""
    if not file.exists():
        return {}
    _, *found = HEAD.split(file.read_text(encoding="utf-8"))
    return {name: text.strip("\n") for name, text in zip(found[::2], found[1::2], strict=True)}


def refresh(file: Path, name: str, text: str, names: Iterable[str]) -> None:
    """Puts one message into a golden file, and takes out those that are not in `names`."""
    with file.open("a", encoding="utf-8") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        every = messages(file) | {name: text}
        kept = (f"== {n}\n{every[n]}\n" for n in dict.fromkeys(names) if n in every)
        locked.truncate(0)
        locked.write("\n".join(kept))


def marked(text: str, *functions: Callable[..., object]) -> str:
    """A text with `HERE` for the line of a function that ends in `# here`; so for other marks."""
    for fn in functions:
        lines, first = inspect.getsourcelines(fn)
        for i, line in enumerate(lines):
            if m := re.search(r"# (here|there|helper)$", line.rstrip()):
                text = re.sub(rf"test_\w+\.py:{first + i}\b", m[1].upper(), text)
    return text
