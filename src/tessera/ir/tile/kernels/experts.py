"""Rows of tokens to experts and back, gathered by index on both ways: nothing is added at random.

`ids` come from prefix sums of the counts. An id of -1 stands for no row.
"""

from __future__ import annotations

from .products import packed

_DISPATCH = """\
kernel {name}  v1
  dims N=64 C={c} S=96{block}
  tune bs=16{bc}
  speed warps=4
  grid i=S//bs j=C//{n}
  in x : {dtype}[N, C] tiles [1, {n}]
  in ids : i32[S] tiles [bs]
{refs}
  %ids = load ids[i]
  %is = ge %ids 0
  %has = col %is
  %at = max %ids 0
  %x = load x[rows %at, j]
{after}
  store y[i, j] = %y"""

_UNPACK = """\
kernel unpack  v1
  dims S=96 C=256 block=128
  tune bs=16
  speed warps=4
  grid i=S//bs j=C//block
  in x : f8e4m3[S, C] tiles [bs, block]
  in scale : f32[S, C//block] tiles [bs, 1]
  out y : {dtype}[S, C] tiles [bs, block]
  %x = load x[i, j]
  %wide = cast %x to=f32
  %scale = load scale[i, j]
  %down = col %scale
  %y0 = mul %wide %down
  %y = cast %y0 to={dtype}
  store y[i, j] = %y"""

_COMBINE = """\
kernel combine  v1
  dims N=64 C=64 S=96 K=2
  tune bn=16 bc=32
  speed warps=4
  grid i=N//bn j=C//bc
  in x : {dtype}[S, C] tiles [1, bc]
  in ids : i32[N, K] tiles [bn, 1]
  in gates : f32[N, K] tiles [bn, 1]
  out y : {dtype}[N, C] tiles [bn, bc]
  %zero = full shape=bn,bc value=0
  %sum = loop k in 0..K carry %zero
    %ids = load ids[i, k]
    %is = ge %ids 0
    %has = col %is
    %at = max %ids 0
    %x = load x[rows %at, j]
    %wide = cast %x to=f32
    %gate = load gates[i, k]
    %down = col %gate
    %scaled = mul %wide %down
    %part = where %has %scaled 0
    %next = add %zero %part
    next %next
  %y = cast %sum to={dtype}
  store y[i, j] = %y"""


def dispatch(pack: bool = False, dtype: str = "bf16") -> str:
    """The text of the rows of x in the order of `ids`, and 0 where there is none. `pack` makes them
    fp8_e4m3 with a scale for each `block` of channels, as `pack` of nn/experts/packing.py does."""
    n, refs, after = "bc", [f"out y : {dtype}[S, C] tiles [bs, bc]"], ["%y = where %has %x 0"]
    if pack:
        n = "block"
        refs = [
            "out y : f8e4m3[S, C] tiles [bs, block]",
            "out scale : f32[S, C//block] tiles [bs, 1]",
        ]
        after = ["%wide = cast %x to=f32", "%row = where %has %wide 0"]
        after += [*packed("%row", "f8e4m3"), "store scale[i, j] = %scale"]
    return _DISPATCH.format(
        name="dispatch_packed" if pack else "dispatch", dtype=dtype, n=n,
        c=256 if pack else 64, block=" block=128" * pack, bc="" if pack else " bc=32",
        refs="\n".join(f"  {r}" for r in refs), after="\n".join(f"  {a}" for a in after),
    )  # fmt: skip


def unpack(dtype: str = "bf16") -> str:
    """The text of packed rows times their scales."""
    return _UNPACK.format(dtype=dtype)


def combine(dtype: str = "bf16") -> str:
    """The text of each token's sum of its K rows times their gates: in f32, from k = 0 on."""
    return _COMBINE.format(dtype=dtype)
