"""A table in, a table out: each row of a CSV file with its predicted step.

>>> rows = "hidden,layers,heads,vocab,seq,global_batch,chips,zero\\n2048,24,16,50368,2048,64,8,3"
>>> print(predicted(rows).splitlines()[-1])
2048,24,16,50368,2048,64,8,3,0.764,194.6,0.624,5.6
"""

from __future__ import annotations

import csv
import io

from .predict import predict
from .rows import columns, read_rows, records

RESULTS = ("step_s", "tflops_per_chip", "mfu", "memory_gib")


def predicted(text: str) -> str:
    """Returns the table `text` in CSV with the columns `step_s`, `tflops_per_chip`, `mfu` and
    `memory_gib`. Raises UsageError with every cell that is wrong."""
    rows = read_rows(text)
    cells = records(text)
    out = io.StringIO()
    writer = csv.DictWriter(out, [*dict.fromkeys((*columns(text), *RESULTS))], lineterminator="\n")
    writer.writeheader()
    for row, given in zip(rows, cells, strict=True):
        p = predict(row)
        results = (f"{p.step_s:.4g}", f"{p.tflops_per_chip:.1f}", f"{p.mfu:.3f}")
        values = (*results, f"{p.memory_gib:.1f}")
        writer.writerow({**given, **dict(zip(RESULTS, values, strict=True))})
    return out.getvalue()
