"""The runner's cuts of a guide, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guide.runner import ROOT, Substitution, guide_path, run, snippets, substituted
from tests.guide.substitutions import RUN

GUIDE = """# A guide
## 2.1 First

```python
import math

@staticmethod
def twice(
    x,
) -> int:
    return x * y

z = 3
```
2.2 A heading without marks
```bash
not python
```
```python
z = z + 1
```
### Named Section
```python
z = z + 1
```
```python
def cut():
    # ends here"""


def test_snippets_are_named_by_section_and_function() -> None:
    found = snippets(9, GUIDE)
    assert [(s.name, s.line) for s in found] == [
        ("9/2.1/code", 5), ("9/2.1/twice", 7), ("9/2.1/code 2", 13), ("9/2.2/code", 20),
        ("9/Named Section/code", 24), ("9/Named Section/cut", 27),
    ]  # fmt: skip
    assert found[1].code.startswith("@staticmethod\ndef twice(") and "return" in found[1].code


def test_a_snippet_runs_in_its_namespace_and_fails_on_its_own_line(tmp_path: Path) -> None:
    *_, first, second, _, _ = found = snippets(9, GUIDE)
    space: dict[str, object] = {}
    with pytest.raises(NameError) as caught:
        run(second, space, tmp_path)
    assert caught.traceback[-1].lineno == 19  # counted from 0
    run(first, space, tmp_path)
    run(second, space, tmp_path)
    assert space["z"] == 4 and len(found) == 6


def test_a_substitution_changes_its_section_alone_and_must_be_found() -> None:
    s = Substitution(9, "2.2", "z + 1", "z + 2", "a test")
    changed = {x.name: x.code for x in substituted(snippets(9, GUIDE), [s])}
    assert changed["9/2.2/code"] == "z = z + 2\n"
    assert changed["9/Named Section/code"] == "z = z + 1\n"
    gone = Substitution(9, "2.2", "no such text", "", "a test")
    with pytest.raises(LookupError, match=r"guide 9, 2\.2: 'no such text' is not in the text"):
        substituted(snippets(9, GUIDE), [gone])


def test_a_guide_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert guide_path(4, tmp_path / "nowhere") is None and guide_path(4, tmp_path) is None
    (tmp_path / "4-guide.md").write_text(GUIDE)
    assert guide_path(4, tmp_path) == tmp_path / "4-guide.md"


@pytest.mark.parametrize("ci", [True, False])
def test_a_run_without_the_guides_says_so_and_fails_in_ci(tmp_path: Path, ci: bool) -> None:
    env = {**os.environ, "CI": str(ci).lower(), "TESSERA_TEST_HIDE_JAX": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = ["tests/guide/test_runner.py", "-k", "is_none", "--guides", str(tmp_path)]
    done = subprocess.run(
        [*command, *tests], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    said = f"guides: {len(RUN)} blocks were not run: {tmp_path} lacks guide 1, 2, 3, 4, 5"
    assert said in done.stdout.splitlines()[-3:] and "1 passed" in done.stdout
    assert done.returncode == (1 if ci else 0)
