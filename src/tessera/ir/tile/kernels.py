"""Kernels as text, at small sizes; `with_sizes` gives them others.

>>> from tessera.ir.tile.text import parse
>>> parse(MLP_UP).name, sorted(TEXTS)[:2]
('mlp_up', ['adamw', 'ag_matmul'])
"""

from __future__ import annotations

MLP_UP = """\
kernel mlp_up  v1
  dims M=256 K=256 N=256
  tune bm=64 bn=64 bk=64
  speed warps=4 stages=3
  grid i=M//bm j=N//bn
  in x : bf16[M, K] tiles [bm, bk]
  in w : bf16[K, N] tiles [bk, bn]
  in b : f32[N] tiles [bn]
  out y : bf16[M, N] tiles [bm, bn]
  %0 = full shape=bm,bn value=0
  %1 = loop k in 0..K//bk carry %0
    %2 = load x[i, k]
    %3 = load w[k, j]
    %4 = dot %2 %3
    %5 = add %0 %4
    next %5
  %6 = load b[j]
  %7 = row %6
  %8 = add %1 %7
  %9 = gelu %8
  %10 = cast %9 to=bf16
  store y[i, j] = %10"""

# H heads of keys and values, G heads of queries for each. `lse` is what the backward pass needs.
FLASH = """\
kernel flash  v1
  dims B=1 H=2 G=2 T=64 D=16
  tune bq=16 bk=16
  speed warps=4 stages=2
  grid b=B h=H*G i=T//bq
  in q : f32[B, H*G, T, D] tiles [1, 1, bq, D]
  in k : f32[B, H, T, D] tiles [1, 1, bk, D]
  in v : f32[B, H, T, D] tiles [1, 1, bk, D]
  in scale : f32[1] tiles [1]
  out o : f32[B, H*G, T, D] tiles [1, 1, bq, D]
  out lse : f32[B, H*G, T] tiles [1, 1, bq]
  %q0 = load q[b, h, i, 0]
  %scale = load scale[0]
  %q = mul %q0 %scale
  %m = full shape=bq value=-inf
  %l = full shape=bq value=0
  %acc = full shape=bq,D value=0
  %last %sum %out = loop j in 0..T//bk carry %m %l %acc
    %k = load k[b, h//G, j, 0]
    %s = dot %q %k transpose=b
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
    %v = load v[b, h//G, j, 0]
    %pv = dot %p %v
    %fc = col %fade
    %af = mul %acc %fc
    %an = add %af %pv
    next %new %ln %an
  %sc = col %sum
  %y = div %out %sc
  store o[b, h, i, 0] = %y
  %log = log %sum
  %lse = add %last %log
  store lse[b, h, i] = %lse"""

# A query sees the keys up to its own position: the loop ends there, and the last tiles are masked.
FLASH_CAUSAL = (
    FLASH.replace("kernel flash", "kernel flash_causal")
    .replace("in 0..T//bk", "in 0..((i+1)*bq+bk-1)//bk")
    .replace(
        "    %s = dot %q %k transpose=b\n",
        "    %qk = dot %q %k transpose=b\n"
        "    %row = iota shape=bq,bk dim=0 start=i*bq\n"
        "    %col = iota shape=bq,bk dim=1 start=j*bk\n"
        "    %sees = ge %row %col\n"
        "    %s = where %sees %qk -inf\n",
    )
)

# `h` holds: rate, beta1, beta2, epsilon, decay, 1 / (1 - beta1^t), 1 / (1 - beta2^t).
ADAMW = """\
kernel adamw  v1
  dims N=4096
  tune bn=1024
  speed warps=4
  grid i=N//bn
  in h : f32[7] tiles [1]
  in p : f32[N] tiles [bn]
  in m : f32[N] tiles [bn]
  in v : f32[N] tiles [bn]
  in g : f32[N] tiles [bn]
  out p2 : f32[N] tiles [bn]
  out m2 : f32[N] tiles [bn]
  out v2 : f32[N] tiles [bn]
  %rate = load h[0]
  %b1 = load h[1]
  %b2 = load h[2]
  %eps = load h[3]
  %decay = load h[4]
  %c1 = load h[5]
  %c2 = load h[6]
  %p = load p[i]
  %g = load g[i]
  %m = load m[i]
  %v = load v[i]
  %a1 = sub 1 %b1
  %m0 = mul %m %b1
  %m1 = mul %g %a1
  %mn = add %m0 %m1
  store m2[i] = %mn
  %a2 = sub 1 %b2
  %gg = mul %g %g
  %v0 = mul %v %b2
  %v1 = mul %gg %a2
  %vn = add %v0 %v1
  store v2[i] = %vn
  %mh = mul %mn %c1
  %vh = mul %vn %c2
  %root = sqrt %vh
  %below = add %root %eps
  %step = div %mh %below
  %wd = mul %p %decay
  %move = add %step %wd
  %scaled = mul %move %rate
  %pn = sub %p %scaled
  store p2[i] = %pn"""

# The head's product and the loss of each row together: logits exist a tile at a time.
CROSS_ENTROPY = """\
kernel cross_entropy  v1
  dims N=64 C=32 V=96
  tune bn=16 bv=32
  speed warps=4 stages=2
  grid i=N//bn
  in x : f32[N, C] tiles [bn, C]
  in w : f32[C, V] tiles [C, bv]
  in label : i32[N] tiles [bn]
  out loss : f32[N] tiles [bn]
  out lse : f32[N] tiles [bn]
  %x = load x[i, 0]
  %label = load label[i]
  %want = col %label
  %m = full shape=bn value=-inf
  %l = full shape=bn value=0
  %t = full shape=bn value=0
  %top %sum %hit = loop j in 0..V//bv carry %m %l %t
    %w = load w[0, j]
    %s = dot %x %w
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
    %id = iota shape=bn,bv dim=1 start=j*bv
    %is = eq %id %want
    %own = where %is %s 0
    %os = sum %own dim=1
    %tn = add %t %os
    next %new %ln %tn
  %log = log %sum
  %lse = add %top %log
  store lse[i] = %lse
  %loss = sub %lse %hit
  store loss[i] = %loss"""

# Rows of tokens in the order of their experts. `ids` come from prefix sums of the counts.
DISPATCH = """\
kernel dispatch  v1
  dims N=64 C=64 S=96
  tune bs=16 bc=32
  speed warps=4
  grid i=S//bs j=C//bc
  in x : bf16[N, C] tiles [1, bc]
  in ids : i32[S] tiles [bs]
  out y : bf16[S, C] tiles [bs, bc]
  %ids = load ids[i]
  %x = load x[rows %ids, j]
  store y[i, j] = %x"""

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

TEXTS = {
    "mlp_up": MLP_UP,
    "flash": FLASH,
    "flash_causal": FLASH_CAUSAL,
    "adamw": ADAMW,
    "cross_entropy": CROSS_ENTROPY,
    "dispatch": DISPATCH,
    "ag_matmul": AG_MATMUL,
    "matmul_rs": MATMUL_RS,
}
