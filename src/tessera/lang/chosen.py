"""What becomes of the choices of `@schedule(...)`? They hold while the function around them is
recorded; some are settled when that begins, and some are about what a function may not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from ..core.checks import shown
from ..core.context import replaced, settings
from ..core.errors import warn_no_effect
from ..core.layout import ways
from ..core.options import ScheduleOptions
from ..ir.schedule.algorithms.build import nest_size
from ..ops.redistribute import CHANGES, MOVES, all_to_all
from .record import Recorder, current

# Choices that are read while a function is recorded; all others are settled when that begins.
READ_LATE = ("pipeline", "microbatches", "backend", "epoch")
# Choices of when collectives run.
WHEN = ("overlap", "bucket_bytes", "prefetch", "reshard_after_forward")


def made(options: ScheduleOptions) -> dict[str, Any]:
    """The choices of `options` by their names, without those that are left to Tessera."""
    every = ((f.name, getattr(options, f.name)) for f in fields(options))
    return {name: value for name, value in every if value is not None}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choices that a user made for the function `name`."""

    name: str
    options: ScheduleOptions

    def after(self, outer: Chosen) -> Chosen:
        """These, and those of `outer`, which stand above them. What is chosen in both gives an
        OptionWarning where it differs."""
        mine, theirs = made(self.options), made(outer.options)
        twice = {k: v for k, v in theirs.items() if mine.get(k, v) != v}
        if twice:
            warn_no_effect(
                _written(twice),
                f"{self.name} has its own: {', '.join(f'{k}={shown(mine[k])}' for k in twice)}",
                means="how a program is carried out",
                fix="choose it once",
            )
        return Chosen(self.name, replace(outer.options, **mine))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """The settings of a call. A function that is being recorded then says at its end which of
        these choices had no effect."""
        recorder = current()
        if recorder is not None:
            recorder.root.chosen[self] = None
        with replaced(schedule=replace(settings().program.schedule, **made(self.options))):
            yield

    def warn_if_unused(self, recorder: Recorder, table: str, cut: bool) -> None:
        """Gives an OptionWarning for each choice that had no effect on what was recorded; `table`
        is that of its pipeline, and a read may have `cut` it."""
        o, now = self.options, recorder.options.schedule
        settled = {k: v for k, v in made(o).items() if k not in READ_LATE and v != getattr(now, k)}
        if settled:
            warn_no_effect(
                _written(settled),
                f"{self.name} is called in another recorded function, whose schedule was chosen"
                " before",
                means="how a program is carried out",
                fix="write @schedule(...) on the outermost compiled function",
            )
        if not recorder.piped and not table and (o.microbatches or o.pipeline is not None):
            about = "microbatches" if o.pipeline is None else "pipeline"
            warn_no_effect(
                f"schedule: {about}={getattr(o, about)}",
                f"{self.name} calls no pipeline",
                means="stages on slices of the mesh run microbatches",
                fix="write the model with @pipeline.run(...) or pipeline.compose(...)",
            )
        elif o.microbatches and not table:
            warn_no_effect(
                f"schedule: microbatches={o.microbatches}",
                "the stages of the pipeline run one after the other, on the whole batch",
                means="the number of parts of a batch",
                fix="leave out pipeline=False, or this",
            )
        elif o.microbatches and not table.endswith(f" microbatches={o.microbatches}"):
            warn_no_effect(
                f"schedule: microbatches={o.microbatches}",
                f"the pipeline was made with its own: {table}",
                means="the number of parts of a batch",
                fix="leave microbatches= out where the pipeline is made, or here",
            )
        if o.reshard_after_forward and table:
            warn_no_effect(
                "schedule: reshard_after_forward=True",
                "the microbatches of a pipeline share the weights that are gathered",
                means="a weight is gathered again for the backward pass",
                fix="leave it out",
            )
        if o.measure and (cut or table):
            warn_no_effect(
                "schedule: measure=True",
                f"{self.name} is several programs: it "
                + ("reads values while it runs" if cut else "has stages"),
                means="the ways to compile a program are timed at its first call",
                fix="return the values, and read them outside; or leave it out"
                if cut
                else "leave it out",
            )
        if not table and not cut and any(k in made(o) for k in ("algorithm", *WHEN)):
            self._warn_of_collectives(recorder)
        buckets = [getattr(r, "buckets", 1) for r in recorder.builder.reports]
        if o.epoch == "hard" and max(buckets, default=1) == 1:
            warn_no_effect(
                "schedule: epoch='hard'",
                f"no experts of {self.name} are sent tokens in several buckets",
                means="each bucket of tokens is sent before the next begins",
                fix='cut what op.moe sends: transport={"bucket_bytes": 1 << 20}; or leave it out',
            )

    def _warn_of_collectives(self, recorder: Recorder) -> None:
        """Gives an OptionWarning for each choice about collectives that were not recorded. On one
        device there are none, and it says nothing: the program may be meant for more."""
        graph = recorder.builder.graph(())
        moves = list(graph.collectives())
        kinds = {n.op for n, _ in moves}
        sizes = {ways(n.attrs["axes"], n.type.sizes) for n, _ in moves}
        spread = any(n.type.mesh is not None and n.type.mesh.size > 1 for n in graph.nodes)
        if (
            spread
            and not kinds
            and (when := {k: v for k, v in made(self.options).items() if k in WHEN})
        ):
            warn_no_effect(
                _written(when),
                f"{self.name} has no collective",
                means="when collectives run, and how many together",
                fix="leave it out, or split a tensor that it reads",
            )
        for on, name in self.options.algorithm or ():
            size = nest_size(name)
            if size and size not in sizes:
                warn_no_effect(
                    f"schedule: algorithm={name!r}",
                    f"no collective of {self.name} is among {size} devices",
                    means="the table of a collective, level by level",
                    fix='give sizes whose product is that of the axes, or "hierarchical" alone',
                )
            elif spread and not kinds & (_becomes(on) if on else kinds):
                others = f", but {', '.join(sorted(kinds))}" if kinds else ""
                warn_no_effect(
                    "schedule: algorithm=" + (f"{{{on!r}: {name!r}}}" if on else repr(name)),
                    f"{self.name} has no {on or 'collective'}{others}",
                    means="the rounds by which a collective is carried out",
                    fix="name one that it has, or leave it out",
                )


def _becomes(kind: str) -> set[str]:
    """The recorded collectives that may be of this `kind` in the end: a sum that is split again is
    scattered, and one that is gathered is summed."""
    return {kind} if kind in (all_to_all.name, *MOVES) else {*CHANGES} - {all_to_all.name}


def _written(choices: dict[str, Any]) -> str:
    return "schedule: " + ", ".join(f"{k}={shown(v)}" for k, v in choices.items())


def warn_if_unused(recorder: Recorder, table: str = "", *own: Chosen, cut: bool = False) -> None:
    """Warns of what was chosen for what was recorded, and for functions that it calls."""
    for chosen in dict.fromkeys([*own, *recorder.chosen]):
        chosen.warn_if_unused(recorder, table, cut)
