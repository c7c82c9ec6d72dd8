"""Examples for clusters: they parse, and their programs run here with the variables they set."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.procs.harness import free_port
from tests.procs.launched import variables

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "examples" / "cluster"
SCRIPTS = ["train.sbatch", "torchrun.sh"]
INSTRUCTIONS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD"}
SUM = "6 on 2 devices of 2 processes"

# Starts the tasks of a step here, with the variables that srun gives them.
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
for k in 0 1; do
  SLURM_PROCID=$k SLURM_LOCALID=$k SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7 \\
  SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=127.0.0.1 TESSERA_COORDINATOR=$ADDRESS "$@" &
done
wait -n && wait -n
"""


def ran(command: list[str], **env: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=variables(PYTHONPATH=str(ROOT / "src"), **env), timeout=200,
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def documents() -> list[Any]:
    return list(yaml.safe_load_all((HERE / "jobset.yaml").read_text()))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_parses(name: str) -> None:
    subprocess.run(["bash", "-n", str(HERE / name)], check=True)
    text = (HERE / name).read_text()
    assert text.startswith("#!/bin/bash\n") and "set -euo pipefail" in text


def test_the_options_of_sbatch_come_before_its_commands() -> None:
    lines = (HERE / "train.sbatch").read_text().splitlines()
    options = [i for i, x in enumerate(lines) if x.startswith("#SBATCH ")]
    first = next(i for i, x in enumerate(lines) if x and not x.startswith("#"))
    assert len(options) >= 5 and max(options) < first
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[i]) for i in options)


def test_the_jobset_agrees_with_itself() -> None:
    secret, jobset = documents()
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {e["name"]: e for e in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert int(env["NUM_PROCESSES"]["value"]) == spec["parallelism"] == spec["completions"]
    host, port = env["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    names = jobset["metadata"]["name"], job["name"]
    assert host == f"{names[0]}-{names[1]}-0-0.{names[0]}"
    assert int(port) in [p["containerPort"] for p in container["ports"]]
    key = env["TESSERA_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert key["name"] == secret["metadata"]["name"] and key["key"] in secret["stringData"]


def test_the_dockerfile_parses_and_copies_what_is_there() -> None:
    text = (HERE / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [x.split(maxsplit=1) for x in text.splitlines() if x and not x.startswith("#")]
    assert {word for word, _ in lines} <= INSTRUCTIONS and lines[0][0] == "FROM"
    for _, words in (x for x in lines if x[0] == "COPY"):
        *sources, _target = words.split()
        assert all((ROOT / s).exists() for s in sources), sources
    users = [x[1] for x in lines if x[0] == "USER"]
    assert users and users[-1] != "root"
    assert any(re.search(r"useradd .*\b" + users[-1], x[1]) for x in lines if x[0] == "RUN")
    for command in (x[1] for x in lines if x[0] == "CMD"):
        assert (ROOT / yaml.safe_load(command)[1]).is_file()


def test_torchrun_runs_here() -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        pytest.skip("torchrun comes with PyTorch")
    out = ran(
        [str(HERE / "torchrun.sh")], TORCHRUN=torchrun, PROCESSES="2", PORT=str(free_port() - 1)
    )
    assert SUM in out


def test_sbatch_runs_here(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    (tmp_path / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    out = ran(
        ["bash", str(HERE / "train.sbatch")], PATH=f"{tmp_path}:{os.environ['PATH']}",
        ADDRESS=f"127.0.0.1:{free_port()}", HOME=str(tmp_path),
    )  # fmt: skip
    assert SUM in out


def test_the_pods_of_the_jobset_run_here() -> None:
    jobset = documents()[1]
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    env = {e["name"]: e.get("value", "a-token") for e in container["env"]}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "NUM_PROCESSES": "2"}
    assert container["command"][0] == "python"
    pods = [
        subprocess.Popen(
            [sys.executable, *container["command"][1:]], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=variables(PYTHONPATH=str(ROOT / "src"), **env, JOB_COMPLETION_INDEX=str(k)),
        )
        for k in range(2)
    ]  # fmt: skip
    try:
        outs = [p.communicate(timeout=200) for p in pods]
    finally:
        for p in pods:
            p.kill()
    assert [p.returncode for p in pods] == [0, 0], [o[1][-2000:] for o in outs]
    assert SUM in outs[0][0]
