"""`debug` functions on tensors split over several processes."""

from __future__ import annotations

from pathlib import Path

from tests.procs.harness import line_of, run_ranks

BODY = """
def shown(x):
    ts.debug.print(x)  # print
    ts.debug.check_finite(x)
    return x * 2

ts.jit(shown)(X)

@ts.op.kernel
def own(x):
    ts.debug.print(x.sum())
    return ts.debug.check_finite(x)

own(X)
ts.jit(shown)(ts.tensor([5.0], mesh=dist.Mesh(("dp",), devices=[0])))  # the other has none of it
print(ts.debug.nan_origin(lambda x: ts.log(x - 1), X))
print(ts.debug.compare(lambda x: x.sum(0), lambda x: (x + 1).sum(0), X).same)
"""


def test_what_lies_in_parts_is_printed_and_searched(tmp_path: Path) -> None:
    ended = run_ranks(BODY, tmp_path)
    assert [e.code for e in ended] == [0, 0], ended
    at = line_of("print", BODY)
    for k, e in enumerate(ended):
        assert "[[0. 1.]\n" in e.out and f"{at}: " in e.out, e.out
        assert "[dp=0] 6.0\n" in e.out and "[dp=1] 22.0\n" in e.out
        assert ("[5.]" in e.out) == (k == 0)
        assert "log makes NaN of finite operands\n" in e.out
        assert "1 NaN and 1 inf of 8, the others 0 to 1.792" in e.out
        assert e.out.endswith("False\n")
