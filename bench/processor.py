"""The kind of processor: its name, its generation, and the flags that affect products."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

MATTERS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_fp16")


def kind(cpuinfo: str | None = None) -> str:
    """The name, the family and model numbers, and those of its flags that matter.

    A host may give one name to processors of several generations, so the numbers are part of it.

    >>> kind("cpu family : 26\\nmodel : 2\\nmodel name : AMD EPYC\\nflags : fpu avx2 avx512f sse")
    'AMD EPYC family 26 model 2 (avx2, avx512f)'
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    rows = [line.partition(":") for line in cpuinfo.splitlines()]
    said = {key.strip(): value.strip() for key, _, value in reversed(rows)}
    name = said.get("model name") or platform.processor() or platform.machine()
    numbers = "".join(
        f" {word} {said[key]}"
        for word, key in (("family", "cpu family"), ("model", "model"))
        if key in said
    )
    flags = said.get("flags", "").split()
    matter = ", ".join(f for f in MATTERS if f in flags) or "none of its flags matter"
    return f"{name}{numbers} ({matter})"


def gpu() -> str:
    """The name of the first NVIDIA GPU, or ""."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    ask = [tool, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else ""
