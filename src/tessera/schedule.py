"""Execution options of programs: `from tessera import schedule`, to call and to set.

>>> import tessera as ts
>>> from tessera import schedule
>>> @schedule(overlap=True, bucket_bytes=1 << 20)
... def double(x):
...     return x * 2
>>> double(ts.tensor([1.0, 2.0])).numpy().tolist()
[2.0, 4.0]
>>> print(double.compiled.schedule.options)
overlap=True bucket_bytes=1048576
"""

from typing import TYPE_CHECKING

from .core.callable_module import make_callable
from .core.options import ScheduleOptions
from .core.public import public
from .ir.schedule.schedule import Schedule, Step
from .ir.schedule.text import parse
from .ir.schedule.verify import verify_schedule as verify
from .lang.program.schedule import (
    algorithm,
    all_reduce_overlap,
    bucket_bytes,
    compiled_under,
    current,
    pipeline_microbatches,
    prefetch,
    reset,
)

__all__ = [
    "Schedule", "ScheduleOptions", "Step", "algorithm", "all_reduce_overlap",
    "bucket_bytes", "current", "parse",
    "pipeline_microbatches", "prefetch", "reset", "verify",
]  # fmt: skip

if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = public("schedule", globals())
make_callable(__name__, compiled_under)  # the guides write `@schedule(...)`
