"""Every command of the command line: help, JSON, errors, exit statuses 0, 1 and 2."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import tessera as ts
from tessera.launch.cli import app

# Without --json: the output is the program's own, a report that is written to files, or a drawing
# whose data are --format yaml.
NO_JSON = {"run", "plan", "mesh show"}


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for word, command in group.commands.items():
        path = f"{name} {word}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, path)
        else:
            yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def called(line: str) -> Any:
    return CliRunner().invoke(app, line.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str) -> None:
    short, long = called(f"{name} -h"), called(f"{name} --help")
    assert (short.exit_code, long.exit_code) == (0, 0)
    assert short.output == long.output and f" {name} [" in short.output
    assert COMMANDS[name].help


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_does_not_exist_is_status_2(name: str) -> None:
    result = called(f"{name} --nonsense")
    assert result.exit_code == 2 and result.stdout == ""
    assert "No such option: --nonsense" in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_json(name: str) -> None:
    has = any("--json" in p.opts for p in COMMANDS[name].params)
    assert has == (name not in NO_JSON) or name == "plan"


WITH_ROWS = {"run", "mesh show"}  # they read files, and list all faults of one
ERRORS = {
    "run": "run absent.py",
    "flight": "flight absent.json",
    "doctor": None,  # what is wrong is its report, with status 1
    "info": None,
    "calibrate": "calibrate --out machine.txt",
    "plan": "plan absent.py --cluster h100x8",
    "train": "train --hf absent --data .",
    "generate": "generate absent Once",
    "tune": "tune",
    "mesh show": "mesh show absent.yaml",
    "mesh presets": None,
    "ckpt ls": "ckpt ls absent",
    "ckpt show": "ckpt show --root absent",
    "ckpt verify": "ckpt verify --root absent",
    "ckpt diff": "ckpt diff a b --root absent",
    "ckpt export": "ckpt export x.npz --root absent",
    "ckpt prune": "ckpt prune 1 --root absent",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_error_is_a_line_of_stderr_with_status_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ERRORS[name]
    if line is None:
        return
    result = called(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr and result.stderr.rstrip()
    first, *rows = result.stderr.splitlines()
    assert not rows or name in WITH_ROWS, result.stderr
    assert all(re.match(r"  \w+ *: ", row) for row in rows), rows
    assert rows or re.search(r"\(.+\)$", first), first  # the fix


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        w = {"w": ts.tensor(np.full((4,), step, np.float32))}
        ts.checkpoint.save(f"s{step}", w, root=str(tmp_path / "c"), step=step, async_io=False)
    return tmp_path / "c"


def test_json_of_checkpoints(root: Path, tmp_path: Path) -> None:
    def said(line: str, status: int = 0) -> Any:
        result = called(f"ckpt {line} --json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    listed = said(f"ls {root}")
    assert [r["step"] for r in listed] == [1, 2] and listed[0]["state"] == "complete"
    first, second = (r["tag"] for r in listed)
    shown = said(f"show --root {root}")
    assert [t["type"] for t in shown["tensors"].values()] == ["f32[4]"] and shown["step"] == 2
    assert said(f"verify --root {root}")["tag"] == second
    assert (
        said(f"diff {first} {second} --root {root}", 1)["differ"].keys() == shown["tensors"].keys()
    )
    assert said(f"diff {first} {first} --root {root}") == {"differ": {}, "all": 1}
    assert said(f"export {tmp_path / 'w.npz'} --root {root}")["tensors"] == 1
    assert said(f"prune 1 --root {root}") == {"removed": [first]}


def test_info(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "a.program").write_bytes(b"123")
    monkeypatch.setenv("TESSERA_PROGRAM_CACHE", str(tmp_path))
    result = called("info --json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["versions"]["tessera"] == ts.__version__ and "jaxlib" in facts["versions"]
    assert facts["devices"]["platform"] == "cpu" and facts["devices"]["devices"] == 8
    assert facts["caches"]["programs"] == {"folder": str(tmp_path), "files": 1, "bytes": 3}
    assert "8" in called("info").stdout
    monkeypatch.setenv("TESSERA_PROGRAM_CACHE", "off")
    assert json.loads(called("info --json").stdout)["caches"] == {"programs": None, "tuning": None}


def test_info_without_devices_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ts.BackendError("no devices")

    monkeypatch.setattr("tessera.runtime.processes.diagnose.engine_facts", fails)
    result = called("info --json")
    assert result.exit_code == 1 and json.loads(result.stdout)["devices"] == {"error": "no devices"}


def test_json_of_machines() -> None:
    assert json.loads(called("mesh presets --json").stdout)["n300"]
