"""Host of the coordination service, through which the processes of a run exchange metadata.

The launcher's process or rank 0 hosts it. jax itself is not imported for it.
"""

from __future__ import annotations

import socket
from typing import Any

from jaxlib import _jax  # type: ignore[attr-defined]  # its stub hides it

HEARTBEAT_S = 10  # a process that is silent for this long counts as ended
_services: list[Any] = []


def service_near(sock: socket.socket, told: str, size: int) -> str:
    """Starts the service of `size` processes at the host address of `sock`, for the lifetime of
    this process. Returns its address for ranks that know this host as `told`.

    The service does not end the other processes if one ends: the launcher decides that.
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
