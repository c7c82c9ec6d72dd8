"""What must the engine find in the environment before it starts? What keeps its numbers right, its
bits the same and its own log off the user's screen."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path

# Without fused multiply-add: a compiler contracts a multiplication and an addition where neighbours
# suggest it, and neighbours differ from mesh to mesh. The flag holds for all programs of a process
# (as an option of one program it has no effect), so it is set whether or not a promise is made
# later. Libraries of matrix products choose their own instructions.
PLAIN = "--xla_cpu_max_isa=AVX"
X86 = platform.machine() in ("x86_64", "AMD64")  # other processors know no such flag
# Whether this CPU has instructions for products of bf16: on others they are no quicker than of f32.
_CPUINFO = Path("/proc/cpuinfo")
MULTIPLIES_BF16 = _CPUINFO.exists() and bool(
    {"amx_bf16", "avx512_bf16"}.intersection(_CPUINFO.read_text().split())
)
# From SINCE on, the engine hands sums and maxima on a CPU, and what they are of, to a library that
# computes some of them wrongly, and ends the process at others. Before, it handed over plain sums,
# and none was found that was wrong. All versions that pyproject.toml admits know the flag; one that
# is unknown would end the process.
FUSION = "xla_cpu_experimental_ynn_fusion_type"
EXACT = f"--{FUSION}=-reduce"
SINCE = (0, 10, 2)
# Fatal errors alone: what else the engine has to say, it says in its exceptions, too.
LOG = ("TF_CPP_MIN_LOG_LEVEL", "3")
_exact: list[bool] = []
_fuses: list[bool] = []
_before: dict[str, str | None] = {}


def prepare() -> None:
    """Sets what every program needs; called when the package is imported. What the user has set
    stays, and where the backend runs already it is too late."""
    for name in (LOG[0], "XLA_FLAGS"):
        _before.setdefault(name, os.environ.get(name))
    if "jaxlib" not in sys.modules:  # which reads this once, as it is loaded
        os.environ.setdefault(*LOG)
    if X86 and not engine_runs():
        _add(PLAIN)
    version = _version()
    users = (_before["XLA_FLAGS"] or "").replace(EXACT, "")  # a parent's may be ours
    _fuses[:] = [version is not None and version >= SINCE and FUSION not in users]
    if version is not None and version < SINCE:
        _exact.append(True)
    elif version is not None and not engine_runs():
        _add(EXACT)
        _exact.append(EXACT in os.environ["XLA_FLAGS"])


def given() -> dict[str, str]:
    """The environment as it was before `prepare`: that of programs which may not be Tessera's."""
    old = {name: value for name, value in _before.items() if value is not None}
    return {n: v for n, v in os.environ.items() if n not in _before} | old


def is_exact() -> bool:
    """Whether it is known that reductions on a CPU are right."""
    return any(_exact)


def fuses() -> bool:
    """Whether the engine has that library, and the user has not said what goes there."""
    return any(_fuses)


def engine_runs() -> bool:
    """Whether somebody has started the engine's backend, which reads the flags as it starts."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _add(flag: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _version() -> tuple[int, ...] | None:
    """That of jaxlib, which is not loaded for it; None where there is none."""
    try:
        found = find_spec("jaxlib")
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    text = Path(found.submodule_search_locations[0], "version.py").read_text()
    numbers = re.search(r'_version\s*=\s*["\'](\d+)\.(\d+)\.(\d+)', text)
    return tuple(map(int, numbers.groups())) if numbers else None
