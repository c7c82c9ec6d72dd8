"""Checkpoints in object stores, on local servers: as safe as on a disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist
from tessera.checkpoint.storage import Storage
from tests.cases import LONG
from tests.procs.harness import SRC, free_port
from tests.procs.launched import until

pytest.importorskip("tensorstore")


@dataclass(frozen=True)
class Service:
    """A local server: its command, its package, and its variables for TensorStore."""

    command: tuple[str, ...]
    package: str
    env: dict[str, str]


SERVICES = {
    "s3": Service(
        ("moto_server", "-H", "127.0.0.1", "-p", "PORT"),
        "moto[s3,server]",
        {
            "AWS_ENDPOINT_URL": "URL",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        },
    ),
    "gs": Service(
        (
            "gcp-storage-emulator",
            "start",
            "--host=127.0.0.1",
            "--port=PORT",
            "--in-memory",
            "--default-bucket=bucket",
        ),
        "gcp-storage-emulator",
        {"TENSORSTORE_GCS_HTTP_URL": "URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "a"},
    ),
}


@pytest.fixture(scope="module", params=SERVICES)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An empty bucket on a running server."""
    service = SERVICES[request.param]
    missing = f"there is no local server of {request.param}: pip install '{service.package}'"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    program = shutil.which(service.command[0], path=path)
    if program is None:
        pytest.skip(missing)
    port = str(free_port())
    at = f"http://127.0.0.1:{port}"
    folder = tmp_path_factory.mktemp("server")
    with (folder / "log").open("w") as log, pytest.MonkeyPatch.context() as env:
        command = [program, *(word.replace("PORT", port) for word in service.command[1:])]
        started = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)

        def answers() -> bool:
            """Returns whether the server answers. Creates S3's bucket."""
            asked = urllib.request.Request(f"{at}/bucket", method="PUT")
            try:
                urllib.request.urlopen(asked if request.param == "s3" else at, timeout=5)
            except HTTPError as error:
                return error.code < 500
            except OSError:
                return False
            return True

        try:
            until(lambda: started.poll() is not None or answers(), 60)
            if started.poll() is not None:  # it was found but cannot run here
                pytest.skip(missing)
            for name, value in service.env.items():
                env.setenv(name, value.replace("URL", at))
            yield f"{request.param}://bucket"
        finally:
            started.kill()
            started.wait(10)


def test_what_is_saved_comes_back_on_a_mesh(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"{store}/runs/a"
    monkeypatch.setattr("tessera.checkpoint.pieces.FILE_BYTES", 1000)
    mesh = dist.Mesh.parse("dp=4")
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    for step in (1, 2, 3):
        w = ts.tensor(x * step, mesh=mesh, layout="[64@dp, 8]")
        checkpoint.save(f"s{step}", {"w": w}, root=root, keep=2, step=step, quiet=True)
    checkpoint.wait()
    assert checkpoint.latest(root) == "s3"
    like = ts.tensor(x * 0, mesh=dist.Mesh.parse("dp=2"), layout="[64, 8@dp]")
    found = checkpoint.load(tensors={"w": like}, root=root)
    np.testing.assert_array_equal(found.tensors["w"].numpy(), x * 3)
    assert checkpoint.verify("s2", root) == x.nbytes
    with pytest.raises(ts.CheckpointError, match="'s1' is not in"):
        checkpoint.load("s1", root=root)
    assert checkpoint.prune(1, root) == ["s2"]
    storage = Storage(root)
    key = next(k for k in storage.listed() if k.endswith(".bin"))
    raw = bytearray(storage.read(key) or b"")
    raw[7] ^= 1
    storage.write(key, bytes(raw))
    with pytest.raises(ts.CheckpointError, match="are not those that were saved"):
        checkpoint.verify(None, root)
    storage.write(key, bytes(raw) * 9)
    with pytest.raises(ts.CheckpointError, match=f"it has more than {len(raw)} bytes"):
        checkpoint.verify(None, root)
    checkpoint.save("s4", {"w": x}, root=root, keep=1, async_io=False, quiet=True)
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


@LONG
def test_a_save_that_is_killed_leaves_whole_checkpoints(store: str, tmp_path: Path) -> None:
    root, rng = f"{store}/killed", np.random.default_rng(0)
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
        # Of all begun saves at most the copied one and the written one remain.
        assert found.step >= log.read_text().count("\n") - 2
