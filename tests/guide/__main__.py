"""A listing of the guides' blocks: whether each runs, its substitutions, and its given names.
`python -m tests.guide`"""

from __future__ import annotations

from tests.guide.given import GIVEN, free_names
from tests.guide.runner import guide_path, snippets, substituted
from tests.guide.substitutions import RUN, SUBSTITUTIONS, WAITING


def lines() -> list[str]:
    """A line for each block, then one for each of its substitutions and given names."""
    out = []
    for guide in GIVEN:
        path = guide_path(guide)
        if path is None:
            out.append(f"guide {guide} is not there")
            continue
        before = snippets(guide, path.read_text(encoding="utf-8"))
        table = [s for s in SUBSTITUTIONS if s.guide == guide]
        old = {s.name: s.code for s in before}
        for snippet, names in free_names(substituted(before, table)):
            waits = WAITING.get(snippet.name)
            out.append(f"{snippet.name}  " + (f"waits for {waits}" if waits else "runs"))
            for s in table:
                if s.section == snippet.section and s.old in old[snippet.name]:
                    out.append(f"    {s.old!r} is {s.new!r}: {s.why}")
            out += [f"    {name} is given: {GIVEN[guide].get(name, '?')}" for name in names]
    out.append(f"{len(RUN)} blocks run, {len(WAITING)} wait")
    return out


if __name__ == "__main__":
    print("\n".join(lines()))
