"""Offload of arrays to host memory; text, cost and memory of compiled programs.

If the backend has memory of the kind `pinned_host` (CPU and GPU have), the copy keeps its sharding
and its processes; elsewhere it is a NumPy array. Both copies are asynchronous: programs run
meanwhile.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np

from ..core.layout import TensorType
from . import arrays

Array = Any
KIND = "pinned_host"


def has_host_memory(data: Array) -> bool:
    """Returns whether each device of `data` can address host memory."""
    return all(
        any(m.kind == KIND for m in d.addressable_memories()) for d in data.sharding.device_set
    )


class HostCopy:
    """A copy of one array in host memory; a call, with any argument, returns the array on its
    devices."""

    def __init__(self, data: Array, type: TensorType) -> None:
        arrays.alive([data], [type])
        self.type = type
        self._loose = not data.committed
        if has_host_memory(data):
            self._host: Any = jax.device_put(data, data.sharding.with_memory_kind(KIND))
            self.bytes: int = type.held_bytes  # replicas included
        else:
            data.copy_to_host_async()
            self._host = data
            self._where = data.sharding
            self.bytes = data.nbytes

    def wait(self) -> None:
        """Returns when the copy is in host memory; then the device's array may be deleted."""
        if isinstance(self._host, np.ndarray):
            return
        if self._on_host():
            self._host.block_until_ready()
        else:
            self._host = np.asarray(self._host)

    def _on_host(self) -> bool:
        return not isinstance(self._host, np.ndarray) and self._host.sharding.memory_kind == KIND

    def __call__(self, of: object = None) -> Array:
        """Returns the array on its devices."""
        if self._loose:
            # Uncommitted, like the arrays of arrays.place: or programs would be compiled twice.
            return jax.device_put(np.asarray(self._host))
        if self._on_host():
            kind = arrays.sharding(self.type).memory_kind
            return jax.device_put(self._host, self._host.sharding.with_memory_kind(kind))
        return jax.device_put(self._host, self._where)


def program_bytes(executable: Any) -> dict[str, int]:
    """Returns XLA's memory analysis of a compiled program, bytes per device: `arguments`,
    `results`, `temporary`, and `reused` (results in donated memory)."""
    return Lowered(executable).compiled()[2]


class Lowered:
    """The program of an executable, lowered for its devices."""

    def __init__(self, executable: Any) -> None:
        args = [
            jax.ShapeDtypeStruct(
                arrays.array_shape(t),
                t.dtype.numpy,
                sharding=arrays.sharding(t) if t.mesh is not None else None,
            )
            for t in executable.wants
        ]
        self._lowered = inspect.unwrap(executable.run).lower(*args)

    def text(self) -> str:
        """Its text in StableHLO."""
        return str(self._lowered.as_text())

    def compiled(self) -> tuple[str, dict[str, float], dict[str, int]]:
        """(text in HLO, operations and bytes as XLA counts them, `program_bytes`)."""
        made = self._lowered.compile()
        cost = made.cost_analysis() or {}
        counted = {"flops": cost.get("flops", 0.0), "bytes": cost.get("bytes accessed", 0.0)}
        return made.as_text(), counted, bytes_of(made)


def bytes_of(compiled: Any) -> dict[str, int]:
    """Returns XLA's memory analysis of a program that jax compiled, in the words of
    `program_bytes`."""
    found = compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        "reused": found.alias_size_in_bytes,
    }
