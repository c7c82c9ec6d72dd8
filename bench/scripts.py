"""Sections of the results page: their measurements, and comparisons with limits.

Each states its limit, if it has one, and says if the limit is missed or a peer is ahead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from page import prose
from processor import kind

HERE = Path(__file__).resolve().parent
LIMIT_S = 400.0  # for one script; on an idle machine most take less than one minute
TORCH = util.find_spec("torch") is not None


class Failed(Exception):
    """Raised with the reason if a script did not measure."""


@dataclass(frozen=True)
class Section:
    """A section; `on` names the processor it is measured on, or "" if this machine lacks it."""

    title: str
    measure: Callable[[int], list[str]]
    on: Callable[[], str] = kind


def measure(
    script: str, *args: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> Any:
    """Returns the JSON that a script of this folder prints last. Raises Failed."""
    command = [sys.executable, str(HERE / script), *args]
    print("measuring:", script, *args, dict(env or {}) or "", flush=True)
    around = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=around, check=True
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise Failed(f"{script} was not done after {limit_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise Failed(f"{script} failed:\n{error.stderr[-2000:]}") from None
    except (IndexError, ValueError):
        raise Failed(f"{script} printed no result") from None


def against(ratio: float, limit: float, what: str = "of its speed") -> str:
    """A speed ratio compared with its limit, in words."""
    word = "met" if ratio >= limit else "**missed**"
    ahead = "" if ratio >= 1 else "; the peer is ahead"
    return f"**{ratio:.2f}** {what} (limit {limit:g}: {word}{ahead})"


def within(value: float, limit: float, unit: str = "") -> str:
    """A value compared with its upper limit, in words."""
    return f"limit {limit:g}{unit}: {'met' if value <= limit else '**missed**'}"


def no_torch() -> list[str]:
    return prose("PyTorch was not installed.")
