"""Options of a recorded program: one value, stored in its Graph and Schedule.

>>> chosen = ProgramOptions("mesh_invariant", schedule=ScheduleOptions(overlap=True))
>>> chosen.text()
'determinism=mesh_invariant overlap=True'
>>> parse_options(chosen.text()) == chosen
True
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from .errors import UsageError
from .topology import CLUSTERS, Level, Link, Topology

LEVELS = ("fast", "run_to_run", "mesh_invariant")
ORDERS = ("binary", "ring")
EXECUTORS = ("fused", "stepped")


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Choices of how a program is executed. None leaves a choice to Tessera.

    - `overlap`: True: a collective starts when its operand is ready, and neither waits for work
      that it does not need nor holds up work that does not need it. False: all work waits for each
      collective.
    - `bucket_bytes`: sums over devices are combined up to this many bytes per device.
    - `prefetch`: a split weight is gathered this many blocks of work before its use; with
      `overlap`, one if it is None.
    - `reshard_after_forward`: a weight that is split between its uses is not kept whole from the
      forward to the backward pass, but gathered again there (also if it is None). False: it is
      kept, as it is in a pipeline.
    - `microbatches`, `pipeline`: the number of microbatches of a pipeline, and whether its stages
      run as one (False: one after the other, on the whole mesh).
    - `tile`, `warps`: sizes of the tiles of kernels, as pairs (name, size), and their warps.
    - `backend`: the preferred transport.
    - `epoch`: "soft" or "hard": how an epoch of messages ends.
    - `scope_depth`: compute steps end where the scope changes, this many levels deep.
    - `algorithm`: the algorithm of each collective, as pairs (collective, name); "" stands for all
      collectives.
    - `topology`: the links that "cheapest" and the number of segments are computed for; None: those
      of the mesh.
    - `choices`: choices of the autotuner's table (autotune/choices.py), as sorted pairs.
    - `tune`: True: the first call times candidates of the open choices with its own arguments, and
      keeps the fastest. It is no part of the program.
    """

    overlap: bool | None = None
    bucket_bytes: int | None = None
    prefetch: int | None = None
    reshard_after_forward: bool | None = None
    microbatches: int | None = None
    pipeline: bool | None = None
    tile: tuple[tuple[str, int], ...] | None = None
    warps: int | None = None
    backend: str | None = None
    epoch: str | None = None
    scope_depth: int | None = None
    algorithm: tuple[tuple[str, str], ...] | None = None
    topology: Topology | None = None
    choices: tuple[tuple[str, Any], ...] | None = None
    tune: bool | None = field(default=None, compare=False, metadata={"text": False})

    def text(self) -> str:
        """Returns the choices that are not None, as text: 'overlap=True bucket_bytes=1048576'."""
        return _text(self, AS_IT_COMES)


AS_IT_COMES = ScheduleOptions()


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """All that decides how a recorded program is built, lowered and run, besides its nodes.

    `determinism` is the level of determinism ("fast", "run_to_run" or "mesh_invariant"), `order`
    the order of sums over devices at the two higher levels ("binary" or "ring"), `executor` the
    executor ("fused": one program, "stepped": one for each step), `schedule` the schedule's
    options. With `level_required` a backend that cannot keep the level refuses the program, instead
    of running it at a lower level. With `comm_trace` its collectives are printed when it is
    compiled. `processes` is the number of processes that run it together; each has its own host
    numbers. These three do not change the program's results, so the text leaves them out. `tuned`
    is the autotuner's line about the choices; it is shown as a comment and is no part of the value.
    """

    determinism: str = "fast"
    order: str = "binary"
    executor: str = "fused"
    schedule: ScheduleOptions = AS_IT_COMES
    level_required: bool = field(default=False, metadata={"text": False})
    comm_trace: bool = field(default=False, metadata={"text": False})
    processes: int = field(default=1, metadata={"text": False})
    tuned: str = field(default="", compare=False, metadata={"text": False})

    @property
    def mesh_invariant(self) -> bool:
        """True if the program's bits are the same on every fold of its mesh."""
        return self.determinism == "mesh_invariant"

    @property
    def sum_order(self) -> str:
        """The order of sums over devices; "" if the engine chooses it."""
        return "" if self.determinism == "fast" else self.order

    def text(self) -> str:
        """Returns the options that differ from the defaults, on one line; "" without any.
        `parse_options` reads it."""
        return _program_text(self)

    def __str__(self) -> str:
        return self.text() or "the defaults"


PLAIN = ProgramOptions()


# ---- the text ----------------------------------------------------------------------------------
@lru_cache(maxsize=256)
def _program_text(options: ProgramOptions) -> str:
    return " ".join(filter(None, (_text(options, PLAIN), options.schedule.text())))


def _text(options: Any, default: Any) -> str:
    shown = (f.name for f in fields(options) if f.metadata.get("text", f.name != "schedule"))
    made = ((k, getattr(options, k)) for k in shown if getattr(options, k) != getattr(default, k))
    return " ".join(f"{k}={_value(v)}" for k, v in made)


def _value(choice: object) -> object:
    """Returns a choice as text without spaces outside of quotes, as a space ends a choice."""
    if isinstance(choice, Topology):
        known = CLUSTERS.get(choice.name)
        if known == choice:
            return f"{choice.name}({choice.size})"
        if known is not None and known.of(*choice.shape[: len(known.levels)]) == choice:
            return f"{choice.name}({'x'.join(map(str, choice.shape))})"
        levels = [
            [v.size, v.link.name, v.link.latency_s, v.link.bytes_per_s, v.wiring, v.shared]
            for v in choice.levels
        ]
        row = [choice.name, choice.add_bytes_per_s, *levels]
        return json.dumps(row, separators=(",", ":")).replace("#", r"\u0023")
    if isinstance(choice, tuple) and choice and isinstance(choice[0], tuple):
        return ",".join(f"{on}:{name}" if on else str(name) for on, name in choice).replace(" ", "")
    return str(choice).replace(" ", "")


def parse_options(text: str) -> ProgramOptions:
    """Returns the options that print as `text`. Raises UsageError if `text` is not the text of any
    options."""
    try:
        given = dict(_choices(text))
        own = {k: given.pop(k) for k in _WORDS.keys() & given.keys()}
        return ProgramOptions(**own, schedule=ScheduleOptions(**given))
    except (TypeError, ValueError, SyntaxError, KeyError) as error:
        raise UsageError(
            f"options: cannot read {text!r}: {str(error).splitlines()[0]}",
            fix="write them as a graph or a schedule prints them: overlap=True bucket_bytes=4096",
        ) from None


_WORDS = {"determinism": LEVELS, "order": ORDERS, "executor": EXECUTORS}
_KEY = re.compile(r"\s*(\w+)=")


def _choices(text: str) -> Iterator[tuple[str, Any]]:
    """Yields each choice of `text` as (name, value). Raises ValueError if it is not of that
    form."""
    at = 0
    while at < len(text):
        m = _KEY.match(text, at)
        if m is None:
            raise ValueError(f"{text[at:]!r} is no choice")
        key, at = m[1], m.end()
        if text.startswith("[", at):
            (name, adds, *rows), size = json.JSONDecoder().raw_decode(text[at:])
            levels = tuple(Level(row[0], Link(*row[1:4]), *row[4:]) for row in rows)
            yield key, Topology(name, levels, adds)
        else:
            size = len(text[at:].partition(" ")[0])
            yield key, _read(key, text[at : at + size])
        at += size


def _read(key: str, word: str) -> object:
    if key in _WORDS and word not in _WORDS[key]:
        raise ValueError(f"{key} is one of {', '.join(_WORDS[key])}")
    if key in (*_WORDS, "backend", "epoch"):
        return word
    if key == "topology":
        name, _, sizes = word.rstrip(")").partition("(")
        return CLUSTERS[name].of(*map(int, sizes.split("x"))) if "x" in sizes else CLUSTERS[name]
    if key == "algorithm":
        return tuple(map(_algorithm, word.split(",")))
    if key in ("choices", "tile"):
        pairs = (pair.partition(":")[::2] for pair in word.split(","))
        return tuple((name, int(v) if v.isdecimal() else v) for name, v in pairs)
    return ast.literal_eval(word)


def _algorithm(text: str) -> tuple[str, str]:
    on = re.match(r"(\w+):", text)
    name = text[on.end() :] if on else text
    return on[1] if on else "", re.sub(r"x(?=\d+:)", " x ", name)
