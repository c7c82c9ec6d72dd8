"""Engine flags set before the start, and user settings that are kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tessera
from tessera.core import flags

FUSE = "--xla_cpu_experimental_ynn_fusion_type="


@pytest.mark.parametrize(
    ("version", "runs", "given", "then", "exact"),
    [
        ((0, 10, 1), False, "", "", True),
        ((0, 10, 1), True, "", "", True),
        ((0, 10, 2), False, "", flags.EXACT, True),
        ((0, 11, 0), False, "--xla_a=1", f"--xla_a=1 {flags.EXACT}", True),
        ((0, 10, 2), False, f"{FUSE}+dot", f"{FUSE}+dot", False),  # set by the user
        ((0, 10, 2), False, flags.EXACT, flags.EXACT, True),
        ((0, 10, 2), True, "", "", False),  # the engine has already started
        ((0, 10, 2), True, flags.EXACT, flags.EXACT, False),  # set in time, or not
        (None, False, "", "", False),
    ],
)
def test_reductions(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...] | None,
    runs: bool,
    given: str,
    then: str,
    exact: bool,
) -> None:
    monkeypatch.setattr(flags, "_version", lambda: version)
    monkeypatch.setattr(flags, "engine_runs", lambda: runs)
    monkeypatch.setattr(flags, "_exact", [])
    monkeypatch.setattr(flags, "X86", False)
    monkeypatch.setenv("XLA_FLAGS", given)
    flags.prepare()
    assert flags.os.environ["XLA_FLAGS"] == then
    assert flags.is_exact() == exact


@pytest.mark.parametrize(
    ("x86", "runs", "given", "then"),
    [
        (True, False, "", flags.PLAIN),
        (True, False, "--xla_cpu_max_isa=AVX512", "--xla_cpu_max_isa=AVX512"),  # set by the user
        (True, True, "", ""),  # the engine has already started
        (False, False, "", ""),  # another kind of processor
    ],
)
def test_instructions(
    monkeypatch: pytest.MonkeyPatch, x86: bool, runs: bool, given: str, then: str
) -> None:
    monkeypatch.setattr(flags, "_version", lambda: None)
    monkeypatch.setattr(flags, "engine_runs", lambda: runs)
    monkeypatch.setattr(flags, "X86", x86)
    monkeypatch.setenv("XLA_FLAGS", given)
    flags.prepare()
    assert flags.os.environ["XLA_FLAGS"] == then


@pytest.mark.parametrize(("given", "then"), [(None, "3"), ("0", "0")])
def test_log(monkeypatch: pytest.MonkeyPatch, given: str | None, then: str) -> None:
    monkeypatch.delitem(flags.sys.modules, "jaxlib", raising=False)
    monkeypatch.delenv(flags.LOG[0], raising=False)
    if given is not None:
        monkeypatch.setenv(flags.LOG[0], given)
    flags.prepare()
    assert flags.os.environ[flags.LOG[0]] == then


def test_one_file_takes_what_jax_does_not_publish() -> None:
    source = Path(tessera.__file__).parent
    private = re.compile(r"^\s*(?:from|import) jax\._src", re.MULTILINE)
    found = [p for p in source.rglob("*.py") if private.search(p.read_text())]
    assert found == [source / "runtime" / "jax_private.py"]
