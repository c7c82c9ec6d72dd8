"""Which devices are there, and which of them is a mesh? Virtual CPU devices start by themselves."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache

import jax
import numpy as np
from jaxlib import version

from ..core import environment, flags
from ..core.errors import BackendError, EngineWarning, caller, fail
from ..core.mesh import Mesh
from .jax_private import processes
from .malloc import keep_pages

# How many virtual devices a CPU backend starts with when nobody asks for more.
VIRTUAL = 8


def start(needed: int = 1, mesh: Mesh | None = None) -> None:
    """Starts the backend, on a CPU with at least `needed` virtual devices.

    Raises BackendError if it already runs with fewer.
    """
    if not flags.engine_runs():
        count = max(-(-needed // processes()), environment.number(environment.DEVICES, VIRTUAL))
        jax.config.update("jax_num_cpu_devices", count)
        keep_pages()
    _see_reductions()
    have = len(jax.devices())
    if have < needed:
        raise fail(
            BackendError,
            f"mesh: needs {needed} devices, this machine has {have}",
            [("backend", f"{have} x {jax.devices()[0].platform}")],
            fix=f"{_smaller(mesh, have)}, or {environment.DEVICES}={needed} (virtual CPU devices)",
        )


@cache
def _see_reductions() -> None:
    """Warns, once, where the backend fuses reductions in a way that is wrong (core/flags.py): it
    was started by others, without the flag. What it does is asked of the backend itself."""
    if flags.is_exact() or jax.default_backend() != "cpu":
        return
    rows = jax.ShapeDtypeStruct((1024, 1024), np.float32)  # small ones it leaves alone
    program = jax.jit(lambda x: x.sum(-1)).lower(rows).compile()
    if "__ynn_fusion" in (program.as_text() or ""):
        warnings.warn(
            f"jaxlib {version.__version__} computes some sums and maxima on a CPU wrongly,"
            f" and its backend runs without the flag that prevents it ({caller() or 'here'}):"
            f" import tessera before the first array of jax, or set XLA_FLAGS={flags.EXACT}",
            EngineWarning,
            stacklevel=2,
        )


def _smaller(mesh: Mesh | None, have: int) -> str:
    """How `mesh` comes to fit `have` devices."""
    if mesh is None or mesh.size <= have:
        return f"name devices from 0 to {have - 1}"
    onto = max(n for n in range(1, have + 1) if mesh.size % n == 0)
    return f"mesh.fold(onto={onto}), a smaller mesh"


def need_plain(who: str) -> None:
    """Raises BackendError if the backend contracts multiplications and additions, or chooses
    kernels by their speed."""
    if jax.default_backend() != "cpu":
        raise fail(
            BackendError,
            f"{who}: bits that no mesh changes are kept on a CPU only",
            [("backend", jax.default_backend())],
            fix='ask for less: level="run_to_run"',
        )
    if not flags.is_plain():
        raise fail(
            BackendError,
            f"{who}: this level of determinism was set after the backend had started",
            [("backend", "contracts a multiplication and an addition where it likes")],
            fix=f"call dist.set_deterministic() before anything runs, or set"
            f" {environment.DETERMINISTIC}=1",
        )


def device_count() -> int:
    """How many devices this machine has; starts the backend."""
    start()
    return len(jax.devices())


@lru_cache(maxsize=256)
def jax_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """The JAX mesh over the devices that run `mesh`. Raises BackendError if they are too few."""
    mesh = mesh.physical
    start(max(mesh.device_ids) + 1, mesh)
    every = jax.devices()
    grid = np.array([every[i] for i in mesh.device_ids], dtype=object).reshape(mesh.shape)
    return jax.sharding.Mesh(grid, mesh.axes)
