"""Do checkpoints in an object store survive what those on a disk do? Against a local S3 server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist
from tessera.checkpoint.storage import Storage
from tests.procs.harness import SRC, free_port
from tests.procs.launched import until

pytest.importorskip("tensorstore")
SERVER = shutil.which("moto_server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
if SERVER is None:
    reason = "there is no local S3 server: pip install 'moto[s3,server]'"
    pytest.skip(reason, allow_module_level=True)
ROOT = "s3://bucket/runs/a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server listens that has an empty bucket."""
    port = free_port()
    at = f"http://127.0.0.1:{port}"
    log = (tmp_path_factory.mktemp("server") / "log").open("w")
    command = [SERVER or "", "-H", "127.0.0.1", "-p", str(port)]
    started = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def answers() -> bool:
        asked = urllib.request.Request(f"{at}/bucket", method="PUT")
        try:
            return bool(urllib.request.urlopen(asked, timeout=5).status == 200)
        except (URLError, OSError):
            return False

    try:
        until(lambda: started.poll() is not None or answers(), 60)
        if started.poll() is not None:  # a launcher of other environments, which has none here
            pytest.skip(f"moto_server ended with status {started.returncode}")
        yield at
    finally:
        started.kill()
        started.wait(10)
        log.close()


@pytest.fixture(autouse=True)
def user(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def test_what_is_saved_comes_back_on_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.checkpoint.pieces.FILE_BYTES", 1000)
    mesh = dist.Mesh.parse("dp=4")
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    for step in (1, 2, 3):
        w = ts.tensor(x * step, mesh=mesh, layout="[64@dp, 8]")
        checkpoint.save(f"s{step}", {"w": w}, root=ROOT, keep=2, step=step, quiet=True)
    checkpoint.wait()
    assert checkpoint.latest(ROOT) == "s3"
    like = ts.tensor(x * 0, mesh=dist.Mesh.parse("dp=2"), layout="[64, 8@dp]")
    found = checkpoint.load(tensors={"w": like}, root=ROOT)
    np.testing.assert_array_equal(found.tensors["w"].numpy(), x * 3)
    assert checkpoint.verify("s2", ROOT) == x.nbytes
    with pytest.raises(ts.CheckpointError, match="'s1' is not in"):
        checkpoint.load("s1", root=ROOT)
    assert checkpoint.prune(1, ROOT) == ["s2"]
    storage = Storage(ROOT)
    key = next(k for k in storage.listed() if k.endswith(".bin"))
    raw = bytearray(storage.read(key) or b"")
    raw[7] ^= 1
    storage.write(key, bytes(raw))
    with pytest.raises(ts.CheckpointError, match="'s3' is damaged"):
        checkpoint.verify(None, ROOT)
    checkpoint.save("s4", {"w": x}, root=ROOT, keep=1, async_io=False, quiet=True)
    assert {k.partition("/")[0] for k in storage.listed()} == {"s4"}


SAVES = """
import sys
import numpy as np
from tessera import checkpoint
checkpoint.pieces.FILE_BYTES = 4000
for step in range(1, 1000):
    x = np.full((64, 256), step, np.float32)
    checkpoint.save(f"s{step % 3}", {"w": x}, root=sys.argv[1], step=step, quiet=True)
    print(step, flush=True)
"""


def test_a_save_that_is_killed_leaves_whole_checkpoints(tmp_path: Path) -> None:
    root, rng = "s3://bucket/killed", np.random.default_rng(0)
    for k in range(3):
        log = tmp_path / f"{k}"
        with log.open("w") as out:
            env = {**os.environ, "PYTHONPATH": str(SRC)}
            started = subprocess.Popen([sys.executable, "-c", SAVES, root], stdout=out, env=env)
            try:
                until(lambda log=log: log.read_text().count("\n") >= 4)
                time.sleep(rng.uniform(0, 0.5))
            finally:
                started.send_signal(signal.SIGKILL)
                started.wait(10)
        found = checkpoint.load(root=root)
        assert found.step is not None and (found.tensors["w"].numpy() == found.step).all()
        # Of all that were begun at most the one that was copied and the one that was written.
        assert found.step >= log.read_text().count("\n") - 2
