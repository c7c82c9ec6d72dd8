"""Generated programs whose processes call functions in different orders: an error that names the
call, or a right result."""

from __future__ import annotations

import json
import random
import re
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs.harness import line_of, run_ranks

BODY = """
import json
from tessera.core.context import put
put(executor=os.environ["EXECUTOR"])
LAYOUTS = {"rows": X, "columns": ts.tensor(X.whole, mesh=MESH, layout="[4, 2@dp]")}

@ts.jit
def total(x):
    return x.sum()  # total
@ts.jit
def double(x):
    return (x * 2).sum()  # double
@ts.jit
def largest(x):
    return x.max()  # largest
@ts.jit
def both(x):
    return x.sum() + ts.exp(-x).max()  # both
@ts.jit
def product(x):
    return (x @ ts.ones((2, 3))).sum(0)  # product
@ts.jit
def late(x):
    return (x - 1).sum()  # late
@ts.jit
def local(x):
    return x + 1

FUNCTIONS = {f.__name__: f for f in (total, double, largest, both, product, late, local)}
for f in (total, double, largest, both, product, local):
    for x in LAYOUTS.values():
        f(x)
found, kept = [], []
try:
    for name, layout, reads in json.loads(os.environ["CALLS"])[RANK]:
        y = FUNCTIONS[name](LAYOUTS[layout])
        if name != "local":
            kept.append(y)
        if reads:
            kept[-1].numpy()
    print(json.dumps([y.numpy().tolist() for y in kept]))
except ts.TesseraError as error:
    print(f"{type(error).__name__}: {error}")
sys.stdout.flush()
# Each stays until the other has said what it found: who leaves breaks the connection.
folder = os.environ["TESSERA_FLIGHT_DIR"]
open(os.path.join(folder, f"done{RANK}"), "w").close()
end_s = time.time() + 12
while not os.path.exists(os.path.join(folder, f"done{1 - RANK}")) and time.time() < end_s:
    time.sleep(0.05)
time.sleep(0.5 * (RANK == 0))
os._exit(0)
""".replace("X.whole", "np.arange(8, dtype=np.float32).reshape(4, 2)")
Call = tuple[str, str, bool]
KNOWN = ("total", "double", "largest", "both", "product")
BEFORE = 2 * len(KNOWN) + 2  # calls of each process before the case: both layouts
VALUES = {"total": 28.0, "double": 56.0, "largest": 7.0, "both": 29.0, "product": [28.0] * 3,
          "late": 20.0}  # fmt: skip
KINDS = ("same", "swap", "swap", "drop", "twice", "program", "layout", "new", "local", "last")


def generated(number: int) -> tuple[str, list[list[Call]]]:
    """Returns (the difference, the calls of both ranks) of the program `number`."""
    rng = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    calls = [
        (rng.choice(KNOWN), rng.choice(("rows", "columns")), rng.random() < 0.2)
        for _ in range(rng.randint(5, 12))
    ]
    other, at = [*calls], rng.randrange(1, len(calls) - 1)
    name, layout, reads = calls[at]
    if kind == "swap":
        other[at : at + 2] = reversed(other[at : at + 2])
    elif kind == "drop":
        del other[at]
    elif kind == "twice":
        other.insert(at, calls[at])
    elif kind == "program":
        other[at] = (rng.choice([n for n in KNOWN if n != name]), layout, reads)
    elif kind == "layout":
        other[at] = (name, "rows" if layout == "columns" else "columns", reads)
    elif kind == "new":
        other[at] = ("late", layout, reads)
    elif kind == "local":
        other.insert(at, ("local", layout, False))
    elif kind == "last":
        other.append(calls[-1])
    ranks = [calls, other]
    return kind, ranks if rng.random() < 0.5 else ranks[::-1]


def difference(ranks: list[list[Call]]) -> tuple[int, list[str | None]] | None:
    """Returns (the index of the first call that differs, each rank's call there), or None."""
    streams = [[(n, layout) for n, layout, _ in calls if n != "local"] for calls in ranks]
    for i, pair in enumerate(zip_longest(*streams)):
        if pair[0] != pair[1]:
            return BEFORE + i + 1, [None if call is None else call[0] for call in pair]
    return None


SHORT = (0, 1, 3, 5, 6, 7)  # same, swap, drop (step by step), program, layout, new


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[LONG] * (n not in SHORT)) for n in range(40)]
)
def test_what_differs_is_named_or_right(number: int, tmp_path: Path) -> None:
    kind, ranks = generated(number)
    executor = "stepped" if number % 7 == 3 else "fused"
    ended = run_ranks(BODY, tmp_path, limit_s=100, CALLS=json.dumps(ranks), EXECUTOR=executor,
                      TESSERA_COLLECTIVE_LIMIT="8")  # fmt: skip
    said = [e.out + e.err for e in ended]
    right = [[VALUES[name] for name, _, _ in calls if name != "local"] for calls in ranks]
    differs = difference(ranks)
    for rank, e in enumerate(ended):
        assert e.code is not None, said
        if differs is None:
            assert e.out and json.loads(e.out) == right[rank], said
        elif e.out.startswith("["):  # it has made all of its calls together with the other rank
            assert None in differs[1] and json.loads(e.out) == right[rank], said
    if differs is None:
        assert kind in ("same", "local", "swap")
        return
    call, names = differs
    if None in names:
        assert f"rank {names.index(None)} " in said[1 - names.index(None)], said
        return
    # If layouts differ, the first program that differs is the sum itself, or its collective.
    named = [f"call {call} differs" in text for text in said]
    assert any(named), said
    for text in (text for text, does in zip(said, named, strict=True) if does):
        for rank, name in enumerate(names):
            assert re.search(rf"rank {rank} : .*{name}: .* at {line_of(str(name), BODY)}", text)
