"""Who hosts the engine's service, through which the processes of a run share what they need? Any
process may: the launcher's, or rank 0. jax itself is not loaded for it."""

from __future__ import annotations

import socket
from typing import Any

from jaxlib import _jax  # type: ignore[attr-defined]  # its stub hides it

HEARTBEAT_S = 10  # a process that is silent for so long has ended
_services: list[Any] = []


def service_near(sock: socket.socket, told: str, size: int) -> str:
    """Starts the service of `size` processes at the address where `sock` listens, for as long as
    this process lives; returns its address for ranks that know this host as `told`.

    It lets each process end alone: whoever started them decides what follows.
    """
    host = sock.getsockname()[0]
    with socket.socket(sock.family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    made = _jax.get_distributed_runtime_service(
        _address(host, port), size, heartbeat_timeout=HEARTBEAT_S, recoverable=True
    )
    _services.append(made)
    return _address(told, port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
