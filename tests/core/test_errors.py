"""The user's source line in errors, for code of every origin."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.core.errors import PACKAGE, caller

CODE = "from tessera.core.errors import caller\n\ndef f():\n    return caller()\nat = f()"


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("<string>", "<string>:4"), ("<stdin>", "<stdin>:4"), ("<cell 3>", "<cell 3>:4"),
        ("/tmp/ipykernel_7/12.py", "cell:4"), ("<ipython-input-3-abc>", "In[3]:4"),
        ("/home/me/train.py", "train.py:4"), ("<doctest x>", ""),
    ],
)  # fmt: skip
def test_code_of_any_source_has_its_line(file: str, place: str) -> None:
    names = {"__name__": "__main__"}
    exec(compile(CODE, file, "exec"), names)
    assert names["at"] == place


def test_a_cell_has_the_number_that_ipython_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "/tmp/ipykernel_7/12.py"
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={file: 5}))
    made = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", made)  # type: ignore[arg-type]
    names = {"__name__": "__main__"}
    exec(compile(CODE, file, "exec"), names)
    assert names["at"] == "In[5]:4"


def test_ipython_itself_gives_cells_their_numbers() -> None:
    pytest.importorskip("IPython")
    code = (
        "from IPython.core.interactiveshell import InteractiveShell as Shell\n"
        "s = Shell.instance()\n"
        "s.run_cell('from tessera.core.errors import caller', store_history=True)\n"
        "s.run_cell('a = 1\\nprint(caller())', store_history=True)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.split()[-1] == "In[2]:2", run.stderr


def test_what_a_library_makes_from_text_has_none() -> None:
    names = {"__name__": "jax._src.made", "caller": caller}
    exec(compile("at = caller()", "<string>", "exec"), names)
    assert names["at"].startswith("test_errors.py:")


def test_what_a_thread_runs_that_no_user_wrote_has_none() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(caller).result() == ""
        assert pool.submit(lambda: caller()).result().startswith("test_errors.py:")


@pytest.mark.parametrize("how", [["-c", CODE + "\nprint(at)"], ["-"]])
def test_python_c_and_the_standard_input(how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *how], input=CODE + "\nprint(at)\n", capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == ("<string>:4" if how[0] == "-c" else "<stdin>:4")


def test_no_warning_counts_frames_to_the_users_line() -> None:
    """A frame count is wrong as soon as another frame is added; `lines_up` searches for the
    line."""
    found = [
        f"{p.name}: {line.strip()}"
        for p in Path(PACKAGE).rglob("*.py")
        for line in p.read_text().splitlines()
        if re.search(r"stacklevel=\d+,", line)
    ]
    assert found == []
