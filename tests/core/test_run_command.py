"""`tessera run`: the command of its dry run, and errors for invalid arguments."""

from __future__ import annotations

import io
import itertools
import os
import shlex
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera import __version__
from tessera.launch.cli import app, tt_run
from tessera.launch.supervisor import _Stream
from tests.messages import Golden

PYTHON = shlex.quote(sys.executable)
CACHE = f"{Path.home()}/.cache/{socket.gethostname()}_rank"
BINDINGS = """
rank_bindings:
  - {rank: 0, mesh_id: 0, mesh_host_rank: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,1"}}
  - {rank: 1, mesh_id: 0, mesh_host_rank: 1, env_overrides: {TT_VISIBLE_DEVICES: "2,3"}}
mesh_graph_desc_path: mesh.textproto
global_env: {NAME: two words}
"""
AT = "TESSERA_COORDINATOR=127.0.0.1:PORT"
OWN = ("PYTHONHASHSEED=0", "PYTHONUNBUFFERED=1", "RANK={}", "WORLD_SIZE=2", AT)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program and rank bindings, a home folder, and a plain shell's environment."""
    for name in os.environ:
        if name.startswith(("TESSERA_", "JAX_", "TT_", "NCCL_", "XLA_", "LD_")):
            monkeypatch.delenv(name)
    for name in ("PYTHONPATH", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name, text in (("train.py", ""), ("ranks.yaml", BINDINGS), ("mesh.textproto", "")):
        (tmp_path / name).write_text(text)
    return tmp_path


def said(*arguments: str, code: int = 0, by: str | None = None) -> str:
    result = CliRunner().invoke(app, ["run", *arguments], obj=by)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def bound(k: int, folder: Path) -> list[str]:
    """The environment variables of rank `k` in BINDINGS."""
    return [
        f"TT_METAL_CACHE={CACHE}{k}", "TT_MESH_ID=0", f"TT_MESH_HOST_RANK={k}",
        f"TT_MESH_GRAPH_DESC_PATH={folder}/mesh.textproto", "NAME=two words",
        f"TT_VISIBLE_DEVICES={2 * k},{2 * k + 1}", "TESSERA_MESHES=0.0,0.1",
        *(v.format(k) for v in OWN),
    ]  # fmt: skip


def test_the_version_is_shown() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"tessera {__version__}\n")


@pytest.mark.parametrize("tag", [b"", b"[1,0]<stdout>:", b"0: "])
def test_what_the_engine_reports_is_not_the_programs_output(
    tag: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """For any split of the pipe's data, and after any text on the same line."""
    report = b"[Gloo] Rank 0 is connected to 1 peer ranks. "
    report += b"Expected number of connected peer ranks is : 1\n"
    own = b"one\n" + tag + b"[Gloo] Rank 0 said two\nthree"
    written = b"one\n" + tag + report + own[4:] + tag + report + b"\n"
    for cut in range(len(written)):
        out = io.BytesIO()
        stream = _Stream("rank 0", out, b"", deque())
        for part in (written[:cut], written[cut:]):
            stream.feed(part)
        stream.feed(b"", end=True)
        assert out.getvalue() == own + b"\n"
        assert list(stream.last) == own.splitlines()
        assert capfdbinary.readouterr().err == 2 * (tag + report)


def test_local_ranks() -> None:
    assert said("--dry-run", "-n", "2", "train.py", "-n", "x y").splitlines() == [
        f"PYTHONHASHSEED=0 PYTHONUNBUFFERED=1 RANK={k} WORLD_SIZE=2 {AT} LOCAL_RANK={k}"
        f" LOCAL_WORLD_SIZE=2 {PYTHON} train.py -n 'x y'"
        for k in range(2)
    ]


def test_the_number_is_written_as_for_mpirun_and_the_command_as_a_module() -> None:
    want = said("--dry-run", "-n", "2", "train.py")
    assert said("--dry-run", "-np", "2", "train.py") == want
    command = (sys.executable, "-m", "tessera", "run", "--dry-run", "--nproc", "2", "train.py")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(shown.stdout.splitlines()) == 2


def test_local_ranks_of_a_file(folder: Path) -> None:
    lines = said("--rank-binding", "ranks.yaml", "--dry-run", "train.py").splitlines()
    for k, line in enumerate(lines):
        local = [f"LOCAL_RANK={k}", "LOCAL_WORLD_SIZE=2"]
        assert shlex.split(line) == [*bound(k, folder), *local, sys.executable, "train.py"]


@pytest.mark.parametrize("by", ["--backend mpi", "tt-run"])
def test_mpirun(by: str, folder: Path) -> None:
    options = ["--rank-binding", "ranks.yaml", "--dry-run"]
    if by == "tt-run":
        line = said(*options, "python", "work.py", by="mpi")
        more = []
    else:
        more = ["--rankfile", "my hosts.txt", "--mca", "btl", "tcp"]
        line = said(*options, "--mpi-args", shlex.join(more), "python", "work.py")
    expected = ["--bind-to", "none", *more]
    for k in range(2):
        handed = [*bound(k, folder), "TESSERA_TOKEN"]
        expected += [":"] * k + ["-np", "1", *(w for v in handed for w in ("-x", v))]
        expected += ["python", "work.py"]
    program, *rest = shlex.split(line)
    assert program in ("mpirun", "mpirun-ulfm") and rest == expected


def test_mpirun_hands_on_what_ranks_on_other_hosts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TESSERA_DETERMINISTIC",
        "JAX_PLATFORMS",
        "PYTHONPATH",
        "UNRELATED",
        "TESSERA_JOIN",
    ):
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else "0")
    words = shlex.split(said("-n", "1", "--backend", "mpi", "--dry-run", "python", "x"))
    handed = [b for a, b in itertools.pairwise(words) if a == "-x" and "=" not in b]
    assert handed == ["TESSERA_TOKEN", "JAX_PLATFORMS", "PYTHONPATH", "TESSERA_DETERMINISTIC"]


def test_srun() -> None:
    words = shlex.split(
        said("-n", "2", "--slurm-args", "--nodes=2 --gpus-per-task=1", "--prefix", "--dry-run",
             "--coordinator", "login:4000", "python", "it's.py")
    )  # fmt: skip
    assert words[:6] == ["srun", "--ntasks=2", "--kill-on-bad-exit=1", "--label", "--nodes=2",
                         "--gpus-per-task=1"]  # fmt: skip
    alike = "PYTHONHASHSEED=0 PYTHONUNBUFFERED=1 WORLD_SIZE=2 TESSERA_COORDINATOR=login:4000"
    script = f"exec env RANK=\"$SLURM_PROCID\" {alike} python 'it'\"'\"'s.py'"
    assert words[6:] == ["sh", "-c", script]


def test_srun_gives_each_rank_its_variables(folder: Path) -> None:
    odd = BINDINGS.replace("{NAME:", "{ODD: it's a $$HOME, NAME:")
    (folder / "ranks.yaml").write_text(odd)
    options = ["--rank-binding", "ranks.yaml", "--backend", "slurm", "--dry-run"]
    *_, sh, c, script = shlex.split(said(*options, "env"))
    for k in range(2):
        here = {**os.environ, "SLURM_PROCID": str(k)}
        seen = subprocess.run([sh, c, script], env=here, capture_output=True, text=True).stdout
        assert {*bound(k, folder), "ODD=it's a $HOME"} <= {*seen.splitlines()}


def test_the_command_of_many_ranks_is_short_enough_for_one_argument() -> None:
    program = ["python", "-c", "pass", "--data", "/scratch/project/tokens.bin"]
    words = shlex.split(said("-n", "10000", "--backend", "slurm", "--dry-run", *program))
    assert len(words[-1]) < 1 << 10  # Linux limits one argument to 128 KiB


def test_the_token_is_on_no_command_line() -> None:
    for backend in ("local", "mpi", "slurm"):
        assert "TESSERA_TOKEN=" not in said(
            "-n", "2", "--backend", backend, "--dry-run", "train.py"
        )


def test_a_module_and_devices() -> None:
    assert said("-n", "1", "--devices", "4", "--dry-run", "-m", "train", "--steps", "2") == (
        f"TESSERA_DEVICES=4 PYTHONHASHSEED=0 PYTHONUNBUFFERED=1 RANK=0 WORLD_SIZE=1 {AT}"
        f" LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 {PYTHON} -m train --steps 2\n"
    )


BAD = ["train.py",
    "-n 2 --rank-binding ranks.yaml train.py",
    "-n 2 absent.py",
    "-n 2 .",
    "-n 2 no-such-program",
    "-n 2 --backend k8s train.py",
    "-n 2 --backend local --mpi-args -v train.py",
    "-n 2 --backend mpi --slurm-args -v train.py",
    "-n 2 --mpi-args '\"' train.py",
    "-n 2 --coordinator a:b:c@d train.py",
    "-n 2 --coordinator 192.0.2.1 train.py",
    "--rank-binding absent.yaml train.py",]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_have_a_way_out(arguments: str, golden: Golden) -> None:
    golden(said(*shlex.split(arguments), code=2))


@pytest.mark.parametrize("options", ["-n 2", "--elastic 1:2", "-n 2 --backend slurm"])
def test_a_launcher_for_each_host_is_an_error(
    options: str, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """`srun tessera run`, in the style of torchrun, would start as many runs as tasks."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    words = [*options.split(), "--dry-run", "train.py"]
    golden(said(*words, code=2))
    monkeypatch.setenv("TESSERA_JOIN", "0")
    assert "train.py" in said(*words)
    monkeypatch.delenv("TESSERA_JOIN")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # an interactive step
    assert "train.py" in said(*words)


def test_a_backend_that_is_not_here(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setenv("PATH", "")
    golden("".join(said("-n", "2", "--backend", b, "train.py", code=2) for b in ("mpi", "slurm")))


def test_tt_run_takes_mpirun_where_it_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = folder / "bin" / "mpirun"
    program.parent.mkdir()
    program.touch(0o700)
    options = ["--rank-binding", "ranks.yaml", "--dry-run", "train.py"]
    begins = {}
    for path in (program.parent, folder):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setattr(sys, "argv", ["tt-run", *options])
        with pytest.raises(SystemExit) as ended:
            tt_run()
        assert ended.value.code == 0
        begins[path] = capsys.readouterr().out.split()[0]
    assert begins == {program.parent: "mpirun", folder: f"TT_METAL_CACHE={CACHE}0"}
