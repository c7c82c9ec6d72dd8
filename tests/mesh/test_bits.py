"""Equal bits on every fold. Under `fast`, the first difference is found and named.

Long programs run in their own processes.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.core.context import replaced
from tests.cases import LONG
from tests.quickly import FLAGS

ROOT = Path(__file__).resolve().parents[2]


def alone(*command: str, devices: int = 8, flags: str = "") -> str:
    """Returns the output of a deterministic process whose engine starts with `flags`. Fails if the
    process fails."""
    env = {**os.environ, "TESSERA_DETERMINISTIC": "1", "TESSERA_DEVICES": str(devices)}
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flags}"
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=900, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("split", ["both", pytest.param("dp", marks=LONG)])
def test_every_op_of_the_table_has_one_result_on_every_fold(split: str, everything: bool) -> None:
    many = "all" if everything else "few"
    assert alone("-m", "tests.mesh.bits_ops", split, many).endswith("folds: 0 differ\n\n")


def test_random_programs_have_the_same_bits_and_whole_numbers_are_exact(
    everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_TEST_BITS_EXAMPLES", "12" if everything else "6")
    assert alone("-m", "tests.mesh.bits_properties", devices=12) == "the same bits\n"


@pytest.mark.parametrize(
    ("program", "dtype"),
    [("whole", "bf16"), *(pytest.param(p, d, marks=LONG) for p, d in (
        ("whole", "f32"), ("dense", "bf16"), ("uneven", "f32"), ("experts", "bf16")))],
)  # fmt: skip
def test_a_small_proof(program: str, dtype: str, everything: bool) -> None:
    # A pipeline is recorded again for its second step, since its weights then lie on their stages.
    # Fast compilation is enough to show the order of sums. The table of ops and the random programs
    # show that optimizations keep the bits of each op.
    steps = "3" if everything else "1"
    lines = alone(
        "bench/prove.py", "--small", "--only", program, "--dtype", dtype, "--steps", steps,
        "--jobs", "1", "--drawn", "0", flags="" if everything else FLAGS,
    ).splitlines()  # fmt: skip
    head = next(i for i, line in enumerate(lines) if line.startswith("logical program"))
    (row,) = (line.split() for line in lines[head + 1 :])
    assert (row[0], row[2]) == (program, dtype) and int(row[3]) > 1 and len(row) == 6


@LONG
def test_drawn_programs_have_the_same_bits_at_every_zero_stage(everything: bool) -> None:
    lines = alone(
        "bench/prove.py", "--small", "--only", "drawn", "--jobs", "1", devices=4,
        flags="" if everything else FLAGS,
    ).splitlines()  # fmt: skip
    rows = lines[lines.index("4 drawn programs") + 1 :]
    assert len(rows) == 4 and all(int(row[18:].split()[0]) == 3 for row in rows)
    assert not any(row.startswith("refused") for row in rows)


def test_a_transposed_weight_has_the_same_bits_fused_and_stepped() -> None:
    mesh, rng = dist.Mesh.parse("dp=2,tp=2"), np.random.default_rng(9)
    ids = ts.tensor(rng.integers(0, 12, 16).astype("i4"), mesh=mesh, layout="[16@dp]")
    b = ts.tensor(rng.normal(size=(16, 12)).astype("f4"), mesh=mesh, layout="[16@dp, 12@tp]")
    w = ts.tensor(rng.normal(size=(12, 10)).astype("f4"), mesh=mesh, layout="[12@tp, 10]")
    found = set()
    for executor in ("fused", "stepped"):
        with dist.deterministic(), replaced(executor=executor):
            step = ts.jit(lambda ids, w, b: ts.grad(((nn.embedding(ids, w) @ w.T) * b).sum(), w))
            found.add(step(ids, w, b).numpy().tobytes())
    assert len(found) == 1


def test_zero_has_the_bits_of_whole_weights_where_its_axis_divides_no_dim() -> None:
    mesh, rng = dist.Mesh.parse("dp=3,tp=2"), np.random.default_rng(0)
    a, c, x = (rng.normal(size=s).astype("f4") for s in ((16, 2), (2, 16), (12, 16)))
    tensor = dist.strategy("tensor_parallel", rules=[("^a$", 1), ("^c$", 1)])

    @ts.jit
    def step(w: Any, x: Any) -> Any:
        loss = ((x @ (w["a"] @ w["c"])) ** 2).mean()
        return loss, ts.grad(loss, w)

    found = set()
    for stage in (0, 1, 2, 3):
        zero = dist.strategy("zero_redundancy_optimizer", stage=stage or 1)
        plan = tensor + (zero if stage else dist.strategy("data_parallel"))
        w = dist.place({"a": ts.tensor(a), "c": ts.tensor(c)}, plan, mesh)
        with dist.deterministic():
            loss, grads = step(w, dist.place(x, plan, mesh, kind="batch"))
        found.add((loss.item(), grads["a"].numpy().tobytes(), grads["c"].numpy().tobytes()))
    np.testing.assert_allclose(loss.item(), ((x @ (a @ c)).astype("f8") ** 2).mean(), rtol=1e-5)
    assert len(found) == 1


MESH = dist.Mesh.parse("dp=8")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 70)).astype(np.float32)
W = RNG.normal(size=(70, 50)).astype(np.float32)


def made() -> tuple[dict[str, ts.Tensor], ts.Tensor]:
    x = ts.tensor(X, mesh=MESH, layout="[64@dp, 70]")
    return {"w": ts.tensor(W, mesh=MESH)}, x


@ts.jit
def step(weights: Any, x: Any) -> Any:
    h = nn.dropout(ts.tanh(x @ weights["w"]), 0.5)
    loss = (h * h).mean()
    weights["w"] = weights["w"] - 0.1 * ts.grad(loss, weights["w"])
    return loss


def test_the_first_node_that_differs_is_named() -> None:
    weights, x = made()
    state = ts.random.state()
    report = dist.validate_determinism(step, weights, x)
    # Eight terms, added one after the other or in pairs.
    assert report.runs == ("the first run", "the second run", "folded onto dp=1")
    first = report.first
    assert not report.same and first is not None and first.inside
    assert (first.run, first.op, first.of) == ("folded onto dp=1", "all_reduce", W.size)
    assert first.loc.startswith("test_bits.py:") and 0 < first.count < first.of
    lines = str(report).splitlines()
    assert lines[0] == (
        "fast: 2 results of the first run, the second run, folded onto dp=1:"
        " bits differ first at all_reduce, folded onto dp=1"
    )
    assert first.loc in lines[2] and str(first.count) in lines[-1]
    # The search has changed nothing.
    np.testing.assert_array_equal(weights["w"].numpy(), W)
    assert ts.random.state() == state


def test_what_agrees_is_said_to_agree() -> None:
    report = dist.validate_determinism(lambda x: x * 2.0, ts.ones((3,)))
    assert report.same
    assert str(report) == "fast: 1 results of the first run, the second run: the same bits"
    exact = ts.tensor(np.arange(64.0), mesh=MESH, layout="[64@dp]")
    assert dist.validate_determinism(lambda x: x.sum(), exact, onto=2).same


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.validate_determinism(step, *made(), onto=3), "3 is no fold of the mesh"),
        (
            lambda: dist.validate_determinism(lambda x: x, ts.ones((2,)), onto=1),
            "the step has no mesh to fold",
        ),
    ],
    ids=["no fold", "no mesh"],
)
def test_what_it_refuses(call: Any, message: str) -> None:
    with pytest.raises(ts.TesseraError, match=message):
        call()


@LONG
def test_under_the_promise_all_agree_also_after_programs_have_run() -> None:
    weights, x = made()
    assert not dist.validate_determinism(step, weights, x).same
    with dist.deterministic():
        report = dist.validate_determinism(step, weights, x)
    assert str(report) == (
        "mesh_invariant: 2 results of the first run, the second run, folded onto dp=1:"
        " the same bits"
    )


TERMS = RNG.normal(size=(8, 3)).astype(np.float32)
LINE = functools.reduce(np.add, TERMS)
PAIRS = functools.reduce(lambda rows, _: rows[::2] + rows[1::2], range(3), TERMS)[0]


@pytest.mark.parametrize("level", ["run_to_run", "mesh_invariant"])
@pytest.mark.parametrize(("tree", "want"), [("binary", PAIRS), ("ring", LINE), (None, PAIRS)])
def test_a_reduce_tree_is_kept_at_every_level_and_on_every_fold(
    tree: Any, level: str, want: Any
) -> None:
    assert PAIRS.tobytes() != LINE.tobytes()
    for mesh in (MESH, MESH.fold(onto=2)):
        x = ts.tensor(TERMS, mesh=mesh, layout="[8@dp, 3]")
        with dist.deterministic(tree, level=level):
            found = ts.jit(lambda x: x.sum(0))(x)
        assert found.numpy().tobytes() == want.tobytes(), mesh


FOUR = dist.Mesh.parse("dp=4")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [8, 16_388])  # one gather; an exchange in parts
def test_one_sum_keeps_its_order_at_the_level_fast_and_on_every_fold(
    columns: int, dtype: str
) -> None:
    terms = ts.tensor(np.random.default_rng(1).normal(size=(4, columns)), dtype=dtype)

    def plain(x: Any, on: bool) -> Any:
        return dist.all_reduce(x.sum(0), deterministic=on)

    def compiled(x: Any, on: bool) -> Any:
        @ts.distribute(mesh_axes=("dp",))
        def local(x: Any) -> Any:
            part = dist.reduce_scatter(x[0], "dp", deterministic=on)
            return dist.all_reduce(x[0], "dp", deterministic=on), dist.all_gather(part, "dp")

        return ts.jit(lambda x: (plain(x, on), *local(x)))(x)

    def found(run: Any, mesh: Any, on: bool, level: str = "fast") -> set[bytes]:
        x = dist.redistribute(terms, f"[4@dp, {columns}]", mesh=mesh)
        with mesh, dist.deterministic(level=level):
            made = run(x, on)
        made = made if isinstance(made, tuple) else (made,)
        return {t.to(ts.f32).numpy().tobytes() for t in made}

    meshes = [FOUR, FOUR.fold(onto=2), FOUR.fold(onto=1)]
    for run in (plain, compiled):
        want = found(run, FOUR, False, "mesh_invariant")
        assert len(want) == 1
        for mesh in meshes:
            assert found(run, mesh, True) == want, (run, mesh)
        assert any(found(run, mesh, False) != want for mesh in meshes), run  # else it shows nothing


def test_experts_keep_the_order_of_sums_on_a_fold() -> None:
    mesh, rng = dist.Mesh.parse("tp=4"), np.random.default_rng(2)
    shapes = {"router": "[8, 2]", "up": "[2, 8, 32@tp]", "down": "[2, 32@tp, 8]"}
    weights = {
        k: (rng.normal(size=[int(n) for n in re.findall(r"\d+", v)]), v) for k, v in shapes.items()
    }
    tokens = rng.normal(size=(16, 8)).astype("f4")

    def found(mesh: Any, on: bool) -> bytes:
        w = {k: ts.tensor(v, mesh=mesh, layout=layout) for k, (v, layout) in weights.items()}
        run = ts.jit(lambda x, w: nn.moe(x, w, k=1, capacity=2.0, deterministic=on))
        return run(ts.tensor(tokens, mesh=mesh), w).numpy().tobytes()

    ordered = found(mesh, True)
    assert ordered == found(mesh.fold(onto=2), True) and ordered != found(mesh, False)
