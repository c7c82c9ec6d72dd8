"""Simulated hosts on this machine: each has its own network namespace, name and address; they share
a virtual cable and the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NET = "10.231.7"
_NEEDED = ("unshare", "nsenter", "ip")


def missing() -> str:
    """Returns the reason why this machine cannot simulate hosts, or ""."""
    lacks = [name for name in _NEEDED if not shutil.which(name)]
    if lacks:
        return f"{', '.join(lacks)} not installed here (apt-get install util-linux iproute2)"
    tried = ["unshare", "--net", "--uts", "--mount", "true"]
    if os.geteuid() or subprocess.run(tried, capture_output=True, check=False).returncode:
        return "only root, where namespaces are allowed, can make hosts"
    return ""


def on(pid: int, *command: str, folder: Path = Path("/")) -> list[str]:
    """`command` for `folder` on the host of process `pid`."""
    enter = ["nsenter", f"--target={pid}", "--net", "--uts", "--mount"]
    return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(folder), *command]


@contextlib.contextmanager
def two(folder: Path) -> Iterator[list[int]]:
    """Yields the pids that hold two hosts: host0 at NET.1 and host1 at NET.2."""
    names = "".join(f"{NET}.{k + 1} host{k}\n" for k in range(2))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    holders = []
    try:
        for k in range(2):
            begin = f"hostname host{k} && mount --bind {folder / 'hosts'} /etc/hosts"
            begin += f" && ip link set lo up && touch {folder / f'up{k}'} && exec sleep infinity"
            whole = ["unshare", "--net", "--uts", "--mount", "sh", "-c", begin]
            holders.append(subprocess.Popen(whole, stdin=subprocess.DEVNULL))
        end_s = time.monotonic() + 60
        while not all((folder / f"up{k}").exists() for k in range(2)):
            assert time.monotonic() < end_s, "the hosts do not come up"
            time.sleep(0.05)
        pids = [h.pid for h in holders]
        ends = [["name", "cable", "netns", str(pid)] for pid in pids]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for k, pid in enumerate(pids):
            _run(*on(pid, "ip", "addr", "add", f"{NET}.{k + 1}/24", "dev", "cable"))
            _run(*on(pid, "ip", "link", "set", "cable", "up"))
        yield pids
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(10)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
