"""A head's product with the loss of each row: logits exist a tile at a time.

Rows of the label `ignore` have no loss and no gradient. Columns of w from `classes` on are padding.
"""

from __future__ import annotations

from textwrap import indent

_HEAD = """\
kernel {name}  v1
  dims N=64 C=32 V=96 classes=96
  tune bn=16 bc=16 bv=32
  speed warps=4 stages=2
  grid {grid}
  in x : {dtype}[N, C] tiles [bn, bc]
  in w : {dtype}[C, V] tiles [bc, bv]
  in label : i32[N] tiles [bn]
"""
_GRADS = """\
  in lse : f32[N] tiles [bn]
  in g : f32[N] tiles [bn]
"""
_LOGITS = """\
%none = full shape=bn,bv value=0
%all = loop c in 0..C//bc carry %none
  %x = load x[i, c]
  %w = load w[c, j]
  %part = dot %x %w
  %more = add %none %part
  next %more
%id = iota shape=1,bv dim=1 start=j*bv
%after = iota shape=1,bv dim=1 start=j*bv-classes
%real = lt %after 0
%s = where %real %all -inf
%is = eq %id %want
"""
_LABELS = """\
%label = load label[i]
%want = col %label
%counts = ne %label {ignore}
"""
_FORWARD = """\
  out loss : f32[N] tiles [bn]
  out lse : f32[N] tiles [bn]
{labels}\
  %m = full shape=bn value=-1e+30
  %l = full shape=bn value=0
  %t = full shape=bn value=0
  %top %sum %hit = loop j in 0..V//bv carry %m %l %t
{logits}\
    %most = max %s dim=1
    %new = max %m %most
    %at = col %new
    %d = sub %s %at
    %p = exp %d
    %dm = sub %m %new
    %fade = exp %dm
    %ps = sum %p dim=1
    %lf = mul %l %fade
    %ln = add %lf %ps
    %own = where %is %s 0
    %os = sum %own dim=1
    %tn = add %t %os
    next %new %ln %tn
  %log = log %sum
  %lse = add %top %log
  store lse[i] = %lse
  %each = sub %lse %hit
  %loss = where %counts %each 0
  store loss[i] = %loss"""

# The gradient of a tile of logits.
_SLOPES = """\
%d = sub %s %lse
%p = exp %d
%less = sub %p 1
%above = where %is %less %p
%ds0 = mul %above %g
%ds = cast %ds0 to={dtype}
"""
_ROWS = """\
{labels}\
%lse0 = load lse[i]
%lse = col %lse0
%g0 = load g[i]
%g1 = where %counts %g0 0
%g = col %g1
"""
_DX = """\
  out dx : f32[N, C] tiles [bn, bc]
{rows}\
  %zero = full shape=bn,bc value=0
  loop c in 0..C//bc
    store dx[i, c] = %zero
  loop j in 0..V//bv
{logits}\
{slopes}\
    loop c in 0..C//bc
      %wc = load w[c, j]
      %px = dot %ds %wc transpose=b
      %sx = load dx[i, c]
      %nx = add %sx %px
      store dx[i, c] = %nx"""
_DW = """\
  out dw : f32[C, V] tiles [bc, bv]
  %zero = full shape=bc,bv value=0
  loop c in 0..C//bc
    store dw[c, j] = %zero
  loop i in 0..N//bn
{rows}\
{logits}\
{slopes}\
    loop c in 0..C//bc
      %xc = load x[i, c]
      %pw = dot %xc %ds transpose=a
      %sw = load dw[c, j]
      %nw = add %sw %pw
      store dw[c, j] = %nw"""


def cross_entropy(ignore: int = -100, dtype: str = "f32") -> str:
    """The text of the loss of each row, and the logsumexp of its logits x @ w."""
    return _text("cross_entropy", _FORWARD, "i=N//bn", ignore, dtype)


def cross_entropy_dx(ignore: int = -100, dtype: str = "f32") -> str:
    """The text of the gradient by x in f32, from the gradient `g` of each row's loss."""
    return _text("cross_entropy_dx", _GRADS + _DX, "i=N//bn", ignore, dtype)


def cross_entropy_dw(ignore: int = -100, dtype: str = "f32") -> str:
    """The text of the gradient by w in f32."""
    return _text("cross_entropy_dw", _GRADS + _DW, "j=V//bv", ignore, dtype)


def _text(name: str, body: str, grid: str, ignore: int, dtype: str) -> str:
    labels = _LABELS.format(ignore=ignore)
    rows = indent(_ROWS.format(labels=labels), "    " if grid.startswith("j") else "  ")
    return (_HEAD + body).format(
        name=name, grid=grid, dtype=dtype, labels=indent(labels, "  "), rows=rows,
        logits=indent(_LOGITS, "    "), slopes=indent(_SLOPES.format(dtype=dtype), "    "),
    )  # fmt: skip
