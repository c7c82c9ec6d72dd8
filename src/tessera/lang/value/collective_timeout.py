"""The timeout of collectives: `dist.set_collective_timeout(seconds)`."""

from __future__ import annotations

from ...core.declared import Count, Scale
from ...core.limits import set_limits


def set_collective_timeout(seconds: Scale, *, records: Count | None = None) -> None:
    """Sets how many seconds a collective may take before it ends the process with an error.

    In a fused program the limit is for the whole program. The error names the ranks that have not
    arrived and the last collectives of each. The default is 300 seconds, or
    `TESSERA_COLLECTIVE_LIMIT`. `records` is how many of its last collectives each rank remembers
    (default 256, or `TESSERA_FLIGHT_RECORDS`). Raises UsageError if `seconds` is not above 0.
    """
    if records is not None:
        set_limits(flight_records=records)
    set_limits(collective_s=seconds)
