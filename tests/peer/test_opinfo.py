"""Every op with a counterpart in PyTorch, on PyTorch's own samples.

With `--long` every sample (a seeded part for ops with hundreds) is recorded on one device, f32
samples also in a random layout of eight devices (layouts do not depend on the dtype), forward and
backward. A seeded part of each op and dtype is recorded in both ways and computed by the oracle,
whole and block by block, a few of these by the engine. By default there are fewer, and samples of
other dtypes than f32 are only recorded; `--all-samples` runs all of them in every way. Refused
samples and intended differences are in `exceptions.py`; no other may differ, and no entry there may
be stale.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.lang.record.recorder import Recorder, recording
from tessera.lang.value.tensor import Tensor
from tests.peer.cases import OURS, TORCH, Answer, Case, Laid, answered, difference, laid_out
from tests.peer.exceptions import DIFFERS, REFUSED
from tests.peer.rows import FLOATS, ROWS, NotOffered, Row
from tests.peer.table import TABLE

assert TABLE is ROWS
TOGETHER = 8  # rows whose samples share one engine program, since compilation is slow


@dataclass(frozen=True)
class Share:
    """The number of an op's samples by dtype: recorded, computed by the oracle, and run on the
    engine, on one device and on eight. None: all."""

    recorded: dict[str, int] | None
    oracle: dict[str, int] | None
    engine: dict[str, int] | None
    spread: dict[str, int] | None

    @staticmethod
    def of(many: dict[str, int] | None, dtype: str, samples: int) -> int:
        return samples if many is None else min(many.get(dtype, many.get("others", 0)), samples)


SHORT = Share({"f32": 24}, {"f32": 6, "bf16": 3, "others": 2}, {}, {"f32": 1})
# Pooling has more than a thousand samples.
LONGER = Share(
    {"others": 200}, {"f32": 12, "bf16": 6, "others": 4}, {"f32": 2, "bf16": 1}, {"f32": 1}
)
WHOLE = Share(None, None, None, None)


@cache
def infos() -> dict[str, Any]:
    """PyTorch's samples by op name. Their modules take seconds to import, so that only these tests
    do it."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{o.name}.{o.variant_test_name}".rstrip("."): o for o in op_db}


def samples_of(info: Any, dtype: str) -> Iterator[Any]:
    """Yields PyTorch's samples of an op, each with the same seed, by its own `sample_inputs`.
    OpInfo's public method also reads the source of each stack frame for the test's name, which took
    longer than all the rest."""

    def seeded() -> None:
        torch.default_generator.manual_seed(1234)
        np.random.seed(1234)
        random.seed(1234)

    seeded()
    made = iter(info.sample_inputs_func(info, "cpu", TORCH[dtype], False))
    while True:
        seeded()
        try:
            sample = next(made)
        except StopIteration:
            return
        yield sample


def cases_of(row: Row, share: Share) -> Iterator[tuple[Case, bool]]:
    """Yields PyTorch's samples of the op in every dtype of both, and whether to compute each."""
    info = infos()[row.op]
    for dtype in row.dtypes:
        if TORCH[dtype] not in info.supported_dtypes("cpu"):
            continue
        gradient = row.grad and dtype in FLOATS and info.supports_autograd
        samples = list(samples_of(info, dtype))
        draw = random.Random(f"{row.op} {dtype}")
        chosen, kept = (
            set(draw.sample(range(len(samples)), Share.of(many, dtype, len(samples))))
            for many in (share.oracle, share.recorded)
        )
        for number, sample in enumerate(samples):
            if number not in chosen | kept:
                continue
            compute = number in chosen
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case = answered(row, info.op, dtype, number, sample, gradient, wide=compute)
            if case is not None:
                yield case, compute


def layouts(case: Case) -> list[Laid]:
    draw = random.Random(case.name)
    return [laid_out(x, draw) for x in case.given]


@dataclass(frozen=True)
class Recorded:
    """A case as a graph, with the values of its inputs, and the dtypes of its results."""

    graph: Graph
    values: Callable[[], list[Any]]
    dtypes: list[str]


def recorded(case: Case, laid: Sequence[Laid] | None) -> Recorded:
    """Records the case, forward and backward, on one device or in a layout of eight."""
    recorder = Recorder("case")
    placed = put(case, laid)
    arrays = case.given if laid is None else [p.placed for p in laid]
    known = {id(t): x for t, x in zip(placed, arrays, strict=True)}
    with recording(recorder):
        given = placed if laid is None else [p.made(t) for p, t in zip(laid, placed, strict=True)]
        outs, grads = case.run(given)
        graph = recorder.builder.graph([recorder.node(t) for t in (*outs, *grads)])
    verify(graph)
    of = {node: t for t, node in recorder.captured}

    def values() -> list[Any]:
        made = [(of[n], known.get(id(of[n]))) for n in graph.inputs]
        return [t.numpy() if x is None else x for t, x in made]

    return Recorded(graph, values, [t.dtype.name for t in outs])


def put(case: Case, laid: Sequence[Laid] | None) -> list[Tensor]:
    if laid is None:
        return [ts.tensor(x) for x in case.given]
    return [ts.tensor(p.placed, mesh=p.type.mesh, layout=p.type) for p in laid]


def engine(cases: Sequence[Case], laid: Sequence[list[Laid]] | None) -> list[list[Any]]:
    """Results and gradients of several cases in one engine program. If that fails, each case runs
    alone to find the failing one."""
    placed = [put(c, None if laid is None else laid[i]) for i, c in enumerate(cases)]

    def run(all_given: list[list[Tensor]]) -> list[list[Tensor]]:
        made = []
        for i, (case, given) in enumerate(zip(cases, all_given, strict=True)):
            if laid is not None:
                given = [p.made(t) for p, t in zip(laid[i], given, strict=True)]
            outs, grads = case.run(given)
            made.append([*outs, *grads])
        return made

    try:
        return [[t.numpy() for t in one] for one in ts.jit(run)(placed)]
    except Exception as error:
        for i, case in enumerate(cases if len(cases) > 1 else ()):
            engine([case], None if laid is None else [laid[i]])
        error.add_note(f"in {', '.join(f'{c.name} ({c.text()})' for c in cases)}")
        raise


def faults(case: Case, got: Sequence[Any], how: str) -> Iterator[tuple[Case, str, str]]:
    """Yields the differences from PyTorch: the case, the part, and a text."""
    wants: list[Answer] = [*case.answers, *case.gradients]
    if len(got) != len(wants):
        yield case, "value", f"{how}: {len(got)} results, PyTorch {len(wants)}"
        return
    for i, (x, want) in enumerate(zip(got, wants, strict=True)):
        part = "value" if i < len(case.answers) else "gradient"
        loose = case.row.loose * (8 if part == "gradient" else 1)  # sums of what may cancel
        said = difference(np.asarray(x), want, case.dtype, loose)
        if said:
            place = f" {i}" if len(wants) > 1 else ""
            yield case, part, f"{how}: {part}{place}: {said}"


def of_oracle(case: Case, compute: bool) -> Iterator[tuple[Case, str, str]]:
    """Yields the differences of the oracle's results from PyTorch. Raises the errors of Tessera's
    functions."""
    whole = recorded(case, None)
    want = [OURS[a.dtype] for a in case.answers]
    if whole.dtypes != want:
        yield case, "dtype", f"dtypes {whole.dtypes}, PyTorch {want}"
    if not (compute or case.dtype == "f32"):
        return
    spread = recorded(case, layouts(case))
    if compute:
        yield from faults(case, evaluate(whole.graph, whole.values()), "whole")
        blocks = evaluate_blocks(spread.graph, spread.values(), padding=np.nan)
        yield from faults(case, blocks, "spread")


@dataclass
class Tried:
    """The outcome of a row's samples."""

    row: Row
    count: int = 0
    wrong: list[tuple[Case, str, str]] = field(default_factory=list)
    met: set[str] = field(default_factory=set)  # the refusals' texts that occurred
    taken: dict[str, list[Case]] = field(default_factory=dict)  # by dtype: what the oracle gave

    def said(self) -> str:
        """The faults of the row as text, or ""."""
        op = self.row.op
        if not self.count:
            return f"{op}: PyTorch has no sample of it that we could try"
        differing = [d for d in DIFFERS if d.op == op]
        seen: set[int] = set()
        left = []
        for case, part, said in self.wrong:
            known = [i for i, d in enumerate(differing) if d.part == part and d.when(case.sample)]
            seen.update(known)
            if not known:
                left.append(f"{case.name} ({case.text()})\n    {said}")
        if left:
            shown = left[:12] + ([f"... and {len(left) - 12} more"] if len(left) > 12 else [])
            return f"{op} differs from PyTorch:\n" + "\n".join(shown)
        stale = [r.says for r in REFUSED if r.op == op and r.says not in self.met]
        stale += [d.why for i, d in enumerate(differing) if d.always and i not in seen]
        return f"no sample of {op} meets these entries any more: {stale}" if stale else ""


def tried(row: Row, share: Share) -> Tried:
    """Records the row's samples, and compares the oracle's results. Refused samples and intended
    differences may be rare, so their ops run at least the share `LONGER`."""
    if share is SHORT and any(e.op == row.op for e in (*REFUSED, *DIFFERS)):
        share = LONGER
    found = Tried(row)
    refusals = [r.says for r in REFUSED if r.op == row.op]
    for case, compute in cases_of(row, share):
        try:
            here = list(of_oracle(case, compute))
        except NotOffered:
            continue
        except ts.TesseraError as error:
            says = next((s for s in refusals if s in str(error)), None)
            if says is None:
                found.wrong.append((case, "refused", str(error).replace("\n", " | ")))
            else:
                found.met.add(says)
            continue
        found.count += 1
        found.wrong += here
        if compute and not here:
            found.taken.setdefault(case.dtype, []).append(case)
    if share is SHORT and not found.count:  # none of the few drawn samples is supported
        return tried(row, LONGER)
    return found


def run_some(rows: Sequence[Tried], share: Share) -> None:
    """Runs a few samples of all `rows` on the engine, with a program per dtype."""
    for dtype in sorted({d for t in rows for d in t.taken}):
        chosen: list[tuple[Tried, Case]] = []
        spread: list[tuple[Tried, Case]] = []
        for t in rows:
            cases = t.taken.get(dtype, [])
            drawn = random.Random(f"{t.row.op} {dtype}").sample(cases, len(cases))
            chosen += [(t, c) for c in drawn[: Share.of(share.engine, dtype, len(cases))]]
            spread += [(t, c) for c in drawn[: Share.of(share.spread, dtype, len(cases))]]
        for pairs, how in ((chosen, "engine"), (spread, "engine, spread")):
            if pairs:
                cases = [c for _, c in pairs]
                laid = [layouts(c) for c in cases] if pairs is spread else None
                for (t, case), got in zip(pairs, engine(cases, laid), strict=True):
                    t.wrong += faults(case, got, how)


@pytest.mark.parametrize(
    "rows",
    [ROWS[i : i + TOGETHER] for i in range(0, len(ROWS), TOGETHER)],
    ids=lambda rows: ",".join(r.op for r in rows),
)
def test_it_gives_what_pytorch_gives(rows: list[Row], request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption
    share = WHOLE if asked("--all-samples") else LONGER if asked("--long") else SHORT
    found = [tried(row, share) for row in rows]
    run_some(found, share)
    wrong = [said for t in found if (said := t.said())]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_of_ops_in_the_table() -> None:
    ops = {r.op for r in ROWS}
    assert {e.op for e in (*REFUSED, *DIFFERS)} <= ops
    assert len(ops) == len(ROWS)
