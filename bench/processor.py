"""On which kind of processor is this? Its name, and the instructions that products depend on."""

from __future__ import annotations

import platform
from pathlib import Path

MATTERS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_fp16")


def kind(cpuinfo: str | None = None) -> str:
    """The model and those of its flags that matter.

    >>> kind("model name : AMD EPYC\\nflags : fpu avx2 avx512f sse")
    'AMD EPYC (avx2, avx512f)'
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    rows = [line.partition(":") for line in cpuinfo.splitlines()]
    said = {key.strip(): value.strip() for key, _, value in reversed(rows)}
    name = said.get("model name") or platform.processor() or platform.machine()
    flags = said.get("flags", "").split()
    return f"{name} ({', '.join(f for f in MATTERS if f in flags) or 'none of its flags matter'})"
