"""Messages through `logging`: one handler, the program's own first, silent when told so."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from tessera.core.messages import progress

TELL = "from tessera.core.messages import tell, warn\n"


@pytest.mark.parametrize(
    ("setup", "stdout", "stderr"),
    [
        ("", "", ["a", "b", "c"]),  # one handler, also after several messages
        ("logging.getLogger('tessera').setLevel('WARNING')", "", ["b"]),
        ("logging.getLogger('tessera').setLevel('ERROR')", "", []),
        ("logging.disable()", "", []),
        (
            "logging.basicConfig(stream=sys.stdout, format='%(name)s %(levelname)s %(message)s',"
            " level='INFO')",
            "tessera INFO a\ntessera WARNING b\ntessera INFO c\n", [],
        ),
        ("logging.basicConfig(stream=sys.stdout, format='%(message)s')", "b\n", []),
        ("logging.getLogger('tessera').addHandler(logging.NullHandler())", "", []),
        ("sys.stderr = None", "", []),
        ("sys.stderr = open(os.devnull); sys.stderr.close()", "", []),
    ],
)  # fmt: skip
def test_messages(setup: str, stdout: str, stderr: list[str]) -> None:
    code = f"import logging, os, sys\n{TELL}{setup}\ntell('a')\nwarn('b')\ntell('c')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr.splitlines()) == (0, stdout, stderr)


def test_progress_has_lines_while_it_lasts_and_no_thread_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "tessera")
    before = threading.active_count()
    with progress("compiling f", after_s=(0.01, 0.02)):
        deadline = time.monotonic() + 30
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert caplog.messages == ["compiling f: 0.01 s so far", "compiling f: 0.02 s so far"]
    assert threading.active_count() == before
    with progress("compiling g", after_s=(60.0,)):
        pass
    assert len(caplog.messages) == 2 and threading.active_count() == before


@pytest.mark.parametrize(
    ("setup", "seen"),
    [("", False), ("tell('x')", False), ("logging.basicConfig(level='INFO')", True)],
)
def test_progress_needs_a_terminal_or_a_handler(setup: str, seen: bool) -> None:
    code = (
        f"import logging, time\n{TELL}from tessera.core.messages import progress\n{setup}\n"
        "with progress('compiling', after_s=(0.001,)): time.sleep(0.2)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and ("compiling: 0.001 s so far" in run.stderr) == seen
