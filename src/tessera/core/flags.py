"""Environment of the engine, set before it starts: flags for correct numbers, equal bits, a quiet
log."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path

# No fused multiply-add: the compiler contracts a multiplication and an addition depending on their
# neighbours in the program, which differ from mesh to mesh. The flag holds for all programs of a
# process (as an option of one program it has no effect), so it is always set, whether or not a
# program asks for determinism later. Libraries of matrix products choose their own instructions.
PLAIN = "--xla_cpu_max_isa=AVX"
X86 = platform.machine() in ("x86_64", "AMD64")  # other processors know no such flag
# Whether this CPU has instructions for products of bf16; without them f32 is as fast.
_CPUINFO = Path("/proc/cpuinfo")
MULTIPLIES_BF16 = _CPUINFO.exists() and bool(
    {"amx_bf16", "avx512_bf16"}.intersection(_CPUINFO.read_text().split())
)
# From SINCE on, the engine gives sums and maxima on a CPU, fused with their operands, to a library
# that computes some of them wrongly, and ends the process at others. Before, it gave it plain sums
# only, and no wrong one was found. All versions that pyproject.toml admits know the flag; an
# unknown flag would end the process.
FUSION = "xla_cpu_experimental_ynn_fusion_type"
EXACT = f"--{FUSION}=-reduce"
SINCE = (0, 10, 2)
# Log fatal errors only: other errors are in the engine's exceptions, too.
LOG = ("TF_CPP_MIN_LOG_LEVEL", "3")
_exact: list[bool] = []
_fuses: list[bool] = []
_before: dict[str, str | None] = {}


def prepare() -> None:
    """Sets the flags that every program needs; called when the package is imported. The user's own
    settings stay. Has no effect if the backend already runs."""
    for name in (LOG[0], "XLA_FLAGS"):
        _before.setdefault(name, os.environ.get(name))
    if "jaxlib" not in sys.modules:  # jaxlib reads this once, at its import
        os.environ.setdefault(*LOG)
    if X86 and not engine_runs():
        _add(PLAIN)
    version = _version()
    # A parent process may have set EXACT by itself, through this function.
    users = (_before["XLA_FLAGS"] or "").replace(EXACT, "")
    _fuses[:] = [version is not None and version >= SINCE and FUSION not in users]
    if version is not None and version < SINCE:
        _exact.append(True)
    elif version is not None and not engine_runs():
        _add(EXACT)
        _exact.append(EXACT in os.environ["XLA_FLAGS"])


def original_environment() -> dict[str, str]:
    """Returns the environment as it was before `prepare`, for programs that may not use Tessera."""
    old = {name: value for name, value in _before.items() if value is not None}
    return {n: v for n, v in os.environ.items() if n not in _before} | old


def is_exact() -> bool:
    """Returns whether reductions on a CPU are known to be correct."""
    return any(_exact)


def fuses() -> bool:
    """Returns whether the engine has that library, and the user has not set its operations."""
    return any(_fuses)


def engine_runs() -> bool:
    """Returns whether the engine's backend has been started; it reads the flags at its start."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _add(flag: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _version() -> tuple[int, ...] | None:
    """Returns the version of jaxlib without importing it; None if it is not installed."""
    try:
        found = find_spec("jaxlib")
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    text = Path(found.submodule_search_locations[0], "version.py").read_text()
    numbers = re.search(r'_version\s*=\s*["\'](\d+)\.(\d+)\.(\d+)', text)
    return tuple(map(int, numbers.groups())) if numbers else None
