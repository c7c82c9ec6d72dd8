"""Collectives as puts of tiles, and products with them.

Each device puts to each other one, beginning with the next: one slot for each put. A sum begins
with the own block, then come those of the devices before it, so bits do not depend on what arrives
first. An epoch is one run. A "soft" one ends with the slots of its own puts; a "hard" one ends with
a barrier of all devices.
"""

from __future__ import annotations

_HEAD = """\
kernel {name}  v1  mesh x=4
  dims M=32 K=16
  tune bm=16
  in a : {dtype}[{blocks}M, K] tiles [{one}bm, K]
  out y : {dtype}[{out}] tiles [{tile}]
  sym box : {dtype}[x, M, K] tiles [1, bm, K]
  sig got [x, M//bm]
  enter x
"""
_GATHER = """\
  loop s in 1..x
    loop i in 0..M//bm
      put a[i, 0] -> box[rank_x, i, 0] at (rank_x+s)%x sig got[rank_x, i]
  loop i in 0..M//bm
    %own = load a[i, 0]
    store y[rank_x, i, 0] = %own
  loop s in 1..x
    loop i in 0..M//bm
      wait got[(rank_x+s)%x, i]
      %came = load box[(rank_x+s)%x, i, 0]
      store y[(rank_x+s)%x, i, 0] = %came
  quiet"""
_SCATTER = """\
  loop s in 1..x
    loop i in 0..M//bm
      put a[(rank_x+s)%x, i, 0] -> box[rank_x, i, 0] at (rank_x+s)%x sig got[rank_x, i]
  loop i in 0..M//bm
    %own = load a[rank_x, i, 0]
    %first = cast %own to=f32
    %sum = loop s in 1..x carry %first
      wait got[(rank_x-s+x)%x, i]
      %part = load box[(rank_x-s+x)%x, i, 0]
      %wide = cast %part to=f32
      %next = add %first %wide
      next %next
    %y = cast %sum to={dtype}
    store y[i, 0] = %y
  quiet"""


_END = {"soft": "", "hard": "\n  enter x"}


def all_gather(dtype: str = "f32", epoch: str = "soft") -> str:
    """The text that gives each device the blocks of all, in order."""
    form = _HEAD + _GATHER + _END[epoch]
    return form.format(
        name="all_gather", dtype=dtype, blocks="", one="", out="x, M, K", tile="1, bm, K"
    )


def exchange(dtype: str = "f32", epoch: str = "soft") -> str:
    """The text of an all-to-all: block t of device s becomes block s of device t."""
    body = _GATHER.replace("a[i,", "a[(rank_x+s)%x, i,", 1).replace("load a[i", "load a[rank_x, i")
    return (_HEAD + body + _END[epoch]).format(
        name="exchange", dtype=dtype, blocks="x, ", one="1, ", out="x, M, K", tile="1, bm, K"
    )


def reduce_scatter(dtype: str = "f32", epoch: str = "soft") -> str:
    """The text that sums the blocks t of all devices, in f32, on device t."""
    return (_HEAD + _SCATTER + _END[epoch]).format(
        name="reduce_scatter", dtype=dtype, blocks="x, ", one="1, ", out="M, K", tile="bm, K"
    )


# A ring: the block that came in the last turn goes on while it is multiplied.
AG_MATMUL = """\
kernel ag_matmul  v1  mesh x=8
  dims M=16 K=32 N=24
  tune bn=12
  in a : f32[M, K] tiles [M, K]
  in w : f32[K, N] tiles [K, bn]
  out y : f32[x*M, N] tiles [M, bn]
  sym buf : f32[x, M, K] tiles [1, M, K]
  sig got [x]
  enter x
  %0 = load a[0, 0]
  store buf[0, 0, 0] = %0
  loop s in 0..x
    when s > 0: wait got[s]
    when s < x-1: put buf[s, 0, 0] -> buf[s+1, 0, 0] at (rank_x+1)%x sig got[s+1]
    %1 = load buf[s, 0, 0]
    loop j in 0..N//bn
      %2 = load w[0, j]
      %3 = dot %1 %2
      store y[(rank_x-s+x)%x, j] = %3
  quiet"""

# A ring: each turn adds the own product to the sum that came, and the sum goes on.
MATMUL_RS = """\
kernel matmul_rs  v1  mesh x=8
  dims M=4 K=16 N=24
  in a : f32[x*M, K] tiles [M, K]
  in w : f32[K, N] tiles [K, N]
  out y : f32[M, N] tiles [M, N]
  sym came : f32[x, M, N] tiles [1, M, N]
  sym goes : f32[x, M, N] tiles [1, M, N]
  sig got [x]
  enter x
  %w = load w[0, 0]
  loop s in 0..x
    %a = load a[(rank_x-s-1+x)%x, 0]
    %own = dot %a %w
    when s == 0: store goes[0, 0, 0] = %own
    when s > 0:
      wait got[s]
      %came = load came[s, 0, 0]
      %sum = add %came %own
      store goes[s, 0, 0] = %sum
    when s < x-1: put goes[s, 0, 0] -> came[s+1, 0, 0] at (rank_x+1)%x sig got[s+1]
  %all = load goes[x-1, 0, 0]
  store y[0, 0] = %all
  quiet"""
