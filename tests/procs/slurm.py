"""A temporary Slurm cluster on this machine: munged, slurmctld and slurmd."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.procs.harness import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
START_S = 120.0
CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Returns the reason why Slurm cannot run here, or ""."""
    lacks = [name for name in PROGRAMS if not shutil.which(name)]
    if lacks:
        return f"{', '.join(lacks)} not installed here (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "only root can start slurmd"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment variables for Slurm's commands on this cluster of one node."""
    folder.chmod(0o700)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "key").chmod(0o600)
    host, config = socket.gethostname().split(".")[0], folder / "slurm.conf"
    ports = [free_port(), free_port()]
    config.write_text(CONFIG.format(host=host, folder=folder, ports=ports))
    names = {"key-file": "key", "socket": "munge.socket", "pid-file": "munged.pid",
             "log-file": "munged.log", "seed-file": "seed"}  # fmt: skip
    munged = ["munged", "--foreground", "--force"]
    munged += [f"--{option}={folder / name}" for option, name in names.items()]
    commands = (munged, ["slurmctld", "-D", "-i", "-f", str(config)],
                ["slurmd", "-D", "-f", str(config), "-N", host])  # fmt: skip
    env = {"SLURM_CONF": str(config)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as out:
                started.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=folder
                    )
                )
            if command is munged:
                _until(lambda: (folder / "munge.socket").exists(), folder)
        _until(lambda: _idle(env), folder)
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for cwd in Path("/proc").glob("[0-9]*/cwd"):  # daemons of ended job steps
            with contextlib.suppress(OSError):
                if cwd.readlink() == folder:
                    os.kill(int(cwd.parent.name), signal.SIGKILL)


def _idle(env: dict[str, str]) -> bool:
    asked = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], env={**os.environ, **env}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return asked.stdout.strip() == "idle"


def _until(met: object, folder: Path) -> None:
    assert callable(met)
    end_s = time.monotonic() + START_S
    while not met():
        said = "".join(f.read_text(errors="replace")[-2000:] for f in folder.glob("*.out"))
        assert time.monotonic() < end_s, said
        time.sleep(0.2)
