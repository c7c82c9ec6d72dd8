"""Workarounds of the engine on CPUs. JAX 0.10 and 0.11, which are supported, need all of them.

`malloc` keeps freed memory, `throttle` bounds the programs in flight, `narrow_floats` moves bf16
and fp8 as bits, `erf` replaces calls of the C library, `pooling_windows`, `products` and
`convolutions` are forms that the CPU's libraries compute fast. A file goes when a release of the
engine is as fast without it (`bench/RESULTS.md`).
"""
