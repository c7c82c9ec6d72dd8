"""Updates of parameters in flat buffers."""

from __future__ import annotations

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
