"""Killed saves: whole checkpoints remain, for every call at which the save is killed.

A process that has loaded everything forks for each trial; the child waits until `strace` holds it,
which kills it as it enters the k-th `rename`, `fsync`, `unlink`, ... of one of its threads. Then
the folder is read. `python -m tests.procs.torture 500` kills 500 saves, and counts them in its last
line.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.checkpoint import pieces
from tessera.checkpoint.listing import Keep, manifests, reader
from tessera.checkpoint.manifest import Saved
from tessera.checkpoint.storage import Storage
from tessera.checkpoint.writing import Job, written
from tests.procs.elastic_torture import torture as torture_elastic

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("openat", "write", "fsync", "rename", "close", "unlink", "mkdir", "rmdir")
LIMIT_S = 60.0


def why_not() -> str:
    """Returns the reason why no trials can run here, or ""."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "strace may not trace here"


@dataclass(frozen=True)
class Scene:
    """A save: its tag, the number of tensors and rows, and the number of retained checkpoints."""

    tag: str
    step: int
    tensors: int
    rows: int
    keep: int

    @staticmethod
    def drawn(seed: int) -> Scene:
        draw = random.Random(seed)
        again = draw.random() < 0.3  # overwrites an existing one
        tag = draw.choice(["s1", "s2", "s3"]) if again else "s4"
        return Scene(tag, 4, draw.randint(1, 4), draw.choice([3, 40, 300]), draw.randint(1, 4))


def write(root: str, scene: Scene) -> None:
    """Saves `scene`, with files of a few hundred bytes."""
    pieces.FILE_BYTES = 4000
    names = [f"tensors/w{i}" for i in range(scene.tensors)]
    shape = [scene.rows, 8]
    x = np.full(shape, scene.step, np.float32)
    about = {
        "tag": scene.tag, "step": scene.step, "mesh": "", "processes": 1, "numerics": "fast",
        "versions": {}, "metrics": {}, "values": {}, "state": None,
        "random": {"seed": 0, "calls": 0, "created": 0},
    }  # fmt: skip
    tensors = {n: Saved(dtype="f32", shape=shape, layout="", pieces=[]) for n in names}
    blocks = {n: [((0, 0), x)] for n in names}
    written(Job(Storage(root), scene.tag, about, tensors, blocks, Keep(scene.keep), 1, None))


def serve() -> None:
    """Forks for each line "root seed" or "root first"; prints the child's pid and its status."""
    for line in sys.stdin:
        root, what, held = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                if held == "held":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if what == "first":
                    for step in (1, 2, 3):
                        write(root, Scene(f"s{step}", step, 2, 40, 9))
                else:
                    write(root, Scene.drawn(int(what)))
            except BaseException as error:
                print(f"torture: {error!r}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Server:
    """The process that forks the children."""

    def __init__(self) -> None:
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.procs.torture", "serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "TESSERA_JOIN": "0"},
        )  # fmt: skip

    def run(self, root: Path, what: str, call: str = "", k: int = 0) -> int:
        """Returns the status of a child, which is killed at its k-th `call`, if it gets there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(root, what, "held" if call else "free", file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline())
        tracer = None
        if call:
            _until(lambda: _status(pid, "State").startswith("T"))
            tracer = subprocess.Popen(
                ["strace", "-f", "-qq", "-p", str(pid), "-o", "/dev/null", "-e", f"trace={call}",
                 "-e", f"inject={call}:signal=SIGKILL:when={k}"],
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            _until(lambda: _status(pid, "TracerPid") not in ("", "0"))
            os.kill(pid, signal.SIGCONT)
        ended = int(self._process.stdout.readline())
        if tracer is not None:
            tracer.wait(LIMIT_S)
        return ended

    def close(self) -> None:
        self._process.communicate(timeout=LIMIT_S)


def _status(pid: int, name: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")


def _until(met: object) -> None:
    end_s = time.monotonic() + LIMIT_S
    assert callable(met)
    while not met():
        assert time.monotonic() < end_s, "the child does not stop, or cannot be traced"
        time.sleep(0.002)


def lost(root: Path, scene: Scene) -> str:
    """Returns the fault in `root`, which had s1, s2 and s3 before the save of `scene`; "" if
    none."""
    storage = Storage(root)
    found, wrong = manifests(storage)
    if wrong:
        return f"manifests that cannot be used: {wrong}"
    for m in found:
        for name in m.tensors:
            values = set(np.unique(reader(storage, m).read(name)))
            if values != {float(m.step or 0)}:
                return f"{m.tag} holds {values}"
    tags = {m.tag: m.step for m in found}
    if tags.get(scene.tag) != scene.step:  # its save did not complete, so nothing may be deleted
        return "" if tags == {"s1": 1, "s2": 2, "s3": 3} else f"only {tags} are there"
    order = [t for t in ("s1", "s2", "s3") if t != scene.tag] + [scene.tag]
    stay = order[-scene.keep :]
    return "" if set(stay) <= tags.keys() and found[-1].tag == scene.tag else f"{tags}, not {stay}"


def trials(count: int, folder: Path, seed: int = 0) -> tuple[int, int, list[str]]:
    """Saves until `count` saves were killed. Returns (saves, killed saves, faults)."""
    server, killed, losses, i = Server(), 0, list[str](), 0
    first = folder / "first"
    try:
        assert server.run(first, "first") == 0
        while killed < count and i < 8 * count:
            draw = random.Random(f"{seed} {i}")
            root = folder / f"trial-{i}"
            shutil.copytree(first, root)
            call, scene = CALLS[i % len(CALLS)], Scene.drawn(i)
            ended = server.run(root, str(i), call, draw.randint(1, 8))
            killed += ended == -signal.SIGKILL
            said = "" if ended in (0, -signal.SIGKILL) else f"it ended with {ended}"
            said = said or lost(root, scene)
            if not said and server.run(root, str(i)) != 0:  # what was left is in no one's way
                said = "the next save fails"
            said = said or lost(root, scene)
            if said:
                losses.append(f"trial {i}, {scene}, killed at {call}: {said}")
            shutil.rmtree(root)
            i += 1
    finally:
        server.close()
    return i, killed, losses


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        serve()
        return
    if sys.argv[1:2] == ["elastic"]:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(torture_elastic(Path(folder), *map(int, sys.argv[2:])) or None)
    if why := why_not():
        sys.exit(f"torture: {why}")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        saves, killed, losses = trials(count, Path(folder))
    print(*losses, sep="\n")
    took = time.monotonic() - begin_s
    print(f"torture: {saves} saves, {killed} of them killed, {len(losses)} losses, {took:.0f} s")
    sys.exit(1 if losses else 0)


if __name__ == "__main__":
    main()
