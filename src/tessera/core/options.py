"""How shall a program be carried out? The choices of a schedule, as one value in the Settings.

>>> ScheduleOptions(overlap=True, bucket_bytes=1 << 20).text()
'overlap=True bucket_bytes=1048576'
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .topology import Topology


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """None leaves a choice to Tessera.

    `overlap`: a collective starts as soon as its operand is there and the next compute step does
    not wait for it (True), or all work waits for each collective (False). `bucket_bytes`: sums go
    together up to so many bytes a device. `prefetch`: a split weight is gathered so many blocks of
    work before its use. `microbatches`, `pipeline`: of a pipeline. `backend`: the transport that is
    preferred. `epoch`: "soft" or "hard", how an epoch of messages ends. `tile`, `warps`: hints for
    kernels. `cut`: compute steps end where the scope changes, so many levels deep. `algorithm`: by
    which table of rounds a collective goes, as pairs (collective, name), "" standing for all
    collectives; `topology` prices tables, for "cheapest" and for the number of segments.
    """

    overlap: bool | None = None
    bucket_bytes: int | None = None
    prefetch: int | None = None
    microbatches: int | None = None
    pipeline: bool | None = None
    backend: str | None = None
    epoch: str | None = None
    tile: tuple[int, ...] | None = None
    warps: int | None = None
    cut: int | None = None
    algorithm: tuple[tuple[str, str], ...] | None = None
    topology: Topology | None = None

    def text(self) -> str:
        """The choices that were made: 'overlap=True bucket_bytes=1048576'."""
        made = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{k}={_text(v)}" for k, v in made if v is not None)


def _text(choice: object) -> object:
    """As a schedule's first line has it, where a space ends a choice."""
    if isinstance(choice, Topology):
        return f"{choice.name}({choice.size})".replace(" ", "_")
    if isinstance(choice, tuple) and choice and isinstance(choice[0], tuple):
        return ",".join(f"{on}:{name}" if on else name for on, name in choice).replace(" ", "")
    return choice


AS_IT_COMES = ScheduleOptions()
