"""The program cache on disk: no compilation at a second start, damaged and foreign files, a full
folder, concurrent processes, folders with unsafe permissions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest
from jax._src import compiler

from tessera.core.errors import EngineWarning
from tessera.runtime import compilation_cache, compile_once
from tessera.runtime.compilation_cache import KeptPrograms
from tests.cases import LONG
from tests.quickly import FLAGS

SCRIPT = """
import numpy as np, jax
heard = []
jax.monitoring.register_event_listener(lambda event, **_: heard.append(event))
import tessera as ts
from tessera import nn
from tessera.runtime import compilation_cache
compilation_cache.LEAST_S = 0.0
mesh = ts.dist.Mesh(("dp",), shape={"dp": 2})
model = nn.GPT(nn.GPTConfig(vocab=8, seq=4, d=4, layers=1, heads=1))

@ts.jit
def step(ids):
    loss = model.loss(ids, ids)
    return loss, ts.grad(loss, model.parameters())

loss, grads = step(ts.tensor(np.arange(8, dtype=np.int32).reshape(2, 4), mesh=mesh))
bits = loss.numpy().tobytes().hex() + grads["embed.weight"].numpy().tobytes().hex()
print(heard.count("/jax/compilation_cache/cache_hits"), hash(bits))
"""


@pytest.fixture(autouse=True)
def as_users_if_long(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets fast compilation in new processes, unless --long is given."""
    monkeypatch.setenv("XLA_FLAGS", "" if everything else FLAGS)


def ran(folder: Path | None, **env: str) -> tuple[int, str, str]:
    """Returns (programs found in the cache, the result, stderr) of a process."""
    here = {**os.environ, "PYTHONHASHSEED": "0", **env}
    if folder is not None:
        here["TESSERA_PROGRAM_CACHE"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=here, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    hits, bits = done.stdout.split()
    return int(hits), bits, done.stderr


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    found, first, _ = ran(folder)
    kept = set(folder.iterdir())
    assert found == 0 and kept
    assert folder.stat().st_mode & 0o777 == 0o700
    found, again, said = ran(folder)
    assert found == len(kept) and again == first and not said
    assert set(folder.iterdir()) == kept
    for path in kept:  # a changed byte
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    found, again, said = ran(folder)
    assert found == 0 and again == first and not said
    assert ran(folder)[0] == len(kept)


def grid_of_places(tmp_path: Path, how: str) -> tuple[Path, Path | None, dict[str, str]]:
    """Returns (the folder that stays empty, the configured folder, more environment variables)."""
    folder = tmp_path / "programs"
    folder.mkdir()
    if how == "off":
        return folder, None, {"TESSERA_PROGRAM_CACHE": "off", "XDG_CACHE_HOME": str(folder)}
    if how == "others may write":
        folder.chmod(0o777)
        return folder, folder, {}
    return folder, folder, {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}


@pytest.mark.parametrize(
    "how", ["others may write", *(pytest.param(h, marks=LONG) for h in ("off", "one of jax"))]
)
def test_where_no_programs_are_kept(tmp_path: Path, how: str) -> None:
    folder, named, env = grid_of_places(tmp_path, how)
    said = ran(named, **env)[2]
    assert not list(folder.iterdir())
    assert ("what lies there is run" in said) == (how == "others may write")


def test_a_version_of_jax_that_works_in_another_way_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("TESSERA_PROGRAM_CACHE", str(tmp_path))
    monkeypatch.setenv("TESSERA_COMPILE_ONCE", "1")
    monkeypatch.setattr(compiler, "_cache_read", lambda key: None)
    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda module: None)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.warns(EngineWarning, match=r"no programs are kept in .*: jax .* another way"):
            compilation_cache.folder.__wrapped__()
        with pytest.warns(EngineWarning, match="each process compiles all of its programs, as jax"):
            compile_once.start()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", was)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    kept = KeptPrograms(tmp_path, 1000)
    for k in range(9):
        kept.put(str(k), bytes([k]) * 96)
        os.utime(kept._at(str(k)), (k, k))
    assert kept.get("0") == bytes(96)  # it is the most recently used now
    (left := tmp_path / ".x.program.part-1").touch()
    os.utime(left, (1, 1))
    (begun := tmp_path / ".y.program.part-2").touch()
    for k in (9, 10):
        kept.put(str(k), bytes([k]) * 96)
    have = [k for k in range(11) if kept.get(str(k)) is not None]
    assert have[0] == 0 and have[-2:] == [9, 10] and len(have) == 9
    assert begun.exists() and not left.exists()
    kept.put("large", bytes(300))
    assert kept.get("large") is None and kept.get("10") is not None


def test_processes_share_a_folder_and_may_be_killed(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tessera.runtime.compilation_cache import KeptPrograms\n"
        "kept = KeptPrograms(Path(sys.argv[1]), 200_000)\nprint('begun', flush=True)\n"
        "while True:\n"
        "    for k in range(40):\n"
        "        assert kept.get(str(k)) in (None, bytes([k]) * 9000)\n"
        "        kept.put(str(k), bytes([k]) * 9000)\n"
    )
    with ExitStack() as stack:
        every = []
        for _ in range(3):
            command = [sys.executable, "-c", program, str(tmp_path)]
            every.append(
                stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            )
            stack.callback(every[-1].kill)
        for process in every:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(1)
        assert [p.poll() for p in every] == [None] * 3
    kept = KeptPrograms(tmp_path, 200_000)
    assert {kept.get(str(k)) for k in range(40)} <= {None, *(bytes([k]) * 9000 for k in range(40))}
    assert sum(p.stat().st_size for p in tmp_path.glob("*.program")) < 200_000 + 3 * 9004 * 3
