"""Sections about the surroundings of a training step: calls, starts, loaders, experts, saves."""

from __future__ import annotations

import math

from page import prose, table
from scripts import against, measure, within


def dispatch(_: int) -> list[str]:
    found = measure("dispatch.py")
    few = max(r["more_us"] for r in found if r["leaves"] == 74)
    many = max(r["more_by_minima_percent"] for r in found if r["leaves"] == 900)
    return [
        *prose(
            f"""A compiled function that adds one to each of its leaves, against `jax.jit` of the
            same, which is ahead. At 74 leaves {few:.1f} µs more at most ({within(few, 60, " µs")});
            at 900 leaves {many:+.1f} % ({within(many, 5, " %")})."""
        ),
        *table(
            ("leaves", "devices", "ours µs", "jax.jit µs", "more, µs", "by minima"),
            [
                (r["leaves"], r["devices"], r["ours_us"], r["jax_us"], r["more_us"],
                 f"{r['more_by_minima_percent']:+.1f} %")
                for r in found
            ],
        ),
    ]  # fmt: skip


def remat(rounds: int) -> list[str]:
    found = measure("remat.py", f"--steps={2 * rounds - 1}")
    kept = found[0]
    return [
        *prose(
            """`bench/remat.py`: loss and gradients of 12 layers of attention and an MLP, written
            out, each by `ts.remat` with a policy (docs/recomputation.md); 8 sequences of 256
            tokens, width 256, f32, one device; steps in turn. MiB are temporaries, as planned and
            by XLA's memory analysis; the ratios are to all values kept."""
        ),
        *table(
            ("policy", "planned MiB", "XLA MiB", "memory", "GFLOP", "ms", "time"),
            [
                (r["policy"], f"{r['planned_bytes'] / 2**20:.1f}", f"{r['xla_bytes'] / 2**20:.1f}",
                 f"**{r['xla_bytes'] / kept['xla_bytes']:.2f}**", f"{r['flops'] / 1e9:.1f}",
                 f"{1e3 * r['s']:.0f}", f"{r['s'] / kept['s']:.2f}")
                for r in found
            ],
        ),
    ]  # fmt: skip


def ttnn_calls(_: int) -> list[str]:
    found = measure("ttnn_calls.py")
    return [
        *prose(
            f"""The replay of a captured MLP (linear, gelu, all_gather, linear) over 8 devices,
            against `jax.jit` of the same by `shard_map`: {found["more_us"]:+.1f} µs
            ({within(found["more_us"], 60, " µs")}). An eager gelu over 8 devices against PyTorch's
            gelu of as many elements on one."""
        ),
        *table(
            ("call", "until it returns, µs", "until it is done, µs"),
            [
                (name, found[f"{key}_call_us"], found[f"{key}_whole_us"])
                for name, key in (
                    ("replay", "replay"), ("jax.jit", "jax"), ("eager gelu", "eager"),
                    ("PyTorch's gelu", "torch"),
                )
            ],
        ),
    ]  # fmt: skip


def order(rounds: int) -> list[str]:
    found = [measure("call_order.py", f"--layers={n}", f"--rounds={4 * rounds}") for n in (1, 4)]
    worst = max(100 * (r["time_ratio"] - 1) for r in found)
    return [
        *prose(
            f"""`bench/call_order.py`: a step of the GPT over dp, in two processes of one device and
            one thread each, whose loss is read each time, against the same step whose calls are
            not compared; by turns. It takes {worst:+.1f} % at most ({within(worst, 1, " %")})."""
        ),
        *table(
            ("layers", "compared, s", "not compared, s", "more time", "more processor time"),
            [
                (r["layers"], f"{r['with_s']:.3f}", f"{r['without_s']:.3f}",
                 f"{100 * (r['time_ratio'] - 1):+.1f} %", f"{100 * (r['cpu_ratio'] - 1):+.1f} %")
                for r in found
            ],
        ),
    ]  # fmt: skip


def startup(_: int) -> list[str]:
    r = {**measure("startup.py", "imports"), **measure("startup.py", "loop")}
    more = r["import_tessera_s"] - r["import_numpy_s"]
    calls = [measure("startup.py", layers) for layers in ("4", "24", "80")]
    worst, second = (
        max(c[k] / c[of] for c in calls) for k, of in (("ours", "peer"), ("again", "ours"))
    )
    return [
        *prose(
            f"""`import tessera` takes {r["import_tessera_s"]:.2f} s, `import numpy`
            {r["import_numpy_s"]:.2f} s ({within(more, 0.3, " s more")}); jax is not imported. Trace
            and compile of so many layers on one device, 4 x 64 tokens, against the hand-written
            step, whose layers are written out: at most **{worst:.2f}** of its time
            ({within(worst, 1.3)}). It was given 120 s and 16 GiB. A second start finds compiled
            programs: at most **{second:.2f}** of the first ({within(second, 0.33)})."""
        ),
        *table(
            ("layers", "ours s", "second start s", "hand-written s", "of its time", "of the first"),
            [
                (
                    c["layers"],
                    f"{c['ours']:.1f}",
                    f"{c['again']:.1f}",
                    f"{c['peer']:.1f}" if math.isfinite(c["peer"]) else "stopped",
                    f"**{c['ours'] / c['peer']:.2f}**" if math.isfinite(c["peer"]) else "-",
                    f"**{c['again'] / c['ours']:.2f}**",
                )
                for c in calls
            ],
        ),
        *prose(
            f"""Our 24 layers written out take {r["written_out"][0]:.1f} s to trace and compile and
            {r["written_out"][1]:.3f} s a step; as a loop {r["looped"][0]:.1f} s and
            {r["looped"][1]:.3f} s a step. `cost/loops.py` chooses by these."""
        ),
    ]


def loader(_: int) -> list[str]:
    r = measure("loader.py")
    return [
        *prose(
            f"""`bench/loader.py`: batches of {" x ".join(map(str, r["batch"]))} tokens, shuffled,
            from a mapped file of {r["tokens"] // 10**6} million, against one step of the demo's GPT
            on one device: {r["step_s"]:.3f} s alone, {r["fed_step_s"]:.3f} s when it also takes
            each batch from the loader. The slowest gives {against(min(r["ratio"].values()), 20,
            "times what the step takes")}."""
        ),
        *table(
            ("loader", "million tokens/s", "times what the step takes"),
            [
                (name, f"{speed / 1e6:.1f}", f"**{r['ratio'][name]:.0f}**")
                for name, speed in r["loader_tokens_per_s"].items()
            ],
        ),
    ]  # fmt: skip


def moe(rounds: int) -> list[str]:
    r = measure("moe.py", "--rounds", str(2 * rounds))
    return [
        *prose(
            f"""`bench/moe.py`: {r["tokens"]} tokens of {r["d"]} channels to {r["k"]} of
            {r["experts"]} experts (hidden {r["hidden"]}) on {r["devices"]} devices, forward. "Ours"
            is router, tables, picking rows, both exchanges and the weighted sum, with experts that
            give back what they get; "plain" is an all-to-all of the same bytes there and back and
            nothing else, so it is ahead by definition, and the ratio is how many times its time
            ours takes (no limit was set). Dropless rooms are sized for the worst case, so most of
            what it sends is empty where the load is even; on a CPU empty rows are not
            multiplied."""
        ),
        *table(
            ("room", "payload", "MB sent a device", "ours ms", "plain ms", "ratio",
             "whole layer ms"),
            [
                (x["room"], x["payload"], f"{x['sent_mb']:.1f}", f"{x['ours_ms']:.1f}",
                 f"{x['plain_ms']:.1f}", f"**{x['ratio']:.2f}**", f"{x['layer_ms']:.1f}")
                for x in r["rows"]
            ],
        ),
    ]  # fmt: skip


def kernels(rounds: int) -> list[str]:
    rows = []
    for r in measure("kernels.py"):
        ms, mb = r["ms"], r["temporary_mb"]
        mine = next(form for form in ms if form.startswith("kernel"))
        plain, best = next(iter(ms)), min((f for f in ms if f != mine), key=ms.__getitem__)
        rows.append(
            (r["kernel"], r["shape"], f"{ms[plain]:.1f}, {mb[plain]:.1f}",
             best if best == plain else f"{best}: {ms[best]:.1f}, {mb[best]:.1f}",
             f"{ms[mine]:.1f}, {mb[mine]:.1f}", mine.removeprefix("kernel").strip() or "-",
             f"**{ms[best] / ms[mine]:.2f}**")
        )  # fmt: skip
    return [
        *prose(
            """`bench/kernels.py`: kernels of Tile IR as loops of XLA, against XLA's plain form and
            the best form that the layers have without them. Each cell has ms and MB of temporaries,
            the medians of 9 rounds in turn in one process. The autotuner takes a kernel from a
            ratio of 1.15 on, or for half of the memory in the same time. On a CPU puts are
            permutes, of which the engine's own collectives need none, so they are behind."""
        ),
        *table(
            ("kernel", "shape", "XLA, plain", "best form", "kernel", "tiles", "ratio to the best"),
            rows,
        ),
    ]


def plan(rounds: int) -> list[str]:
    r = measure("plan.py", "--rounds", str(rounds), limit_s=3600.0)
    kinds = ", ".join(f"{k} {e:.1%}" for k, e in r["by_kind"].items())
    rows = [
        (d["program"], f"{d['predicted_ms']:.0f}", f"{d['least_ms']:.0f}", f"{d['error']:+.0%}",
         d.get("planned_mb", "-"), d.get("xla_mb", "-"),
         f"{d['memory_error']:+.0%}" if "memory_error" in d else "-")
        for d in r["rows"]
    ]  # fmt: skip
    return [
        *prose(
            f"""`bench/plan.py`: training steps on virtual devices of this machine and on two
            processes, predicted before they run by the machine file that `tessera calibrate`
            measures, against the least measured time of a step while the machine was quiet. Mean
            error **{r["mean_error"]:.1%}** ({within(100 * r["mean_error"], 10, "%")}), median
            {r["median_error"]:.1%}, largest {r["largest_error"]:.0%}; rank correlation
            **{r["ranks"]:.3f}** (at least 0.9). By kind: {kinds}. Memory of a device, planned
            against XLA's analysis: mean error {r["memory_mean_error"]:.1%}, median
            {r["memory_median_error"]:.1%}, {r["memory_within_5_percent"]} of
            {r["memory_programs"]} within 5 %."""
        ),
        *table(
            ("step", "predicted, ms", "measured, ms", "error", "planned, MB", "XLA, MB", "error"),
            rows,
        ),
    ]


def growth(rounds: int) -> list[str]:
    r = measure("soak/growth.py", "--json")
    return [
        *prose(
            f"""`bench/soak/growth.py`: processor time before a run, for models of {r["few"]} and
            {r["many"]} layers without a loop over them; an exponent of 1 is linear."""
        ),
        *table(
            ("part", "exponent", f"s at {r['many']} layers"),
            [(n, f"{e:.2f}", f"{r['seconds'][n]:.2f}") for n, e in r["exponents"].items()],
        ),
        *prose(
            f"""The cheapest way between two layouts of six axes takes {r["way_s"] * 1e3:.0f} ms to
            find, {r["longest_way_s"] * 1e3:.0f} ms at most of 300 that were drawn, once: it is
            kept."""
        ),
    ]


def checkpoints(rounds: int) -> list[str]:
    r = measure("checkpoints.py", "--rounds", str(min(rounds, 3)))
    names = {
        "ours": "ours",
        "orbax": "Orbax {orbax}, async",
        "torch": "PyTorch {torch}, async_save",
    }
    sides, step_s = r["sides"], r["step_s"]
    stall = sides["ours"]["stall_s"] / step_s
    faster = sides["ours"]["mb_s"] / r["dd_mb_s"]
    finds = [
        names[n].format(**r["versions"]).partition(" ")[0]
        for n, side in sides.items()
        if not side["finds_a_flipped_byte"]
    ]
    missing = [n for n in ("orbax", "torch") if n not in sides]
    return [
        *prose(
            f"""`bench/checkpoints.py`: {r["nbytes"] / 1e9:.2f} GB of f32 weights over
            {r["devices"]} virtual devices, each side in turn on one disk. Stall is how long
            training waits; a step that reads and writes all weights takes {step_s:.2f} s, so one
            save costs {stall:.2f} steps. `dd` with `conv=fsync` writes as much at
            {r["dd_mb_s"]:.0f} MB/s; ours reaches {faster:.2f} of that, with a checksum for each
            piece. Loads follow saves: files come from memory."""
        ),
        *table(
            ("side", "stall s", "on the disk after s", "MB/s", "load s", "finds a flipped byte"),
            [
                (
                    names[n].format(**r["versions"]),
                    f"{side['stall_s']:.3f} (min {side['min_stall_s']:.3f})",
                    f"{side['saved_s']:.2f}", f"{side['mb_s']:.0f}", f"{side['load_s']:.2f}",
                    "yes" if side["finds_a_flipped_byte"] else "**no**",
                )
                for n, side in sides.items()
            ],
        ),
        *prose(
            ("Not installed: " + ", ".join(missing) + ". " if missing else "")
            + (
                f"{' and '.join(finds)} load{'s' * (len(finds) == 1)} a flipped byte as a weight. "
                if finds
                else ""
            )
            + """A stall that is shorter than a copy means that arrays are not copied: Orbax keeps
            those of a CPU until they are written, and a step cannot take over their memory.
            PyTorch has one process and plain tensors of the host."""
        ),
    ]  # fmt: skip
