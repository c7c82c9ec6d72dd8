"""`schedule`: options for the execution of compiled functions, as statements and as a decorator.

`schedule.all_reduce_overlap(True)` is in force from there on; `@schedule(overlap=True)` for one
function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar

from ...autotune.choices import checked
from ...core.checks import function_of, one_of, shown, unfit
from ...core.context import put, settings
from ...core.contexts import above
from ...core.declared import Count, Flag, Natural, OneOf
from ...core.errors import UsageError
from ...core.options import ScheduleOptions
from ...core.public import asking
from ...core.topology import Topology, cluster
from ...core.value_checks import is_whole
from ...ir.schedule.algorithms.build import NAMES, named, nest_size
from ...ir.schedule.algorithms.table import COLLECTIVES
from ...passes.algorithms import CHEAPEST
from ..jit.jit import Jit, jit
from ..record.recorder import need_before_recording
from .training_step import TrainingStep

P = ParamSpec("P")
R = TypeVar("R")
BACKENDS = ("auto", "nccl", "nvshmem", "deepep", "gloo", "mpi")
EPOCHS = ("soft", "hard")


def all_reduce_overlap(on: Flag = True) -> None:
    """Sets whether gradients are summed while compute goes on (guide 1, 7.7).

    True: overlap. False: all compute waits for each collective. Raises UsageError if `on` is not a
    bool.
    """
    _set(overlap=on)


def pipeline_microbatches(count: Count) -> None:
    """Sets the number of microbatches into which pipelines split a batch (guide 1, 7.7).

    Raises UsageError if `count` is not a whole number of at least 1.
    """
    _set(microbatches=count)


def bucket_bytes(size: Count | None) -> None:
    """Sets the size in bytes per device up to which sums over devices are combined into one.

    None sends each sum on its own. Raises UsageError if `size` is not a whole number of at least 1.
    """
    _set(bucket_bytes=size)


def prefetch(distance: Natural | None) -> None:
    """Sets how many blocks of work before its use a split weight is gathered.

    None leaves the choice to Tessera. Raises UsageError if `distance` is not a whole number.
    """
    _set(prefetch=distance)


def algorithm(name: str | None, *collectives: str, topology: Topology | str | None = None) -> None:
    """Sets the algorithm of collectives; with `name` None the engine chooses.

    `name` is one of `tessera.ir.schedule.algorithms.build.NAMES`; one of these with segments
    ("double_tree/16") or levels ("hierarchical(2:ring x 4:halving)"); or "cheapest", the fastest on
    `topology` (a Topology or a cluster's name), or else on the links of the program's mesh.
    `collectives` names the collectives that it is set for (default: all). Raises UsageError if a
    name is unknown.

    >>> algorithm("halving", "all_reduce")
    >>> algorithm("ring", "all_gather")
    >>> current().text()
    'algorithm=all_reduce:halving,all_gather:ring'
    >>> algorithm(None)
    """
    for on in collectives:
        one_of("schedule", "the collective", on, COLLECTIVES)
    if name is None and collectives:
        name = "engine"
    if name is None:
        _set(algorithm=None, topology=_links_of_mesh())
        return
    choices = dict(settings().program.schedule.algorithm or ()) if collectives else {}
    chosen = dict(_algorithms(dict.fromkeys(collectives or ("",), name)))
    links = settings().program.schedule.topology if collectives else _links_of_mesh()
    where = links if topology is None else cluster(topology)
    _set(algorithm=tuple({**choices, **chosen}.items()), topology=where)


def _algorithms(choice: object) -> tuple[tuple[str, str], ...]:
    """Returns (collective, algorithm) pairs, "" for all collectives; `choice` is a name or a dict
    of names."""
    table: dict[Any, Any] = choice if isinstance(choice, dict) else {"": choice}
    for on, name in table.items():
        if on:
            one_of("schedule", "the collective", on, COLLECTIVES)
        if not isinstance(name, str):
            raise unfit("schedule", "the algorithm", name, "use " + ", ".join((*NAMES, CHEAPEST)))
        if name not in ("hierarchical", CHEAPEST):
            named(on or "all_reduce", name, nest_size(name) or 8)
    return tuple(table.items())


def _links_of_mesh() -> Topology | None:
    """The topology of the current mesh, or None."""
    mesh = settings().mesh
    return mesh.links if mesh is not None else None


def current() -> ScheduleOptions:
    """The schedule options in force here, as a `ScheduleOptions`."""
    return settings().program.schedule


def reset() -> None:
    """Sets all schedule options back to None: Tessera chooses."""
    _set(**{f.name: None for f in fields(ScheduleOptions)})


def _set(**changes: Any) -> None:
    chosen = replace(settings().program.schedule, **changes)
    need_before_recording("schedule", schedule=chosen)
    put(schedule=chosen)


@partial(asking, name="schedule")
def options(
    *,
    pipeline: Flag | None = None,
    overlap: Flag | None = None,
    comm_backend: Annotated[str, OneOf(*BACKENDS)] | None = None,
    epoch: Annotated[str, OneOf(*EPOCHS)] | None = None,
    tile: dict[str, int] | None = None,
    warps: Count | None = None,
    microbatches: Count | None = None,
    bucket_bytes: Count | None = None,
    prefetch: Natural | None = None,
    reshard_after_forward: Flag | None = None,
    algorithm: str | dict[str, str] | None = None,
    topology: Topology | str | None = None,
    choices: dict[str, Any] | None = None,
    tune: Flag | None = None,
) -> ScheduleOptions:
    """Returns the options as a `ScheduleOptions`. Raises UsageError if one has a wrong value."""
    fits = isinstance(tile, dict) and tile and all(isinstance(k, str) for k in tile)
    if tile is not None and not (fits and all(is_whole(n) and n > 0 for n in tile.values())):
        raise unfit("schedule", "tile", tile, 'give sizes by name: {"BM": 128, "BN": 64}')
    return ScheduleOptions(
        algorithm=None if algorithm is None else _algorithms(algorithm),
        topology=None if topology is None else cluster(topology),
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
        microbatches=microbatches,
        pipeline=pipeline,
        tile=None if tile is None else tuple(tile.items()),
        warps=warps,
        backend=comm_backend,
        epoch=epoch,
        choices=None if choices is None else checked(choices),
        tune=tune,
    )


def compiled_under(fn: Any = None, /, *more: Any, **choices: Any) -> Any:
    """`@schedule(overlap=True, bucket_bytes=1 << 22)`: compiles a function with these options.

    `pipeline`, `overlap`, `comm_backend`, `epoch`, `tile`, `warps` are those of guide 2, 3.4;
    `microbatches`, `bucket_bytes`, `prefetch`, `reshard_after_forward`, `algorithm`, `topology` and
    `choices`, `tune` (see ScheduleOptions) are further options. With `tune`, `.timings` has the
    candidates that were timed. The result is like that of `ts.jit`, the same above `@ts.jit` and
    below it: `.schedule` is the Schedule of its last recording. A training step stays one. An
    option about a thing that the function does not have, such as a pipeline, gives an
    OptionWarning; so does an
    option that is fixed already because another recorded function calls this one.
    """
    unknown = [k for k in choices if k not in inspect.signature(options).parameters]
    if more or unknown:
        raise UsageError(
            f"schedule: {shown(more[0]) if more else unknown[0]!r} is no choice",
            fix="write @schedule(" + "=, ".join(inspect.signature(options).parameters) + "=)",
        )
    chosen = options(**choices)

    def wrap(f: Callable[P, R]) -> Jit[P, R] | TrainingStep[P, R]:
        function_of("schedule", "what is scheduled", f)
        return (f if isinstance(f, (Jit, TrainingStep)) else jit(f)).under(chosen)

    if fn is not None:
        return wrap(fn)
    fix = (
        "write @schedule(...) above the function, or from there on: schedule.bucket_bytes(1 << 22)"
    )
    return above("schedule", wrap, fix)
