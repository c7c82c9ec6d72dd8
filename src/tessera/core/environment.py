"""Environment variables: all that the library reads, and functions to read them.

| switch                  | on means                                                           |
|-------------------------|--------------------------------------------------------------------|
| `TESSERA_COMM_TRACE`    | each collective prints a line: kind, axes, bytes, the user's line  |
| `TESSERA_COLLECTIVE_LIMIT` | seconds that a collective may take before the program ends      |
| `TESSERA_FLIGHT_DIR`    | where the flight recorder writes (a folder; here, if unset)        |
| `TESSERA_FLIGHT_RECORDS` | how many of the last collectives a rank remembers (a number)      |
| `TESSERA_DETERMINISTIC` | results do not depend on how many devices run them                 |
| `TESSERA_DEVICES`       | how many virtual devices a CPU backend starts with (a number)      |
| `TESSERA_COMPILE_ONCE`  | on: the first process of a run compiles each program for all       |
| `TESSERA_COORDINATOR`   | where the processes of a run meet (host:port), as their launcher says |
| `TESSERA_JOIN`          | off: this process does not join those that were started with it    |
| `TESSERA_JOIN_LIMIT`    | seconds that the processes of a run wait for each other (a number) |
| `TESSERA_ELASTIC`       | where the processes of a run keep safe points (a folder of each host) |
| `TESSERA_TOKEN`         | a secret of the processes of a run                                 |
| `TESSERA_TOKEN_FILE`    | a file with that secret, which only its owner may read             |
| `TESSERA_MESHES`        | each rank's mesh and host in it ("0.0,0.1"), as the launcher says  |
| `TESSERA_HEAP`          | off: a CPU backend does not keep the memory that arrays give back  |
| `TESSERA_PROGRAM_CACHE` | where compiled programs stay for later processes (a folder, or off) |
| `TESSERA_PROGRAM_CACHE_BYTES` | how much they may take there (a number)                    |
| `TESSERA_TUNE`          | the autotuner: off, read, search or freeze (lang/jit/tuner.py)     |
| `TESSERA_TUNE_LIMIT`    | seconds of the search for one program (a number)                   |
| `TESSERA_VISIBLE_DEVICES` | which devices a process sees (ids, "0,1"); also `TT_VISIBLE_DEVICES` |

A switch is on for 1, true, yes, on; off for 0, false, no, off. Unset or empty it is off, except
`TESSERA_HEAP` and `TESSERA_JOIN`, which are on.
Each is read once, when the first settings are asked for (`core/context.py`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from .errors import UsageError, lines_up
from .wording import nearest

COMM_TRACE = "TESSERA_COMM_TRACE"
COLLECTIVE_LIMIT = "TESSERA_COLLECTIVE_LIMIT"
COMPILE_ONCE = "TESSERA_COMPILE_ONCE"
COORDINATOR = "TESSERA_COORDINATOR"
DETERMINISTIC = "TESSERA_DETERMINISTIC"
DEVICES = "TESSERA_DEVICES"
ELASTIC = "TESSERA_ELASTIC"
FLIGHT_DIR = "TESSERA_FLIGHT_DIR"
FLIGHT_RECORDS = "TESSERA_FLIGHT_RECORDS"
HEAP = "TESSERA_HEAP"
JOIN = "TESSERA_JOIN"
JOIN_LIMIT = "TESSERA_JOIN_LIMIT"
MESHES = "TESSERA_MESHES"
PROGRAM_CACHE = "TESSERA_PROGRAM_CACHE"
PROGRAM_CACHE_BYTES = "TESSERA_PROGRAM_CACHE_BYTES"
TOKEN = "TESSERA_TOKEN"
TOKEN_FILE = "TESSERA_TOKEN_FILE"
TRACEBACK_FILTERING = "TESSERA_TRACEBACK_FILTERING"
TUNE = "TESSERA_TUNE"
TUNE_LIMIT = "TESSERA_TUNE_LIMIT"
VISIBLE_DEVICES = "TESSERA_VISIBLE_DEVICES"

ALL_VARIABLES = tuple(
    v for v in globals().values() if isinstance(v, str) and v.startswith("TESSERA_")
)
OF_TESTS = "TESSERA_TEST_"


class EnvironmentVariableWarning(UserWarning):
    """Warns of an environment variable that begins with TESSERA_ but is unknown."""


def warn_of_unknown(environment: Mapping[str, str] | None = None) -> None:
    """Gives one warning for all unknown variables that begin with TESSERA_."""
    names = os.environ if environment is None else environment
    odd = [
        n
        for n in names
        if n.startswith("TESSERA_") and n not in ALL_VARIABLES and OF_TESTS not in n
    ]
    if odd:
        rows = "".join(f"\n  {n} : the nearest are {nearest(n, ALL_VARIABLES, 3)}" for n in odd)
        warnings.warn(
            f"environment: {len(odd)} variable{'s' * (len(odd) > 1)} of no switch{rows}",
            EnvironmentVariableWarning,
            stacklevel=lines_up(),
        )


OFF = ("0", "false", "no", "off")
_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", *OFF), False),
}


def is_on(
    name: str, environment: Mapping[str, str] | None = None, *, default: bool = False
) -> bool:
    """Returns whether the switch `name` is on; `default` if it is unset.

    Raises `UsageError` for a word that is neither yes nor no.

    >>> is_on(COMM_TRACE, {}), is_on(COMM_TRACE, {"TESSERA_COMM_TRACE": "Yes"})
    (False, True)
    """
    text = (os.environ if environment is None else environment).get(name, "")
    on = _WORDS.get(text.strip().lower()) if text.strip() else default
    if on is None:
        raise UsageError(f"{name}: {text!r} is neither on nor off", fix="set it to 1 or 0")
    return on


def folder(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Returns the folder in the variable `name`, or "." if it is unset.

    >>> folder(FLIGHT_DIR, {}), folder(FLIGHT_DIR, {"TESSERA_FLIGHT_DIR": "/tmp/dumps"})
    ('.', '/tmp/dumps')
    """
    return (os.environ if environment is None else environment).get(name, "").strip() or "."


def cache_folder() -> Path:
    """Returns the folder of this user's caches. Raises RuntimeError if there is no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


def text(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Returns the text of the variable `name`, "" if it is unset."""
    return (os.environ if environment is None else environment).get(name, "").strip()


def number(name: str, default: int, environment: Mapping[str, str] | None = None) -> int:
    """Returns the integer in the variable `name`, or `default` if it is unset.

    Raises `UsageError` for anything but an integer of at least 1.

    >>> number(DEVICES, 8, {}), number(DEVICES, 8, {"TESSERA_DEVICES": "64"})
    (8, 64)
    """
    text = (os.environ if environment is None else environment).get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name}: {text!r} is not a number of at least 1", fix=f"set {name}=8")
    return int(text)
