"""Attention over a ring of devices, in one kernel (Liu et al. 2023).

Each device has C blocks of R queries, keys and values. With `causal` C is 2 and the order is
zig-zag: of 2 x blocks in order, device r has blocks r and 2 x - 1 - r. Blocks of keys and values go
on to the next device while they are used. There are two buffers of them, so the next device first
tells that it has read what will be overwritten: `free`.
"""

from __future__ import annotations

from textwrap import indent

from .attention import END, SOFTMAX, START, scores

_RING = """\
kernel {name}  v1  mesh x=4
  dims B=1 H=2 G=2 C=2 R=16 D=8
  tune bq=8 bk=8
  speed warps=4
  in q : {dtype}[B, H, G, C, R, D] tiles [1, 1, 1, 1, bq, D]
  in k : {dtype}[B, H, C, R, D] tiles [1, 1, 1, bk, D]
  in v : {dtype}[B, H, C, R, D] tiles [1, 1, 1, bk, D]
  in scale : f32[1] tiles [1]
  out o : f32[B, H, G, C, R, D] tiles [1, 1, 1, 1, bq, D]
  out lse : f32[B, H, G, C, R] tiles [1, 1, 1, 1, bq]
  sym ks : {dtype}[2, B, H, C, R, D] tiles [1, 1, 1, 1, bk, D]
  sym vs : {dtype}[2, B, H, C, R, D] tiles [1, 1, 1, 1, bk, D]
  sym read : f32[x] tiles [1]
  sig gotk [x, B, H, C, R//bk]
  sig gotv [x, B, H, C, R//bk]
  sig free [x]
  enter x
  %scale = load scale[0]
  loop b in 0..B
    loop h in 0..H
      loop c in 0..C
        loop j in 0..R//bk
          %k0 = load k[b, h, c, j, 0]
          store ks[0, b, h, c, j, 0] = %k0
          %v0 = load v[b, h, c, j, 0]
          store vs[0, b, h, c, j, 0] = %v0
  loop s in 0..x
    when s > 0 and s < x-1: wait free[s-1]
    loop b in 0..B
      loop h in 0..H
        loop c in 0..C
          loop j in 0..R//bk
            when s > 0:
              wait gotk[s, b, h, c, j]
              wait gotv[s, b, h, c, j]
            when s < x-1:
              put {ks} -> {kt} at (rank_x+1)%x sig gotk[s+1, b, h, c, j]
              put {vs} -> {vt} at (rank_x+1)%x sig gotv[s+1, b, h, c, j]
        loop g in 0..G
          loop e in 0..C
            loop i in 0..R//bq
              %q = load q[b, h, g, e, i, 0]
{start}\
              %last %sum %out = loop c in 0..C carry %m %l %acc
                %last1 %sum1 %out1 = loop j in 0..{keys} carry %m %l %acc
                  %k = load ks[s%2, b, h, c, j, 0]
                  %v = load vs[s%2, b, h, c, j, 0]
{scores}\
{softmax}\
                next %last1 %sum1 %out1
{end}\
              when s == 0:
                store o[b, h, g, e, i, 0] = %y
                store lse[b, h, g, e, i] = %lse
              when s > 0:
                %y0 = load o[b, h, g, e, i, 0]
                %lse0 = load lse[b, h, g, e, i]
                %high = max %lse0 %lse
                %d0 = sub %lse0 %high
                %e0 = exp %d0
                %d1 = sub %lse %high
                %e1 = exp %d1
                %both = add %e0 %e1
                %more = log %both
                %lse2 = add %high %more
                store lse[b, h, g, e, i] = %lse2
                %w0 = div %e0 %both
                %c0 = col %w0
                %w1 = div %e1 %both
                %c1 = col %w1
                %p0 = mul %y0 %c0
                %p1 = mul %y %c1
                %y2 = add %p0 %p1
                store o[b, h, g, e, i, 0] = %y2
    when s < x-2:
      quiet
      put scale[0] -> read[s] at (rank_x-1+x)%x sig free[s]
  quiet"""


def ring_attention(causal: bool = False, dtype: str = "f32") -> str:
    """The text of attention over all devices: o, and the logsumexp of each query's scores."""
    device = "(rank_x-s+x)%x"  # the one whose keys are here in turn s
    row = "(rank_x+e*(2*x-1-2*rank_x))*R+i*bq"
    first = f"({device}+c*(2*x-1-2*({device})))*R"
    at = "b, h, c, j, 0]"
    return _RING.format(
        name="ring_attention_causal" if causal else "ring_attention",
        dtype=dtype,
        ks=f"ks[s%2, {at}", kt=f"ks[(s+1)%2, {at}", vs=f"vs[s%2, {at}", vt=f"vs[(s+1)%2, {at}",
        keys=f"min(R//bk,({row}+bq-{first}+bk-1)//bk)" if causal else "R//bk",
        start=indent(START, " " * 14),
        scores=indent(scores(row if causal else "", f"{first}+j*bk"), " " * 18),
        softmax=indent(SOFTMAX.format(dtype=dtype), " " * 18),
        end=indent(END, " " * 14),
    )  # fmt: skip
