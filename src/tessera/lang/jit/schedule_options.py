"""The options that `@schedule(...)` sets for a function, and the warnings if one has no effect.

They are in force while the function is recorded. Most are fixed when the recording of the outermost
function begins; the options in `READ_LATE` are read during the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from ...core.checks import shown
from ...core.context import replaced, settings
from ...core.errors import warn_no_effect
from ...core.layout import shard_count
from ...core.options import ScheduleOptions
from ...core.wording import nearest
from ...ir.schedule.algorithms.build import nest_size
from ...ops.redistribute import CHANGES, MOVES, all_to_all
from ..record.recorder import Recorder, current

# Options that are read during a recording; all others are fixed when it begins.
READ_LATE = ("pipeline", "microbatches", "backend", "epoch", "tile", "warps", "tune")
# Options for the time at which collectives run.
WHEN = ("overlap", "bucket_bytes", "prefetch", "reshard_after_forward")


def options_set(options: ScheduleOptions) -> dict[str, Any]:
    """Returns the options that are set, by name."""
    every = ((f.name, getattr(options, f.name)) for f in fields(options))
    return {name: value for name, value in every if value is not None}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The schedule options that a user set for the function `name`."""

    name: str
    options: ScheduleOptions

    def after(self, outer: Chosen) -> Chosen:
        """Returns these options together with `outer`, those of the decorator above. Gives an
        OptionWarning if both set one option to different values; these win."""
        mine, theirs = options_set(self.options), options_set(outer.options)
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
        """A context with the settings of a call. If a function is being recorded, its end warns of
        each of these options that had no effect."""
        recorder = current()
        if recorder is not None:
            recorder.root.chosen[self] = None
        with replaced(schedule=replace(settings().program.schedule, **options_set(self.options))):
            yield

    def warn_if_unused(self, recorder: Recorder, table: str, cut: bool) -> None:
        """Gives an OptionWarning for each option that had no effect on the recording. `table`
        describes its pipeline ("" without one); `cut` says that a read of a value split the
        program."""
        o, now = self.options, recorder.options.schedule
        settled = {
            k: v for k, v in options_set(o).items() if k not in READ_LATE and v != getattr(now, k)
        }
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
        if not table and not cut and any(k in options_set(o) for k in ("algorithm", *WHEN)):
            self._warn_of_collectives(recorder)
        self._warn_of_kernels(recorder)
        buckets = [getattr(r, "buckets", 1) for r in recorder.builder.reports]
        if o.epoch == "hard" and o.backend != "nvshmem" and max(buckets, default=1) == 1:
            warn_no_effect(
                "schedule: epoch='hard'",
                f"no experts of {self.name} are sent tokens in several buckets",
                means="each bucket of tokens is sent before the next begins",
                fix='cut what op.moe sends: transport={"bucket_bytes": 1 << 20}; or leave it out',
            )

    def _warn_of_kernels(self, recorder: Recorder) -> None:
        """Gives an OptionWarning for each size of a tile that no kernel has, and for warps."""
        o, known = self.options, recorder.root.kernel_sizes
        asked = {n: f"tile={{{n!r}: {size}}}" for n, size in o.tile or ()}
        if o.warps is not None:
            asked["warps"] = f"warps={o.warps}"
        for name, text in asked.items():
            if name not in known:
                warn_no_effect(
                    f"schedule: {text}",
                    f"no kernel of {self.name} has the size {name}",
                    means="a size of the tiles of kernels, or their warps",
                    fix=f"use one of {nearest(name, known)}" if known else "leave it out",
                )

    def _warn_of_collectives(self, recorder: Recorder) -> None:
        """Gives an OptionWarning for each option about collectives that were not recorded. On one
        device there are no collectives, and there is no warning: the program may be meant for
        several."""
        graph = recorder.builder.graph(())
        moves = list(graph.collectives())
        kinds = {n.op for n, _ in moves}
        sizes = {shard_count(n.attrs["axes"], n.type.sizes) for n, _ in moves}
        spread = any(n.type.mesh is not None and n.type.mesh.size > 1 for n in graph.nodes)
        if (
            spread
            and not kinds
            and (when := {k: v for k, v in options_set(self.options).items() if k in WHEN})
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
    """Returns the recorded ops that may become a collective of this `kind`: for example, a sum that
    is split again becomes a reduce_scatter."""
    return {kind} if kind in (all_to_all.name, *MOVES) else {*CHANGES} - {all_to_all.name}


def _written(choices: dict[str, Any]) -> str:
    return "schedule: " + ", ".join(f"{k}={shown(v)}" for k, v in choices.items())


def warn_if_unused(
    recorder: Recorder, table: str = "", *options: Chosen, cut: bool = False
) -> None:
    """Warns of unused options of the recorded function and of the functions that it calls."""
    for chosen in dict.fromkeys([*options, *recorder.chosen]):
        chosen.warn_if_unused(recorder, table, cut)
