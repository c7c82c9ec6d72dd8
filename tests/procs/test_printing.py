"""Texts of tensors in one of several processes: nothing communicates, and no process waits."""

from __future__ import annotations

from pathlib import Path

from tests.procs.harness import run_ranks

BODY = """
mesh = dist.Mesh(("dp",), devices=2)
split = ts.tensor(np.arange(4.0), mesh=mesh, layout="[4@dp]") * 1.0
whole = ts.tensor(np.arange(4.0), mesh=mesh, layout="[4]") * 1.0
terms = split.sum()
total = dist.all_reduce(terms)
if dist.process_index() == 0:  # the other process prints nothing, and does not wait
    print("texts", [str(x) for x in (split, whole, total, terms)])
dist.barrier()
"""


def test_one_process_prints_what_it_holds(tmp_path: Path) -> None:
    ended = run_ranks(BODY, tmp_path, limit_s=120)
    assert [e.code for e in ended] == [0, 0], ended
    text = ended[0].out
    assert "<Tensor f32[4@dp] on dp=2, of which other processes hold a part>" in text
    assert "Tensor([0., 1., 2., 3.], f32[4] on dp=2)" in text
    assert "Tensor(6., f32[] on dp=2)" in text
    assert "<Tensor f32[] +dp on dp=2, of which other processes hold a part>" in text
