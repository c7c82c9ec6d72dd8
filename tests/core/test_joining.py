"""Rank, size and address of a process, from each launcher's environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera import UsageError
from tessera.core.ranks import Rank, rank_of
from tests.messages import Golden

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}  # fmt: skip
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "42"}  # fmt: skip
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1",
         "MASTER_ADDR": "n1"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
         "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
         "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]"}  # fmt: skip
RUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4",
       "TESSERA_COORDINATOR": "127.0.0.1:4000", "TESSERA_TOKEN": "secret"}  # fmt: skip
KUBE = {"JOB_COMPLETION_INDEX": "2", "NUM_PROCESSES": "3", "COORDINATOR_ADDRESS": "j-0.j",
        "COORDINATOR_PORT": "1234"}  # fmt: skip


def rank(launcher: str, *numbers: int, at: str, hosted: bool = False, token: str = "") -> Rank:
    return Rank(launcher, *numbers, coordinator=at, hosted=hosted, token=token)


FOUND = {
    "nothing": ({}, None),
    "torchrun": (TORCH, rank("torchrun", 1, 4, 1, 2, at="n1:29501")),
    "the last port": (
        {**TORCH, "MASTER_PORT": "65535"},
        rank("torchrun", 1, 4, 1, 2, at="n1:65534"),
    ),
    "no port": (
        {k: v for k, v in TORCH.items() if k != "MASTER_PORT"},
        rank("torchrun", 1, 4, 1, 2, at="n1:29400"),
    ),
    "an address of IPv6": (
        {**TORCH, "MASTER_ADDR": "fe80::1"},
        rank("torchrun", 1, 4, 1, 2, at="[fe80::1]:29501"),
    ),
    "one process": ({**TORCH, "RANK": "0", "WORLD_SIZE": "1"}, None),
    "a rank without an address": ({"RANK": "1", "WORLD_SIZE": "4"}, None),
    "no local rank": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"},
        rank("torchrun", 1, 2, 0, 1, at="n1:29400"),
    ),
    "mpirun": (OMPI, rank("mpirun", 1, 2, 1, 2, at="127.0.0.1:28288", token="42")),
    "mpirun on two hosts": (
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
         "TESSERA_COORDINATOR": "n1:5"},
        rank("mpirun", 1, 2, 0, 1, at="n1:5", token="42"),
    ),
    "mpirun in a job of Slurm": (
        {**SLURM, **OMPI},
        rank("mpirun", 1, 2, 1, 2, at="127.0.0.1:28288", token="42"),
    ),
    "mpiexec of MPICH": (HYDRA, rank("mpiexec", 0, 2, 0, 1, at="n1:29400")),
    "srun": (SLURM, rank("srun", 3, 4, 1, 2, at="gpu07:20719", token="7.0")),
    "srun on one node": (
        {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "3"},
        rank("srun", 3, 4, 3, 4, at="127.0.0.1:20719", token="7.0"),
    ),
    "a script of sbatch, outside of srun": (
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"} | {"SLURM_NTASKS": "4"},
        None,
    ),
    "tessera run": (
        RUN,
        rank("tessera run", 2, 4, 2, 4, at="127.0.0.1:4000", hosted=True, token="secret"),
    ),
    "tessera run inside of others": (
        {**TORCH, **OMPI, **SLURM, **RUN},
        rank("tessera run", 2, 4, 2, 4, at="127.0.0.1:4000", hosted=True, token="secret"),
    ),
    "tessera run through mpirun": (
        {**OMPI, **{k: v for k, v in RUN.items() if "LOCAL" not in k}},
        rank("tessera run", 2, 4, 1, 2, at="127.0.0.1:4000", hosted=True, token="secret"),
    ),
    "tessera run through srun": (
        {**SLURM, **{k: v for k, v in RUN.items() if "LOCAL" not in k}},
        rank("tessera run", 2, 4, 1, 2, at="127.0.0.1:4000", hosted=True, token="secret"),
    ),
    "srun, a node with fewer": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
        rank("srun", 3, 4, 0, 1, at="gpu07:20719", token="7.0"),
    ),
    "by hand": (
        {"RANK": "0", "WORLD_SIZE": "2", "TESSERA_COORDINATOR": "n1"},
        rank("tessera run", 0, 2, 0, 1, at="n1:29400"),
    ),
    "a JobSet": (KUBE, rank("Kubernetes", 2, 3, 0, 1, at="j-0.j:1234")),
    "a JobSet of PyTorch": (
        {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "j-0.j",
         "MASTER_PORT": "9"},
        rank("Kubernetes", 1, 2, 0, 1, at="j-0.j:10"),
    ),
    "an indexed job": ({"JOB_COMPLETION_INDEX": "1", "NUM_PROCESSES": "2"}, None),
    "a JAXJob": ({**KUBE, "PROCESS_ID": "1"}, rank("JAXJob", 1, 3, 0, 1, at="j-0.j:1234")),
    "switched off": ({**TORCH, "TESSERA_JOIN": "0"}, None),
}  # fmt: skip
WRONG = {
    "a word": {**TORCH, "RANK": "one"},
    "too great": {**TORCH, "RANK": "4"},
    "none": {**OMPI, "OMPI_COMM_WORLD_SIZE": "0"},
    "a port": {**TORCH, "MASTER_PORT": "70000"},
    "an address": {**RUN, "TESSERA_COORDINATOR": "http://n1"},
    "nowhere to meet":
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    "a switch": {**TORCH, "TESSERA_JOIN": "never"},
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_launcher_says_who_this_process_is(name: str) -> None:
    variables, expected = FOUND[name]
    assert rank_of(variables) == expected


@pytest.mark.parametrize("name", WRONG)
def test_variables_without_a_meaning_are_refused(name: str, golden: Golden) -> None:
    with pytest.raises(UsageError) as raised:
        rank_of(WRONG[name])
    golden(raised.value)


def test_both_sides_of_mpirun_meet_at_one_port() -> None:
    mine, other = rank_of(OMPI), rank_of({**OMPI, "OMPI_COMM_WORLD_RANK": "0"})
    assert mine and other and mine.coordinator == other.coordinator
    third = rank_of({**OMPI, "PMIX_NAMESPACE": "43"})
    assert third and third.coordinator != mine.coordinator


def test_a_token_comes_from_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    file = tmp_path / "token"
    env = {**TORCH, "TESSERA_TOKEN_FILE": str(file)}
    head = f"join: TESSERA_TOKEN_FILE={str(file)!r}"

    def refused() -> str:
        with pytest.raises(UsageError) as caught:
            rank_of(env)
        return str(caught.value)

    fix = "name a file that is there on every host"
    assert refused() == f"{head} cannot be read: No such file or directory\n  fix : {fix}"
    file.write_text("secret\n")
    file.chmod(0o640)
    assert refused() == f"{head} may be read by others\n  fix : chmod 600 {file}"
    file.chmod(0o600)
    found = rank_of(env)
    assert found is not None and (found.token, found.hosted) == ("secret", False)
    both = rank_of({**env, "TESSERA_TOKEN": "other"})
    assert both is not None and both.token == "other"
    file.write_bytes(b"\xff")
    assert refused() == f"{head} cannot be read: it is not text\n  fix : {fix}"
    file.write_text("\n")
    assert refused() == f"{head} is empty\n  fix : openssl rand -hex 16 > {file}"
