"""Which devices are there, and which of them is a mesh? Virtual CPU devices start by themselves."""

from __future__ import annotations

from functools import lru_cache

import jax
import numpy as np
from jax._src import xla_bridge

from ..core import switches
from ..core.errors import BackendError, fail
from ..core.mesh import Mesh
from .heap import keep_pages

# How many virtual devices a CPU backend starts with when nobody asks for more.
VIRTUAL = 8


def start(needed: int = 1) -> None:
    """Starts the backend, on a CPU with at least `needed` virtual devices.

    Raises BackendError where it already runs with fewer.
    """
    if not xla_bridge.backends_are_initialized():
        count = max(needed, switches.number(switches.DEVICES, VIRTUAL))
        jax.config.update("jax_num_cpu_devices", count)
        keep_pages()
    have = len(jax.devices())
    if have < needed:
        raise fail(
            BackendError,
            f"mesh: needs {needed} devices, this machine has {have}",
            [("backend", f"{have} x {jax.devices()[0].platform}")],
            fix=f"start with {switches.DEVICES}={needed} (virtual CPU devices), or use a smaller"
            " mesh",
        )


def device_count() -> int:
    """How many devices this machine has; starts the backend."""
    start()
    return len(jax.devices())


@lru_cache(maxsize=256)
def jax_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """The JAX mesh over the same devices. Raises BackendError where there are too few."""
    start(max(mesh.device_ids) + 1)
    every = jax.devices()
    grid = np.array([every[i] for i in mesh.device_ids], dtype=object).reshape(mesh.shape)
    return jax.sharding.Mesh(grid, mesh.axes)
