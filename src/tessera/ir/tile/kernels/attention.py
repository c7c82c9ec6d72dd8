"""Attention that never stores all scores, and its gradients.

H heads of keys and values, G heads of queries for each. With `causal` the last query sees all S
keys, and each query before it one key less. With `segments` a query sees the keys of its own
segment. Numbers of queries or keys that tiles do not divide are padded in front, by a segment of
their own. A query that sees no key gets 0, and LOWEST as its logsumexp.
"""

from __future__ import annotations

from textwrap import indent

LOWEST = "-1e+30"

_HEAD = """\
kernel {name}  v1
  dims B=1 H=2 G=2 T=64 S=64 D=16
  tune bq=16 bk=16
  speed warps=4 stages=2
  grid {grid}
  in q : {dtype}[B, H, G, T, D] tiles [1, 1, 1, bq, D]
  in k : {dtype}[B, H, S, D] tiles [1, 1, bk, D]
  in v : {dtype}[B, H, S, D] tiles [1, 1, bk, D]
"""
_SEGMENTS = """\
  in qseg : i32[B, T] tiles [1, bq]
  in kseg : i32[B, S] tiles [1, bk]
"""
_GRADS = """\
  in go : {dtype}[B, H, G, T, D] tiles [1, 1, 1, bq, D]
  in lse : f32[B, H, G, T] tiles [1, 1, 1, bq]
  in delta : f32[B, H, G, T] tiles [1, 1, 1, bq]
"""
_SCALE = """\
  in scale : f32[1] tiles [1]
"""

# From the scores of one tile, the next maximum, sum and output (Dao et al. 2022).
SOFTMAX = """\
%top = max %s dim=1
%new = max %m %top
%at = col %new
%d = sub %s %at
%p = exp %d
%dm = sub %m %new
%fade = exp %dm
%ps = sum %p dim=1
%lf = mul %l %fade
%ln = add %lf %ps
%pc = cast %p to={dtype}
%pv = dot %pc %v
%fc = col %fade
%af = mul %acc %fc
%an = add %af %pv
next %new %ln %an
"""
START = f"""\
%m = full shape=bq value={LOWEST}
%l = full shape=bq value=0
%acc = full shape=bq,D value=0
"""
END = """\
%safe = max %sum 1e-30
%sc = col %safe
%y = div %out %sc
%log = log %safe
%lse = add %last %log
"""

_FORWARD = """\
  out o : {dtype}[B, H, G, T, D] tiles [1, 1, 1, bq, D]
  out lse : f32[B, H, G, T] tiles [1, 1, 1, bq]
  %q = load q[b, h, g, i, 0]
  %scale = load scale[0]
{start}\
  %last %sum %out = loop j in 0..{keys} carry %m %l %acc
    %k = load k[b, h, j, 0]
    %v = load v[b, h, j, 0]
{scores}\
{softmax}\
{end}\
  %o = cast %y to={dtype}
  store o[b, h, g, i, 0] = %o
  store lse[b, h, g, i] = %lse"""

# The gradient of the scores from a tile of them.
_SLOPES = """\
%d = sub %s %lse
%p = exp %d
%dp = dot %go %v transpose=b
%above = sub %dp %delta
%ds0 = mul %p %above
%ds = cast %ds0 to={dtype}
"""
_LOAD_QUERIES = """\
%q = load q[b, h, g, i, 0]
%go = load go[b, h, g, i, 0]
%lse0 = load lse[b, h, g, i]
%lse = col %lse0
%delta0 = load delta[b, h, g, i]
%delta = col %delta0
"""
_DQ = """\
  out dq : {dtype}[B, H, G, T, D] tiles [1, 1, 1, bq, D]
  %scale = load scale[0]
{queries}\
  %acc = full shape=bq,D value=0
  %sum = loop j in 0..{keys} carry %acc
    %k = load k[b, h, j, 0]
    %v = load v[b, h, j, 0]
{scores}\
{slopes}\
    %part = dot %ds %k
    %next = add %acc %part
    next %next
  %scaled_sum = mul %sum %scale
  %dq = cast %scaled_sum to={dtype}
  store dq[b, h, g, i, 0] = %dq"""
_DKV = """\
  out dk : {dtype}[B, H, S, D] tiles [1, 1, bk, D]
  out dv : {dtype}[B, H, S, D] tiles [1, 1, bk, D]
  %scale = load scale[0]
  %k = load k[b, h, j, 0]
  %v = load v[b, h, j, 0]
  %sk = full shape=bk,D value=0
  %sv = full shape=bk,D value=0
  %dk_all %dv_all = loop g in 0..G carry %sk %sv
    %dk_one %dv_one = loop i in {first}..T//bq carry %sk %sv
{queries}\
{scores}\
{slopes}\
      %pc = cast %p to={dtype}
      %pv = dot %pc %go transpose=a
      %nv = add %sv %pv
      %pk = dot %ds %q transpose=a
      %nk = add %sk %pk
      next %nk %nv
    next %dk_one %dv_one
  %dk_scaled = mul %dk_all %scale
  %dk = cast %dk_scaled to={dtype}
  store dk[b, h, j, 0] = %dk
  %dv = cast %dv_all to={dtype}
  store dv[b, h, j, 0] = %dv"""
# All gradients with the scores computed once. Each step of the grid has all of a sequence, so this
# is for devices that run steps one after the other.
_ALL = """\
  out dq : f32[B, H, G, T, D] tiles [1, 1, 1, bq, D]
  out dk : {dtype}[B, H, S, D] tiles [1, 1, bk, D]
  out dv : {dtype}[B, H, S, D] tiles [1, 1, bk, D]
  %scale = load scale[0]
  %none = full shape=bq,D value=0
  loop g in 0..G
    loop i in 0..T//bq
      store dq[b, h, g, i, 0] = %none
  loop j in 0..S//bk
    %k = load k[b, h, j, 0]
    %v = load v[b, h, j, 0]
    %sk = full shape=bk,D value=0
    %sv = full shape=bk,D value=0
    %dk_all %dv_all = loop g in 0..G carry %sk %sv
      %dk_one %dv_one = loop i in {first}..T//bq carry %sk %sv
{queries}\
{scores}\
{slopes}\
        %pc = cast %p to={dtype}
        %pv = dot %pc %go transpose=a
        %nv = add %sv %pv
        %pk = dot %ds %q transpose=a
        %nk = add %sk %pk
        %pq = dot %ds %k
        %pq_scaled = mul %pq %scale
        %dq0 = load dq[b, h, g, i, 0]
        %dq = add %dq0 %pq_scaled
        store dq[b, h, g, i, 0] = %dq
        next %nk %nv
      next %dk_one %dv_one
    %dk_scaled = mul %dk_all %scale
    %dk = cast %dk_scaled to={dtype}
    store dk[b, h, j, 0] = %dk
    %dv = cast %dv_all to={dtype}
    store dv[b, h, j, 0] = %dv"""


def flash(causal: bool = False, segments: bool = False, dtype: str = "f32") -> str:
    """The text of attention: o, and the logsumexp of each query's scores."""
    return _text("flash", _FORWARD, "", "h=H g=G i=T//bq", causal, segments, dtype, 4)


def flash_dq(causal: bool = False, segments: bool = False, dtype: str = "f32") -> str:
    """The text of the gradient by queries, from that of o, `go`, and `delta` = sum(go * o)."""
    return _text("flash_dq", _DQ, _GRADS, "h=H g=G i=T//bq", causal, segments, dtype, 4)


def flash_dkv(causal: bool = False, segments: bool = False, dtype: str = "f32") -> str:
    """The text of the gradients by keys and values."""
    return _text("flash_dkv", _DKV, _GRADS, "h=H j=S//bk", causal, segments, dtype, 6)


def flash_grads(causal: bool = False, segments: bool = False, dtype: str = "f32") -> str:
    """The text of all gradients, that by queries in f32, with the scores computed once."""
    return _text("flash_grads", _ALL, _GRADS, "h=H", causal, segments, dtype, 8)


def _text(
    name: str, body: str, grads: str, grid: str, causal: bool, segments: bool, dtype: str, deep: int
) -> str:
    name = "_".join([name, *["causal"] * causal, *["segments"] * segments])
    text = _HEAD + _SEGMENTS * segments + grads + _SCALE + body
    pad, deeper = "  ", " " * deep
    return text.format(
        name=name,
        dtype=dtype,
        grid=f"b=B {grid}",
        keys="((i+1)*bq+S-T+bk-1)//bk" if causal else "S//bk",
        first="max(0,(j*bk+T-S)//bq)" if causal else "0",
        start=indent(START, pad),
        end=indent(END, pad),
        queries=indent(_LOAD_QUERIES, deeper if "loop i" in body else pad),
        scores=indent(scores("i*bq+S-T" if causal else "", "j*bk", segments), deeper),
        softmax=indent(SOFTMAX.format(dtype=dtype), deeper),
        slopes=indent(_SLOPES.format(dtype=dtype), deeper),
    )


def scores(row: str, col: str, segments: bool = False) -> str:
    """The lines that make the scores `%s` of `%q` and `%k`. If the positions `row` and `col` of
    their first rows are given, keys at later positions are hidden."""
    lines, sees = ["%qk = dot %q %k transpose=b"], ""
    if row:
        lines += [
            f"%row = iota shape=bq,1 dim=0 start={row}",
            f"%col = iota shape=1,bk dim=1 start={col}",
            "%before = ge %row %col",
        ]
        sees = "%before"
    if segments:
        lines += [
            "%qseg = load qseg[b, i]",
            "%kseg = load kseg[b, j]",
            "%qs = col %qseg",
            "%ks = row %kseg",
            "%same = eq %qs %ks",
        ]
        sees = "%same"
    if row and segments:
        lines.append("%both = and %before %same")
        sees = "%both"
    if sees:
        lines += ["%all = mul %qk %scale", f"%s = where {sees} %all -inf"]
    else:
        lines.append("%s = mul %qk %scale")
    return "\n".join(lines) + "\n"
