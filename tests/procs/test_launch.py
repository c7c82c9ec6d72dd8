"""`tessera run`: one program of many processes, all ended with it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tessera import checkpoint
from tessera.launch.guard import TIES
from tests.cases import LONG, short
from tests.procs.launched import (
    END_S,
    HEAD,
    LIMIT_S,
    command,
    launch,
    lives,
    others,
    said,
    until,
    variables,
)

FIRST = """\
import numpy as np
import tessera as ts
options = ts.graph.trace(lambda x: x.sum(), np.ones(2, np.float32)).options
print(options.processes)
"""
# A collective as a program's first act, before anything has started the engine.
ACTS = {
    "a model is written": """\
config = nn.GPTConfig(vocab=16, seq=8, d=8, layers=1, heads=2)
checkpoint.save_hf(dist.place(nn.GPT(config), PLAN, MESH), "model")""",
    "a checkpoint is written": """\
layer = dist.place(nn.Linear(4, 4), PLAN, MESH)
checkpoint.save("a", layer.parameters(), root="kept", async_io=False, quiet=True)
checkpoint.load(tensors=layer.parameters(), root="kept")""",
    "a weight is read": """\
dist.to_host(dist.place(nn.Linear(4, 4), PLAN, MESH).weight)""",
    "ranks wait for each other": "dist.barrier()",
    "a checkpoint of one process is loaded": """\
like = {"w": dist.tensor((8,), mesh=MESH, layout="[8@dp]")}
checkpoint.load(None, like, root="alone")
assert dist.to_host(like["w"]).sum() == 28.0""",
    "loops run at once": """\
total = lambda x: ts.scan(lambda c, r: (c * x + r, None), ts.tensor(1.0), ts.ones(3))[0]
assert ts.value_and_grad(total)(ts.tensor(2.0))[1].item() == 17.0
assert ts.while_loop(lambda n: n < 5, lambda n: n + 1, ts.tensor(0)).item() == 5
model = nn.GPT(nn.GPTConfig(vocab=16, seq=8, d=8, layers=2, heads=2, loop=True))
ts.grad(model.loss([[1, 2, 3]], [[2, 3, 4]]), model)""",
}
ACT = """\
import tessera as ts
from tessera import checkpoint, dist, nn
MESH = dist.Mesh.parse("dp=4")
PLAN = dist.strategy("zero_redundancy_optimizer", stage=3)
"""
TOTAL = HEAD + "print(RANK, dist.all_reduce(X.sum()).item(), ts.tensor([1.0, 2.0]).sum().item())\n"
# A rank that writes its pid, and waits.
WAIT = 'echo $$ > pid$RANK; exec sleep 600'  # fmt: skip


def pids(folder: Path, size: int) -> list[int]:
    """The pids of the ranks, once all have started."""
    files = [folder / f"pid{k}" for k in range(size)]
    until(lambda: all(f.is_file() and f.read_text().strip() for f in files), folder=folder)
    return [int(f.read_text()) for f in files]


def command_lines() -> dict[int, bytes]:
    """The command lines of all processes here, by pid."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found[int(file.parent.name)] = file.read_bytes()
    return found


def gone(which: Iterable[int]) -> bool:
    """Returns whether these processes end soon; a SIGKILL may take a moment."""
    numbers = [*which]
    return until(lambda: not any(map(lives, numbers))) < END_S


@pytest.mark.parametrize(
    "name", short(ACTS, "a checkpoint is written", "ranks wait for each other", "loops run at once")
)
def test_a_program_begins_with_what_needs_all_ranks(name: str, tmp_path: Path) -> None:
    alone = {"w": np.arange(8.0)}
    checkpoint.save("t", alone, root=tmp_path / "alone", async_io=False, quiet=True)
    (tmp_path / "act.py").write_text(f"{ACT}{ACTS[name]}\nprint('done')\n")
    done = launch("-n", 2, "act.py", folder=tmp_path, TESSERA_DEVICES="2")
    assert (done.code, said(done.out, "done")) == (0, ["done", "done"]), done.err


# A thread prints while the engine reports the connections in pieces.
BESIDE = """
import threading
connected = threading.Event()

def chat():
    while not connected.is_set():
        print("a line of", RANK)
        time.sleep(1e-5)

beside = threading.Thread(target=chat)
beside.start()
total = dist.all_reduce(X.sum()).item()
connected.set()
beside.join()
print("total", total)
"""


def test_stdout_is_the_programs_alone(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(HEAD + BESIDE)
    done = launch("-n", 2, "beside.py", folder=tmp_path)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert {*lines} == {"a line of 0", "a line of 1", "total 6.0"}
    assert lines.count("total 6.0") == 2
    reported = r"(?m)^\[Gloo\] Rank (\d) is connected to 1 peer ranks\. .* : 1$"
    assert said(done.err, reported) == ["0", "1"]


MORE = 'dist.to_host(X)\ndist.to_host(ts.tensor(np.ones(8), mesh=dist.Mesh.parse("dp=4")))\n'
BARRIER = """
time.sleep(3 * RANK)
since_s = time.monotonic()
for _ in range(3):
    dist.barrier()
print("waited", RANK, time.monotonic() - since_s > 2)
if RANK == 0:
    dist.set_collective_timeout(2)
    try:
        dist.barrier()
    except ts.BackendError as error:
        print("error", str(error).splitlines()[0])
else:
    time.sleep(5)
"""


def test_processes_wait_at_a_barrier_and_who_does_not_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text(HEAD + BARRIER)
    done = launch("-n", 2, "bar.py", folder=tmp_path)
    assert said(done.out, "(?:waited|error) .*") == [
        "error barrier: a collective took longer than 2 s: rank 1 did not arrive",
        "waited 0 True",
        "waited 1 False",
    ], done
    assert done.code == 0, done.err


def test_more_devices_than_there_are_is_an_error_with_those_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(HEAD + MORE)
    done = launch("-n", 2, "more.py", folder=tmp_path)
    fix = "or TESSERA_DEVICES=2 (virtual CPU devices of each process; tessera run --devices 2)"
    assert fix in done.err, done


@LONG
def test_ranks_join_and_compute_together(tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text(TOTAL)
    done = launch("-n", 3, "--prefix", "total.py", folder=tmp_path)
    assert done.code == 0, done.err
    assert said(done.out, r"\[rank \d\] \d \d+\.0 \d\.0") == [
        f"[rank {k}] {k} 15.0 3.0" for k in range(3)
    ]


def test_a_program_is_recorded_for_all_processes_also_before_the_engine_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "first.py").write_text(FIRST)
    for size, printed in ((1, "1\n"), (2, "2\n2\n")):
        done = launch("-n", size, "first.py", folder=tmp_path)
        assert (done.code, done.out) == (0, printed), done.err


def test_a_rank_that_fails_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    others = "while [ ! -s pid0 ] || [ ! -s pid2 ]; do sleep 0.1; done"
    body = (
        f"[ $RANK = 1 ] || {{ {WAIT}; }}; {others}; echo first; sleep 0.3; echo second >&2; exit 3"
    )
    done = launch("-n", 3, "sh", "-c", body, folder=tmp_path)
    assert done.code == 3
    assert done.out == "first\n"
    said = re.sub(r"after \d+\.\d s", "after S s", done.err)
    assert said == (
        "second\n"
        "tessera run: rank 1 exited with status 3 after S s; the others were ended\n"
        "  the last lines of rank 1:\n"
        "  | first\n"
        "  | second\n"
    )
    assert gone(int((tmp_path / f"pid{k}").read_text()) for k in (0, 2))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(rank: int, tmp_path: Path) -> None:
    def kill(started: subprocess.Popen[str]) -> None:
        os.kill(pids(tmp_path, 3)[rank], signal.SIGKILL)

    done = launch("-n", 3, "sh", "-c", WAIT, folder=tmp_path, meanwhile=kill)
    assert done.code == 128 + 9
    assert f"tessera run: rank {rank} was killed by SIGKILL (by a user, or as memory" in done.err
    assert gone(pids(tmp_path, 3))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=LONG)]
)
def test_ctrl_c_ends_every_rank(number: int, code: int, tmp_path: Path) -> None:
    def interrupt(started: subprocess.Popen[str]) -> None:
        pids(tmp_path, 2)
        started.send_signal(number)

    # One rank ignores the signal, and so does its subprocess.
    body = f"[ $RANK = 1 ] && trap '' INT TERM; sleep 600 & echo $! > child$RANK; {WAIT}"
    words = ("-n", 2, "--grace", 2)
    done = launch(*words, "sh", "-c", body, folder=tmp_path, meanwhile=interrupt)
    assert done.code == code, done.err
    children = [int((tmp_path / f"child{k}").read_text()) for k in range(2)]
    assert gone(pids(tmp_path, 2) + children)


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_that_save_have_their_time_and_a_second_signal_ends_them(
    waits: bool, tmp_path: Path
) -> None:
    def tell(started: subprocess.Popen[str]) -> None:
        pids(tmp_path, 2)
        started.send_signal(signal.SIGTERM)
        line = "waits for rank 0, rank 1 to save"
        until(lambda: line in (tmp_path / "err").read_text(), END_S)
        if waits:
            (tmp_path / "go").touch()
        else:
            started.send_signal(signal.SIGTERM)

    saves = "while [ ! -e go ]; do sleep 0.1; done; touch saved$RANK; exit 143"
    # A shell in one long `sleep` may miss a signal that arrives before the sleep.
    body = f"trap '{saves}' TERM; echo $$ > pid$RANK; while :; do sleep 0.1; done"
    done = launch("-n", 2, "sh", "-c", body, folder=tmp_path, meanwhile=tell)
    assert done.code == 143, done.err
    assert gone(pids(tmp_path, 2))
    assert [(tmp_path / f"saved{k}").exists() for k in range(2)] == [waits] * 2


def test_nothing_stays_when_the_launcher_is_killed(tmp_path: Path) -> None:
    def kill(started: subprocess.Popen[str]) -> None:
        pids(tmp_path, 2)
        started.kill()

    body = f"[ $RANK = 1 ] && trap '' TERM; sleep 600 & echo $! > child$RANK; {WAIT}"
    done = launch("-n", 2, "sh", "-c", body, folder=tmp_path, meanwhile=kill)
    assert done.code == -9
    children = [int((tmp_path / f"child{k}").read_text()) for k in range(2)]
    assert gone(pids(tmp_path, 2) + children)


@pytest.mark.skipif(not TIES, reason="only Linux ends the children of a process that is killed")
def test_no_rank_stays_when_launcher_and_guard_are_killed_at_once(tmp_path: Path) -> None:
    def kill(started: subprocess.Popen[str]) -> None:
        group = os.getpgid(pids(tmp_path, 2)[0])
        os.kill(group, signal.SIGSTOP)  # stopped, so that it does nothing between the two signals
        started.kill()
        os.kill(group, signal.SIGKILL)

    body = f"[ $RANK = 1 ] && trap '' TERM INT HUP; {WAIT}"
    launch("-n", 2, "sh", "-c", body, folder=tmp_path, meanwhile=kill)
    assert gone(pids(tmp_path, 2))


def test_a_run_that_ends_leaves_nothing_that_its_ranks_started(tmp_path: Path) -> None:
    done = launch("-n", 2, "sh", "-c", "sleep 600 & echo $! > child$RANK", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert gone(int((tmp_path / f"child{k}").read_text()) for k in range(2))


def test_a_coordinator_that_ends_ends_the_run(tmp_path: Path) -> None:
    def kill(started: subprocess.Popen[str]) -> None:
        group = os.getpgid(pids(tmp_path, 2)[0])  # the guard process leads the group
        os.kill(group, signal.SIGKILL)

    done = launch("-n", 2, "sh", "-c", WAIT, folder=tmp_path, meanwhile=kill)
    said = "tessera run: the coordinator ended, so all ranks were ended\n"
    assert (done.code, done.err) == (1, said)
    assert gone(pids(tmp_path, 2))


def test_ranks_have_the_users_variables_and_not_those_of_the_launchers_import(
    tmp_path: Path,
) -> None:
    body = 'echo "$XLA_FLAGS,$TF_CPP_MIN_LOG_LEVEL,$MINE"'
    done = launch("-n", 1, "sh", "-c", body, folder=tmp_path, XLA_FLAGS="--x=1", MINE="2")
    assert (done.code, done.out) == (0, "--x=1,,2\n")
    assert launch("-n", 1, "sh", "-c", body, folder=tmp_path).out == ",,\n"


def test_what_cannot_be_started_is_an_error_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("no program")
    (tmp_path / "odd").chmod(0o700)
    done = launch("-n", 2, "./odd", folder=tmp_path)
    assert done.code == 2
    assert done.err.startswith(
        "tessera run: rank 0: './odd' cannot be started: Exec format error\n"
    )


@LONG
def test_a_run_outlives_its_terminal_with_nohup(tmp_path: Path) -> None:
    def hang_up(started: subprocess.Popen[str]) -> None:
        pids(tmp_path, 1)
        started.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()

    body = "echo $$ > pid0; while [ ! -e go ]; do sleep 0.1; done; sleep 1; echo end"
    whole = ["nohup", *command("run", "-n", 1, "sh", "-c", body)]
    done = launch(whole=whole, folder=tmp_path, meanwhile=hang_up)
    assert (done.code, done.out) == (0, "end\n")


# -- ranks that compute ---------------------------------------------------------------------------
# Files show a rank's progress: pid (started), joined, ready (all have computed together).
STEPS = (
    "import os, pathlib\n"
    "pathlib.Path('pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
    + HEAD
    + """
open(f"joined{RANK}", "w").close()
@ts.jit
def step(x):
    return dist.redistribute(x, f"[{SIZE}, 2]") / SIZE
for k in range(100_000):
    total = dist.all_reduce((step(X) * X.sum()).sum()).item()
    open(f"ready{RANK}", "w").close()
    if os.path.exists(f"fail{RANK}"):
        raise ValueError("as the test asks")
"""
)
MOMENTS = ("pid", "joined", "ready")
SHORT = (1, 4)  # each rank once: before it joins and while it computes


@pytest.mark.parametrize(
    "seed", [pytest.param(k, marks=[LONG] * (k not in SHORT)) for k in range(18)]
)
def test_a_rank_may_be_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    """Each rank at each of the moments, with a random delay of up to a second."""
    rank, moment = seed % 2, MOMENTS[seed // 2 % 3]
    wait_s = random.Random(seed).uniform(0, 1)
    killed: list[float] = []

    def kill(started: subprocess.Popen[str]) -> None:
        victim = pids(tmp_path, 2)[rank]
        until(lambda: (tmp_path / f"{moment}{rank}").exists(), folder=tmp_path)
        time.sleep(wait_s)
        os.kill(victim, signal.SIGKILL)
        killed.append(time.monotonic())

    (tmp_path / "steps.py").write_text(STEPS)
    done = launch("-n", 2, "steps.py", folder=tmp_path, meanwhile=kill)
    assert time.monotonic() - killed[0] < END_S
    assert done.code == 128 + 9, done.err
    assert f"tessera run: rank {rank} was killed by SIGKILL (by a user, or as memory" in done.err
    assert gone(pids(tmp_path, 2))


@LONG
def test_an_error_in_one_rank_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "fail1").touch()
    done = launch("-n", 2, "steps.py", folder=tmp_path)
    assert done.code == 1
    assert "tessera run: rank 1 exited with status 1 after " in done.err
    assert done.err.endswith("  | ValueError: as the test asks\n")


@LONG
def test_a_rank_that_does_not_join_is_named(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(600)\n" + TOTAL
    )
    done = launch("-n", 2, "late.py", folder=tmp_path, TESSERA_JOIN_LIMIT="2")
    assert done.code == 1
    assert "BackendError: join: rank 1 did not come within 2 s\n  came : rank 0\n" in done.err
    assert "tessera run: rank 0 exited with status 1 after " in done.err


@pytest.mark.parametrize("first", ["", pytest.param("time.sleep(8)\n", marks=LONG)])
def test_a_rank_that_ends_before_it_joins_is_not_waited_for(first: str, tmp_path: Path) -> None:
    """The error is the same if the others arrive before the rank ends, or after it."""
    (tmp_path / "some.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(4)\n    sys.exit()\n"
        + first
        + TOTAL
    )
    done = launch("-n", 3, "some.py", folder=tmp_path, limit_s=60)
    assert done.code == 1
    assert "join: rank 1 ended before joining the run\n  came : rank" in done.err
    assert "call tessera.distributed.initialize() at its start" in done.err


@LONG
def test_a_rank_whose_engine_runs_already_says_so(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import jax\njax.devices()\n" + TOTAL)
    done = launch("-n", 2, "early.py", folder=tmp_path)
    assert done.code == 1
    assert "join: the engine was started before this process joined its run\n" in done.err


@LONG
def test_what_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    """A subprocess of a rank inherits its variables, and runs alone."""
    (tmp_path / "alone.py").write_text("import tessera as ts\nprint(ts.ones(3).sum().item())\n")
    more = "import subprocess\nsubprocess.run([sys.executable, 'alone.py'], check=True)\n"
    (tmp_path / "total.py").write_text(TOTAL + more)
    done = launch("-n", 2, "total.py", folder=tmp_path)
    assert (done.code, done.out.count("3.0\n")) == (0, 4), done.err


# -- without a launcher of ours -------------------------------------------------------------------
@LONG
def test_processes_of_another_launcher_join_by_themselves(tmp_path: Path) -> None:
    started = others(tmp_path, 2, TOTAL + "time.sleep(2 * RANK)\n")  # rank 0 must be the last one
    assert [p.wait(LIMIT_S) for p in started] == [0, 0], (tmp_path / "err0").read_text()
    for k in range(2):
        lines = (tmp_path / f"out{k}").read_text().splitlines()
        assert f"{k} 6.0 3.0" in lines


def test_a_rank_that_nothing_says_where_to_meet_is_alone_with_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tessera as ts; print(ts.ones(2).sum().item())"],
        env=variables(RANK="0", WORLD_SIZE="2"), cwd=tmp_path, timeout=LIMIT_S,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert "EngineWarning: join: RANK=0 and WORLD_SIZE=2 are set, and nothing says" in done.stderr


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize(
    "joined", [True, pytest.param(False, marks=LONG)], ids=["computing", "before it joins"]
)
def test_the_others_end_when_a_rank_is_killed(joined: bool, rank: int, tmp_path: Path) -> None:
    more = {} if joined else {"TESSERA_JOIN_LIMIT": "3"}
    started = others(tmp_path, 2, STEPS, **more)
    moment = "ready" if joined else "pid"
    try:
        until(lambda: all((tmp_path / f"{moment}{k}").exists() for k in range(2)), folder=tmp_path)
        started[rank].kill()
        began_s = time.monotonic()
        assert started[1 - rank].wait(LIMIT_S) != 0
        assert time.monotonic() - began_s < END_S
    finally:
        for p in started:
            p.kill()
            p.wait(10)


# -- other backends -------------------------------------------------------------------------------
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "many-processes.md").read_text()


def shown(kind: str) -> list[str]:
    """The code blocks of a kind in the page about processes."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


BIG = """
import os
import numpy as np
import tessera as ts
from tessera import dist
mesh = dist.Mesh(("hosts", "devices"), shape={"hosts": 2, "devices": 2})
x = ts.tensor(np.arange(4.0), mesh=mesh, layout="[4@(hosts,devices)]")
host, rank = os.environ["TT_MESH_HOST_RANK"], dist.process_index()
print(host, rank, dist.all_reduce(x.sum()).item())
"""
MPI = pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed here")
# A stand-in for srun, which starts the tasks here.
SRUN = """#!/bin/sh
n=${1#--ntasks=}; shift 2
for k in $(seq 0 $((n - 1))); do SLURM_PROCID=$k SLURM_LOCALID=$k SLURM_STEP_ID=0 "$@" & done
for k in $(seq 1 $n); do wait -n || exit 1; done
"""


@pytest.mark.parametrize(
    "backend", ["local", pytest.param("mpi", marks=MPI), pytest.param("slurm", marks=LONG)]
)
def test_one_mesh_over_ranks_of_two_devices_each(backend: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.yaml").write_text(shown("yaml")[0])
    (tmp_path / "big.py").write_text(BIG)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN.replace("/bin/sh", "/bin/bash"))
    (tmp_path / "bin" / "srun").chmod(0o700)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more = ["--mpi-args", "--oversubscribe"] if backend == "mpi" else []
    done = launch("--rank-binding", "ranks.yaml", "--backend", backend, *more, "big.py",
                  folder=tmp_path, PATH=f"{tmp_path}/bin:{os.environ['PATH']}", **root)  # fmt: skip
    assert done.code == 0, done.err
    assert said(done.out, r"\d \d 6\.0") == ["0 0 6.0", "1 1 6.0"]


@LONG
def test_the_programs_of_the_page_run_on_a_mesh_for_each_process(tmp_path: Path) -> None:
    (tmp_path / "ranks.yaml").write_text(shown("yaml")[1])
    (tmp_path / "page.py").write_text("".join(shown("python")))
    done = launch("--rank-binding", "ranks.yaml", "--prefix", "page.py", folder=tmp_path)
    assert done.code == 0, done.err
    assert said(done.out, r"\[rank \d\] 6\.0.*") == [
        "[rank 0] 6.0",
        "[rank 0] 6.0 on 2 processes",
        "[rank 1] 6.0",
    ]


@LONG
@MPI
def test_ranks_of_mpirun_join_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text(TOTAL)
    whole = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    done = launch(whole=[*whole, sys.executable, "total.py"], folder=tmp_path)
    assert done.code == 0, done.err
    assert {"0 6.0 3.0", "1 6.0 3.0"} <= {*done.out.splitlines()}


@MPI
def test_ranks_of_mpirun_end_with_the_launcher(tmp_path: Path) -> None:
    def kill(started: subprocess.Popen[str]) -> None:
        ranks = pids(tmp_path, 2)
        secret = Path(f"/proc/{ranks[0]}/environ").read_bytes()
        (token,) = re.findall(rb"TESSERA_TOKEN=([0-9a-f]{32})", secret)
        seen.update(n for n, line in command_lines().items() if token in line)
        started.kill()

    seen: set[int] = set()
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launch("-n", 2, "--mpi-args", "--oversubscribe", "sh", "-c", WAIT, folder=tmp_path,
           meanwhile=kill, **root)  # fmt: skip
    assert gone(pids(tmp_path, 2))
    assert not seen, "the token stands on a command line, which all users can read"
