"""Transports of collectives that this program has, asked from the engine."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import jax

from ..core.transports import Transport, Transports, choices
from .devices import start
from .jax_private import cpu_collectives

NVSHMEM_FLAG = "--xla_gpu_experimental_enable_nvshmem=true"
MPI_LIBRARY = "MPITRAMPOLINE_LIB"


def transports() -> Transports:
    """Returns the transports between this program's devices, why each is available or not, and the
    choice of "auto".

    Joins the run and starts the engine. Asking for an unavailable transport changes no result: the
    choice of "auto" carries the data.

    >>> found = transports()
    >>> found["in-process"].available, found["deepep"].available
    (True, False)
    """
    start()
    platform = jax.default_backend()
    chosen = cpu_collectives()
    every = (
        _in_process(platform),
        _gloo(platform, chosen),
        _mpi(platform, chosen),
        _nccl(platform),
        _nvshmem(platform),
        _deepep(),
    )
    return Transports(every, choices(platform, jax.process_count(), chosen))


def _in_process(platform: str) -> Transport:
    count = len(jax.local_devices())
    own = f"{count} {platform} device{'s' * (count > 1)} of this process"
    own += " share its memory" * (count > 1)
    return Transport("in-process", platform == "cpu", own)


def _gloo(platform: str, chosen: str) -> Transport:
    if platform != "cpu":
        return Transport("gloo", False, f"it joins CPUs, and the devices are {platform}")
    if chosen == "gloo":
        return Transport("gloo", True, "jaxlib has it; it joins processes by TCP")
    return Transport(
        "gloo", False, f"jax's option jax_cpu_collectives_implementation is {chosen}",
        "unset JAX_CPU_COLLECTIVES_IMPLEMENTATION",
    )  # fmt: skip


def _mpi(platform: str, chosen: str) -> Transport:
    if platform != "cpu":
        return Transport("mpi", False, f"it joins CPUs, and the devices are {platform}")
    how = f"build MPIwrapper, set {MPI_LIBRARY} to its library and "
    how += "JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi; one device a process"
    library = os.environ.get(MPI_LIBRARY, "")
    if not library:
        return Transport("mpi", False, f"{MPI_LIBRARY} names no library", how)
    if not Path(library).exists():
        return Transport("mpi", False, f"{MPI_LIBRARY}: there is no {library}", how)
    if chosen != "mpi":
        return Transport(
            "mpi", False, f"{library} is there, and jax is set to {chosen}",
            "set JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi",
        )  # fmt: skip
    return Transport("mpi", True, f"by {library}")


def _nccl(platform: str) -> Transport:
    if platform not in ("gpu", "cuda"):
        return Transport("nccl", False, f"it joins NVIDIA GPUs, and the devices are {platform}")
    return Transport("nccl", True, f"XLA has it ({_version('nccl') or 'its own copy'})")


def _nvshmem(platform: str) -> Transport:
    if platform not in ("gpu", "cuda"):
        return Transport("nvshmem", False, f"it joins NVIDIA GPUs, and the devices are {platform}")
    found = _version("nvshmem")
    if not found:
        return Transport(
            "nvshmem", False, "its library is not installed",
            f'pip install "jax[cuda12]", and add {NVSHMEM_FLAG} to XLA_FLAGS',
        )  # fmt: skip
    if NVSHMEM_FLAG not in os.environ.get("XLA_FLAGS", ""):
        return Transport(
            "nvshmem", False, f"{found} is there, and XLA does not use it",
            f"add {NVSHMEM_FLAG} to XLA_FLAGS",
        )  # fmt: skip
    return Transport("nvshmem", True, f"{found}, by XLA_FLAGS")


def _deepep() -> Transport:
    there = "deep_ep is installed" if find_spec("deep_ep") else "deep_ep is not installed"
    return Transport(
        "deepep", False, f"{there}; its kernels are PyTorch's, which XLA's programs cannot call"
    )


def _version(name: str) -> str:
    """Returns the name and version of the installed NVIDIA library; "" if there is none."""
    for n in (13, 12):
        try:
            return f"nvidia-{name}-cu{n} {version(f'nvidia-{name}-cu{n}')}"
        except PackageNotFoundError:
            continue
    return ""
