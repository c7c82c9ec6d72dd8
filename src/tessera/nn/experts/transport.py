"""Transport of tokens to experts: options, and the report of `moe_inspection`.

A transport is a preference that changes no result. `moe_inspection` shows the one in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from ...core.checks import one_of, unfit
from ...core.declared import Count, Flag, OneOf
from ...core.layout import TensorType, shard_count
from ...core.public import asking
from ...lang.record.recorder import choose
from .packing import BLOCK

# The meaning of each name.
TRANSPORTS = {
    "auto": "whatever is there",
    "nccl": "NCCL's send and receive between GPUs",
    "nvshmem": "puts and gets that GPUs start themselves",
    "deepep": "DeepEP's dispatch and combine kernels",
}
CARRIERS = "(NCCL between GPUs, shared memory or gloo between CPUs)"
PACKINGS = (None, "fp8_e4m3", "bf16")
EPOCHS = (None, "soft", "hard")


@dataclass(frozen=True, slots=True)
class Transport:
    """Options of the transport of tokens.

    `type` is one of `TRANSPORTS`; `pack_dtype` packs the payload; `bucket_bytes` cuts the payload
    of one device into pieces of about this size. An epoch is one dispatch and combine: "hard" ends
    each bucket before the next begins, "soft" lets them overlap; None is "soft", or the value of
    `@schedule(epoch=)`. `multi_qp` and `num_qps` are for transports with queue pairs; no transport
    here has any, and an OptionWarning says so. Raises UsageError if a value does not fit.
    """

    type: Annotated[str, OneOf(*TRANSPORTS)] = "auto"
    pack_dtype: Annotated[str, OneOf(*PACKINGS)] | None = None
    bucket_bytes: Count | None = None
    epoch: Annotated[str, OneOf(*EPOCHS)] | None = None
    multi_qp: Flag = False
    num_qps: Count | None = None


Transport.__init__ = asking(Transport.__init__, "moe: transport", of_object=True)  # type: ignore[method-assign]


def transport_of(value: object) -> Transport:
    """A Transport from a name, a dict of its fields, or a Transport. Raises UsageError if it is
    anything else."""
    if isinstance(value, Transport):
        return value
    if isinstance(value, str):
        return Transport(value)
    known = [f.name for f in fields(Transport)]
    if isinstance(value, Mapping):
        for option in value:
            one_of("moe: transport", "an option", option, known)
        return Transport(**value)
    raise unfit(
        "moe",
        "transport",
        value,
        'give a name such as "auto", or a dict such as {"type": "nvshmem"}',
    )


@dataclass(frozen=True)
class Hop:
    """One change of layout of the payload: the all_to_all over `axis`, and the bytes that a device
    receives (None without tokens)."""

    axis: str
    devices: int
    wire_bytes: int | None


@dataclass(frozen=True)
class MoEInspection:
    """A report of a call of `moe`; `str()` is its text.

    `capacity` is in choices, or in even shares (a float) without tokens. `slots` are the rows that
    one device sends, over all experts. `dispatch` and `combine` are the hops to the experts and
    back, in order.
    """

    transport: Transport
    experts: int
    rows: int
    k: int
    axes: tuple[str, ...]
    capacity: int | float | None
    slots: int | None
    buckets: int
    dispatch: tuple[Hop, ...]
    combine: tuple[Hop, ...]

    @property
    def served_by(self) -> str:
        """The transport that is used."""
        if not self.dispatch:
            return "no transport: experts and tokens are on the same devices"
        if self.transport.type == "nvshmem":
            return f"kernels with puts (GPUs with NVSHMEM), or permutes {CARRIERS}"
        return f"XLA's all_to_all {CARRIERS}"

    def __str__(self) -> str:
        t = self.transport
        copies = f" in {self.rows} rows" if self.rows != self.experts else ""
        over = f", split over {', '.join(self.axes)}" if self.axes else ""
        c = self.capacity
        room = f"{c} times an even share" if isinstance(c, float) else f"{c} a group and expert"
        room = "dropless" if c is None else room
        rows = [
            f"moe : {self.experts} experts{copies}, {self.k} a token{over}",
            f"  requested {t.type}: {TRANSPORTS[t.type]}",
            f"  served by {self.served_by}",
            f"  room      {room}" + (f"; {self.slots:,} rows from a device" if self.slots else ""),
            f"  payload   {t.pack_dtype or 'unpacked'}, {self.buckets} buckets, {t.epoch} epochs",
        ]
        for name, hops in (("dispatch", self.dispatch), ("combine", self.combine)):
            for i, hop in enumerate(hops):
                size = "" if hop.wire_bytes is None else f": receives {hop.wire_bytes:,} B a device"
                first = name if not i else ""
                rows.append(f"  {first:9} all_to_all over {hop.axis} of {hop.devices}{size}")
        return "\n".join(rows)

    __repr__ = __str__


def reports_of(reports: Iterable[object]) -> tuple[MoEInspection, ...]:
    """The reports of `moe` among the reports of all functions."""
    return tuple(r for r in reports if isinstance(r, MoEInspection))


def row_bytes(channels: int, wide: int, packing: str | None) -> int:
    """Bytes of one row on the wire; `wide` is the size of one unpacked channel."""
    if packing == "fp8_e4m3":
        blocks = -(-channels // BLOCK)
        return blocks * BLOCK + 4 * blocks
    return channels * (wide if packing is None else 2)


def buckets_of(sent_bytes: int, most: int, t: Transport) -> int:
    """The number of buckets, at most `most`, for a payload of `sent_bytes`."""
    if t.bucket_bytes is None:
        return min(most, int(choose("expert_buckets", 1, (2, 4))))
    return max(1, min(most, math.ceil(sent_bytes / t.bucket_bytes)))


def hops(tokens: TensorType, axes: tuple[str, ...], sent_bytes: int | None) -> tuple[Hop, ...]:
    """The all_to_alls that move `sent_bytes` from a device, one per axis that splits tokens."""
    return tuple(
        Hop(a, n, None if sent_bytes is None else sent_bytes * (n - 1) // n)
        for a in axes
        for n in [tokens.sizes[a]]
        if a in tokens.split_axes and shard_count((a,), tokens.sizes) > 1
    )
