"""Plans of programs before they run: `ts.plan.report(step, *args, cluster="dgx_h100:1024")`.

`ts.plan.best(build, cluster=...)` searches for the fastest mesh, strategy and options. The machine
need not be there: times are simulated on a described one.
"""

from typing import TYPE_CHECKING

from ..core.public import public
from .candidates import Found
from .machines import machine_of
from .reports import Report, report
from .search import best
from .timeline import Timeline

__all__ = ["Found", "Report", "Timeline", "best", "machine_of", "report"]
if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("plan", globals())
