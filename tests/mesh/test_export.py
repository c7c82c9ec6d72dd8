"""Programs taken out: their text, and files that another process reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op

MESH = dist.Mesh.parse("dp=2 tp=4")
LOADED = """
import sys, numpy as np, tessera as ts
folder = sys.argv[1]
for name in sys.argv[2:]:
    ts.seed(5)
    tol = 2e-2 if name == "narrow" else 2e-5
    given = np.load(f"{folder}/{name}.npz")
    program = ts.export.load(f"{folder}/{name}", onto=2)
    assert program.mesh.size == 8 and program.mesh.physical.size == 2, program.mesh
    out = program({"x": given["x"]}, scale=0.5)
    np.testing.assert_allclose(out["y"].to("f32").numpy(), given["y"], rtol=tol, atol=tol)
    assert out["k"] == [0.5, None]
print("same")
"""


def _x(layout: str = "[4@dp, 8@tp]") -> ts.Tensor:
    return ts.tensor(np.random.RandomState(0).randn(4, 8), mesh=MESH, layout=layout)


class Mlp(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return self.down(nn.gelu(self.up(x)))


def _programs() -> dict[str, object]:
    model = Mlp()
    narrow = ts.tensor(np.random.RandomState(1).randn(8, 8), mesh=MESH, layout="[8@tp, 8]").to(
        "bf16"
    )

    split = dist.ShardSpec(("row", "col"), ("dp", "tp"))

    @ts.distribute(mesh=MESH, layouts={"x": split, "return": split})
    def local(x):
        return x - dist.all_reduce(x, "tp")

    def of(y):
        return lambda d, scale: {"y": y(d["x"]) * scale, "k": [scale, None]}

    def loop(x):
        return ts.scan(lambda c, w: (op.matmul(c, w) * 0.1, None), x, ts.ones((3, 8, 8)))[0]

    return {
        "model": of(model),
        "narrow": of(lambda x: x.to("bf16") @ narrow),
        "loop": of(loop),
        "local": of(local),
        "drawn": of(lambda x: x * ts.random.normal((4, 8))),
        "moved": of(lambda x: op.softmax(x.transpose(0, 1), 0)[:, ::2]),
        "many": of(lambda x: op.topk(x, 3)[0] + op.split(x, [3, 5], 1)[0]),
    }


def test_files_run_in_another_process_on_a_folded_mesh(tmp_path: Path) -> None:
    """Each program gives its result on two devices, without the function's code."""
    x = _x()
    for name, f in _programs().items():
        ts.export.save(f, tmp_path / name, {"x": x}, scale=0.5)
        ts.seed(5)
        y = ts.jit(f)({"x": x}, scale=0.5)["y"].to("f32").numpy()
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=y)
    environ = {**os.environ, "TESSERA_DEVICES": "2"}
    run = [sys.executable, "-c", LOADED, str(tmp_path), *_programs()]
    got = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=300)
    assert got.stdout == "same\n", got.stderr


@pytest.mark.parametrize("layout", ["[4, 8]", "[4@dp, 8]", "[4, 8@tp]", "[4@tp, 8@dp]"])
def test_arguments_in_any_layout_and_gradients(tmp_path: Path, layout: str) -> None:
    """A loaded program takes other layouts; in other functions its ops have gradients."""
    f = _programs()["model"]
    ts.export.save(f, tmp_path / "f", {"x": _x()}, scale=2.0)
    program = ts.export.load(tmp_path / "f")
    x = _x(layout)

    def loss(of):
        return lambda x: (of({"x": x}, scale=2.0)["y"] ** 2).sum()

    want, slope = ts.value_and_grad(loss(f))(x)
    for got, g in (
        ts.value_and_grad(loss(program))(x),
        ts.jit(lambda x: ts.value_and_grad(loss(program))(x))(x),
    ):
        np.testing.assert_allclose(got.item(), want.item(), rtol=1e-5)
        np.testing.assert_allclose(g.numpy(), slope.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss(program)(x).item(), want.item(), rtol=1e-5)


def test_the_text_cost_and_memory_of_a_program() -> None:
    """`lower` gives StableHLO, HLO with the collectives, flops and bytes."""
    w = ts.tensor(np.ones((8, 16)), mesh=MESH, layout="[8@tp, 16]")
    f = ts.jit(lambda x: x @ w)
    lowered = f.lower(_x("[4@dp, 8@tp]"))
    assert "stablehlo.dot_general" in lowered.stablehlo()
    compiled = lowered.compile()
    assert "all-reduce" in compiled.text or "reduce-scatter" in compiled.text
    assert compiled.cost["flops"] >= 2 * 2 * 2 * 16
    assert compiled.memory["arguments"] == 4 * (2 * 2 + 2 * 16)
    assert compiled.memory["results"] == 4 * 2 * 16


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    ts.export.save(lambda x: x * 2, tmp_path / "f", _x())
    with zipfile.ZipFile(tmp_path / "f") as old:
        parts = {n: old.read(n) for n in old.namelist()}
    head = json.loads(parts["program.json"])
    parts["program.json"] = json.dumps({**head, "format": 99, "tessera": "9.9"}).encode()
    with zipfile.ZipFile(tmp_path / "g", "w") as new:
        for n, data in parts.items():
            new.writestr(n, data)
    with pytest.raises(ts.UsageError, match=r"(?s)is of format 99.*load it with Tessera 9\.9"):
        ts.export.load(tmp_path / "g")
    data = bytearray((tmp_path / "f").read_bytes())
    data[len(data) // 3] ^= 255
    (tmp_path / "h").write_bytes(data)
    with pytest.raises(ts.UsageError, match="is damaged"):
        ts.export.load(tmp_path / "h")


def test_dicts_come_in_any_order(tmp_path: Path) -> None:
    a, b = ts.tensor([1.0, 2.0]), ts.tensor([10.0, 20.0])
    ts.export.save(lambda d, *, k, m: d["a"] - d["b"] + k * m, tmp_path / "f",
                   {"a": a, "b": b}, k=a, m=2.0)  # fmt: skip
    program = ts.export.load(tmp_path / "f")
    for got in (program({"b": b, "a": a}, m=2.0, k=a), program({"a": a, "b": b}, k=a, m=2.0)):
        np.testing.assert_array_equal(got.numpy(), a.numpy() - b.numpy() + 2 * a.numpy())


@pytest.mark.parametrize("onto", [3, 0, "tp", {"ep": 2}])
def test_what_is_no_fold_is_an_error_of_the_mesh(onto: Any, tmp_path: Path) -> None:
    ts.export.save(lambda x: x * 2, tmp_path / "f", _x("[4@dp, 8@tp]"))
    with pytest.raises(ts.MeshError, match=r"fold|axis=size"):
        ts.export.load(tmp_path / "f", onto=onto)


def test_random_numbers_of_a_program_in_a_function_are_new(tmp_path: Path) -> None:
    """In each call, each use and each step of a loop, and those of the function's seed."""
    x = ts.ones((2, 16))
    ts.export.save(lambda x: nn.dropout(x, 0.5), tmp_path / "p", x)
    program = ts.export.load(tmp_path / "p")

    @ts.jit
    def run(x: ts.Tensor) -> Any:
        _, rows = ts.scan(lambda h, _: (h, program(x)), x, None, length=3)
        return program(x), program(x), rows

    def masks() -> set[bytes]:
        one, two, rows = run(x)
        return {a.tobytes() for a in (one.numpy(), two.numpy(), *rows.numpy())}

    ts.seed(0)
    first, second = masks(), masks()
    assert len(first | second) == 10
    ts.seed(0)
    assert masks() == first
