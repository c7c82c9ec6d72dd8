"""Plans of programs before they run: `ts.plan.report(step, *args, cluster="dgx_h100:1024")`.

The machine need not be there: times are simulated on a described one.
"""

from ..core.public import public
from .changes import Change
from .dearest import Share
from .machines import machine_of
from .reports import Memory, Report, report
from .timeline import Event, StageTime, Timeline, Traffic

__all__ = [
    "Change", "Event", "Memory", "Report", "Share", "StageTime", "Timeline", "Traffic",
    "machine_of", "report",
]  # fmt: skip
__getattr__ = public("plan", globals())
