"""Kernels of Tile IR against XLA's plain form and the form that layers take without them.

Run it: `python bench/kernels.py` prints a line of JSON with a row for each kernel and shape: median
milliseconds of each form, run in turn in one process, and megabytes of its temporaries. A kernel
is timed at several sizes of tiles, of which the fastest counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import numpy as np

import tessera as ts
from tessera import dist, nn, op
from tessera.ir.tile.kernel import with_sizes
from tessera.ir.tile.kernels import ADAMW, AG_MATMUL, combine, dispatch, product
from tessera.ir.tile.text import parse
from tessera.lang.record.kernel_op import kernel_op
from tessera.runtime.arrays import array_shape
from tessera.schedule import compiled_under

ROUNDS = 9
RNG = np.random.default_rng(0)
Forms = dict[str, Callable[..., Any]]
Row = tuple[str, str, list[ts.Tensor], Forms]


def real(*shape: int, dtype: str = "f32", **where: Any) -> ts.Tensor:
    return ts.tensor((RNG.normal(size=shape) / 4).astype(np.float32), **where).to(dtype)


def whole(*shape: int, below: int) -> ts.Tensor:
    return ts.tensor(RNG.integers(0, below, shape).astype(np.int32))


def with_grads(fn: Callable[..., ts.Tensor], count: int) -> Callable[..., Any]:
    def run(*xs: ts.Tensor) -> Any:
        y = fn(*xs)
        return y, *ts.grad(ts.sum(y.to("f32") * ts.cos(y.to("f32"))), list(xs[:count]))

    return run


def of_tiles(text: str, dims: dict[str, int], tiles: list[dict[str, int]], **how: Any) -> Forms:
    """The kernel at several sizes of tiles."""
    made: Forms = {}
    for sizes in tiles:
        k = with_sizes(parse(text), **dims, **sizes)
        name = "kernel " + " ".join(f"{n}={size}" for n, size in sizes.items())
        made[name] = lambda *xs, k=k: tuple(kernel_op(k, *xs, **how))
    return made


# -- the rows -------------------------------------------------------------------------------------
def products() -> Iterator[Row]:
    for dtype, (m, k, n) in (("f32", (2048, 512, 2048)), ("bf16", (2048, 512, 2048))):
        text = product(True, "gelu", dtype, dtype)
        tiles = [{"bm": b, "bn": c, "bk": 512} for b, c in ((256, 256), (512, 512), (2048, 512))]
        forms: Forms = {"XLA": lambda x, w, b: nn.gelu(x @ w + b.to(x.dtype))}
        forms |= of_tiles(text, {"M": m, "K": k, "N": n}, tiles)
        xs = [real(m, k, dtype=dtype), real(k, n, dtype=dtype), real(n)]
        yield "product, bias, gelu", f"{dtype} {m}x{k}x{n}", xs, forms


def attentions() -> Iterator[Row]:
    for dtype, b, h, g, t, d, causal in (
        ("f32", 16, 8, 8, 256, 32, True), ("f32", 1, 8, 8, 2048, 64, True),
        ("f32", 1, 8, 8, 2048, 64, False), ("f32", 4, 8, 2, 1024, 64, True),
        ("bf16", 1, 8, 8, 2048, 64, True),
    ):  # fmt: skip
        xs = [real(b, n, t, d, dtype=dtype) for n in (h, g, g)]
        forms: Forms = {"XLA": with_grads(lambda q, k, v, c=causal: nn.attention(q, k, v, c), 3)}
        for how in ("tiles", "sequences", "kernel"):
            fn = partial(nn.flash_attention, causal=causal, implementation=how)
            if how != "kernel":
                forms[how] = with_grads(fn, 3)
            for sizes in ((64, 256), (128, 128), (256, 256)) if how == "kernel" else ():
                tile = dict(zip(("bq", "bk"), sizes, strict=True))
                made = compiled_under(tile=tile)(with_grads(fn, 3))
                forms[f"kernel bq={sizes[0]} bk={sizes[1]}"] = made
        shape = f"{dtype} B{b} H{h}/{g} T{t} D{d}{' causal' if causal else ''}"
        yield "attention, with gradients", shape, xs, forms


def heads() -> Iterator[Row]:
    for n, c, v in ((2048, 256, 4096), (1024, 512, 16384)):
        xs = [real(n, c), real(c, v), whole(n, below=v)]
        forms: Forms = {"XLA": with_grads(lambda x, w, y: nn.cross_entropy(x @ w, y), 2)}
        forms["blocks"] = with_grads(nn.linear_cross_entropy, 2)
        for bn, bv in ((128, 512), (512, 512), (128, 2048)):
            by = compiled_under(choices={"head_loss": "kernel"}, tile={"bn": bn, "bv": bv})
            forms[f"kernel bn={bn} bv={bv}"] = by(with_grads(nn.linear_cross_entropy, 2))
        yield "head with loss, with gradients", f"f32 N{n} C{c} V{v}", xs, forms


def updates() -> Iterator[Row]:
    n = 1 << 22
    h = ts.tensor(np.array([1e-3, 0.9, 0.999, 1e-8, 0.1, 1.1, 1.01], np.float32))
    xs = [h, real(n), real(n), ts.abs(real(n)), real(n)]

    def adamw(h: Any, p: Any, m: Any, v: Any, g: Any) -> Any:
        m, v = m * h[1] + g * (1.0 - h[1]), v * h[2] + g * g * (1.0 - h[2])
        step = m * h[5] / (ts.sqrt(v * h[6]) + h[3]) + p * h[4]
        return p - step * h[0], m, v

    tiles = [{"bn": k} for k in (1 << 16, 1 << 19, 1 << 22)]
    yield "AdamW", f"f32 N{n}", xs, {"XLA": adamw, **of_tiles(ADAMW, {"N": n}, tiles)}


def experts() -> Iterator[Row]:
    forms: Forms
    n, c, k = 4096, 1024, 2
    x, ids, at, gates = real(n, c), whole(n * k, below=n), whole(n, k, below=n * k), real(n, k)
    dims = {"N": n, "C": c, "S": n * k}
    tiles = [{"bs": 512, "bc": c}, {"bs": n * k, "bc": c}]
    forms = {"XLA": lambda x, i: x[i], **of_tiles(dispatch(dtype="f32"), dims, tiles)}
    yield "dispatch", f"f32 {n} to {n * k} of {c}", [x, ids], forms

    def back(y: Any, at: Any, gates: Any) -> Any:
        return sum(y[at[:, j]] * gates[:, j : j + 1] for j in range(k))

    tiles = [{"bn": 512, "bc": c}, {"bn": n, "bc": c}]
    forms = {"XLA": back, **of_tiles(combine("f32"), {**dims, "K": k}, tiles)}
    yield "combine", f"f32 {n * k} to {n} of {c}", [real(n * k, c), at, gates], forms


def redistributed(layout: str, x: ts.Tensor) -> ts.Tensor:
    return dist.redistribute(x, layout)


def puts() -> Iterator[Row]:
    mesh = dist.Mesh(("x",), shape={"x": 8})
    x = real(4096, 512, mesh=mesh, layout="[4096@x, 512]")
    for name, layout in (("all_to_all", "[4096, 512@x]"), ("all_gather", "[4096, 512]")):
        move = partial(redistributed, layout)
        forms: Forms = {"XLA": move, "kernel": compiled_under(comm_backend="nvshmem")(move)}
        yield f"{name} by puts, 8 devices", "f32 4096x512", [x], forms
    a, w = real(1024, 512, mesh=mesh, layout="[1024@x, 512]"), real(512, 512)
    k = with_sizes(parse(AG_MATMUL), M=128, K=512, N=512, bn=512)
    fused = op.kernel(lambda a, w: kernel_op(k, a, w, axes=("x",))[0])
    gather = op.kernel(lambda a, w: dist.all_gather(a, "x", 0) @ w)
    forms = {"XLA": gather, "kernel": fused}
    yield "gather and product, 8 devices", "f32 1024x512x512", [a, w], forms
    mesh = dist.Mesh(("cp",), shape={"cp": 4})
    xs = [real(1, 8, 2048, 64, mesh=mesh, layout="[1, 8, 2048@cp, 64]") for _ in range(3)]
    ring = partial(nn.ring_attention, axis="cp", causal=True)
    forms = {"permutes": ring, "kernel": compiled_under(comm_backend="nvshmem")(ring)}
    yield "ring attention, 4 devices", "f32 H8 T2048 D64 causal", xs, forms


# -- measuring ------------------------------------------------------------------------------------
def flat(made: Any) -> list[ts.Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


def temporary_mb(run: Any, xs: list[ts.Tensor]) -> float:
    program = run.programs[0]
    given = [jax.ShapeDtypeStruct(array_shape(t), t.dtype.numpy) for t in program.wants]
    found = program.run.lower(*given).compile().memory_analysis()
    return float(found.temp_size_in_bytes / 1e6)


def measured(row: Row) -> dict[str, Any]:
    name, shape, xs, forms = row
    runs = {form: fn if hasattr(fn, "programs") else ts.jit(fn) for form, fn in forms.items()}
    times: dict[str, list[float]] = {form: [] for form in runs}
    for turn in range(ROUNDS + 1):
        for form, run in runs.items():
            begin_s = time.perf_counter()
            jax.block_until_ready([t.stored for t in flat(run(*xs))])
            if turn:
                times[form].append(time.perf_counter() - begin_s)
    ms = {form: round(1e3 * statistics.median(t), 2) for form, t in times.items()}
    best = min((f for f in ms if f.startswith("kernel")), key=ms.__getitem__)
    kept = {f: ms[f] for f in ms if not f.startswith("kernel")} | {best: ms[best]}
    mb = {form: round(temporary_mb(runs[form], xs), 1) for form in kept}
    return {"kernel": name, "shape": shape, "ms": kept, "temporary_mb": mb}


def main() -> None:
    chosen, every = sys.argv[1:], (products, attentions, heads, updates, experts, puts)
    asked = [f for f in every if not chosen or f.__name__ in chosen]
    print(json.dumps([measured(row) for rows in asked for row in rows()]))


if __name__ == "__main__":
    main()
