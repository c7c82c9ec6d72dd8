"""Visible devices: a backend starts with those alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs.harness import Ended, run_ranks


def ran(body: str, folder: Path, **env: str) -> Ended:
    (ended,) = run_ranks(body, folder, size=1, head="", **{"TESSERA_DEVICES": "8", **env})
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.parametrize(
    "name", [pytest.param("TT_VISIBLE_DEVICES", marks=LONG), "TESSERA_VISIBLE_DEVICES"]
)
def test_plain_devices_are_one_an_id(name: str, tmp_path: Path) -> None:
    body = """
import tessera as ts
print(ts.mesh.auto().text())
x = ts.tensor([1.0, 2.0], mesh=ts.mesh.auto(), layout="[2@dp]")
print(x.sum().item())
try:
    ts.tensor([1.0] * 4, mesh=ts.dist.Mesh(("dp",), devices=4), layout="[4@dp]").numpy()
except ts.BackendError as error:
    print(error)
"""
    assert ran(body, tmp_path, **{name: "0,1"}).out == (
        "dp=2\n3.0\n"
        "mesh: needs 4 devices, this machine has 2\n"
        "  backend : 2 x cpu\n"
        "  visible : 0,1\n"
        "  at      : prog.py:7\n"
        "  fix     : mesh.fold(onto=2), a smaller mesh, or more visible devices\n"
    )


def test_a_card_is_two_chips(tmp_path: Path) -> None:
    body = """
import tessera as ts
mesh = ts.mesh.preset("t3000", ("dp", "tp"))
x = ts.tensor([[1.0, 2.0], [3.0, 4.0]], mesh=mesh, layout="[2@dp, 2@tp]")
print(mesh.text(), x.sum().item(), ts.mesh.auto().text())
"""
    assert ran(body, tmp_path, TT_VISIBLE_DEVICES="0,1").out == "dp=2 tp=2 10.0 dp=4\n"


@LONG
def test_a_backend_that_others_started_says_that_it_sees_all(tmp_path: Path) -> None:
    body = """
import warnings, jax
jax.devices()
import tessera as ts
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    ts.mesh.auto()
print(*(w.message for w in said if "visible" in str(w.message)))
"""
    out = ran(body, tmp_path, TT_VISIBLE_DEVICES="0,1").out
    assert out == (
        "visible devices: 1 and not 2 (prog.py:7): the backend of jax ran before Tessera could"
        " choose, or is of a kind whose devices cannot be hidden; use tessera before the first"
        " array of jax\n"
    )
