"""PyTorch's samples of each op on a GPU; tests/peer has more of them on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator

import jax
import pytest

import tessera as ts
from tests.gpu.test_gpu import has_gpu

if not has_gpu():
    pytest.skip("there is no GPU", allow_module_level=True)

from tests.peer.cases import Case
from tests.peer.exceptions import DIFFERS
from tests.peer.rows import ROWS, NotOffered, Row
from tests.peer.test_opinfo import Share, cases_of, engine, faults, recorded

# Warnings of other libraries' imports are ignored.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FEW = {"f32": 4, "bf16": 1, "others": 1}


def offered(row: Row) -> Iterator[Case]:
    """A few samples of the row, without those refused or with an intended difference."""
    differing = [d for d in DIFFERS if d.op == row.op]
    for case, compute in cases_of(row, Share(FEW, FEW, None, None)):
        if compute and not any(d.when(case.sample) for d in differing):
            try:
                recorded(case, None)
            except (NotOffered, ts.TesseraError):
                continue
            yield case


@pytest.mark.parametrize(
    "rows",
    [ROWS[i : i + 8] for i in range(0, len(ROWS), 8)],
    ids=lambda rows: ",".join(r.op for r in rows),
)
def test_it_gives_on_a_gpu_what_pytorch_gives(rows: list[Row]) -> None:
    cases = [case for row in rows for case in offered(row)]
    random.Random(0).shuffle(cases)
    with jax.default_matmul_precision("highest"):
        found = engine(cases, None)
    wrong = [
        f"{case.name} ({case.text()})\n    {said}"
        for case, got in zip(cases, found, strict=True)
        for _, _, said in faults(case, got, "GPU")
    ]
    assert cases and not wrong, "\n".join(wrong)
