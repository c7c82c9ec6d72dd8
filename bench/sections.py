"""The sections of bench/RESULTS.md: what each measures, and the lines that say what came out.

Each states the limit that was set, where there is one, and says so where it is missed or a peer is
ahead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import all_reduce
from page import prose, table

HERE = Path(__file__).resolve().parent
LIMIT_S = 400.0  # for one script; on a quiet machine each takes less than one minute
TORCH = util.find_spec("torch") is not None


class Failed(Exception):
    """A script did not measure: why."""


@dataclass(frozen=True)
class Section:
    title: str
    measure: Callable[[int], list[str]]


def measure(script: str, *args: str, env: Mapping[str, str] | None = None) -> Any:
    """The JSON that a script of this folder prints. Raises Failed."""
    command = [sys.executable, str(HERE / script), *args]
    print("measuring:", script, *args, dict(env or {}) or "", flush=True)
    around = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=around, check=True
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise Failed(f"{script} was not done after {LIMIT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise Failed(f"{script} failed:\n{error.stderr[-2000:]}") from None
    except (IndexError, ValueError):
        raise Failed(f"{script} printed no result") from None


def against(ratio: float, limit: float, what: str = "of its speed") -> str:
    """How a speed ratio compares with its limit, in words."""
    word = "met" if ratio >= limit else "**missed**"
    ahead = "" if ratio >= 1 else "; the peer is ahead"
    return f"**{ratio:.2f}** {what} (limit {limit:g}: {word}{ahead})"


def within(value: float, limit: float, unit: str = "") -> str:
    """How something that should be small compares with its limit."""
    return f"limit {limit:g}{unit}: {'met' if value <= limit else '**missed**'}"


def no_torch() -> list[str]:
    return prose("PyTorch was not installed.")


# -- the sections ---------------------------------------------------------------------------------
def steps(rounds: int) -> list[str]:
    runs = [(mesh, "1") for mesh in ("one", "dp=2", "tp=2")] + [("dp=2", "0")]
    found = [
        measure("gpt_step.py", mesh, "--rounds", str(rounds), env={"TESSERA_HEAP": heap})
        for mesh, heap in runs
    ]
    worst = max(r["largest_loss_difference"] for r in found)
    least = min(r["speed_ratio"] for r in found)
    fatter = [
        r["mesh"]
        for r in found
        if r["ours_memory"]["temporaries_mb"] > r["peer_memory"]["temporaries_mb"]
    ]
    memory = (
        f"**more than the peer's on {', '.join(fatter)}**" if fatter else "no more than the peer's"
    )
    return [
        *prose(
            f"""The same GPT (d=256, 4 layers, 8 heads, vocabulary 4096, 16 x 256 tokens, f32,
            AdamW) on the same weights and tokens: `nn.GPT` against `bench/peers/jax_gpt.py`, plain
            `jnp` in `shard_map`. Losses differ by at most {worst:.1e}. Where the heap is kept, both
            have the benefit (`TESSERA_HEAP`, runtime/malloc.py). The least ratio is
            {against(least, 0.97)}; temporaries are {memory}, which is the limit."""
        ),
        *table(
            ("mesh", "heap kept", "ours s", "shard_map s", "speed ratio",
             "ours, peer temporaries MB"),
            [
                (
                    r["mesh"],
                    "yes" if r["heap"] == "1" else "no",
                    f"{r['ours_s']:.3f} (min {r['ours_min_s']:.3f})",
                    f"{r['peer_s']:.3f} (min {r['peer_min_s']:.3f})",
                    f"**{r['speed_ratio']:.2f}**",
                    f"{r['ours_memory']['temporaries_mb']:.0f}, "
                    f"{r['peer_memory']['temporaries_mb']:.0f}",
                )
                for r in found
            ],
        ),
        *prose(
            """Temporaries are XLA's memory analysis of one device. Ours come out lower because loss
            and head, MLP and attention run in blocks whose insides are not kept."""
        ),
    ]  # fmt: skip


def torch_rows(found: list[dict[str, Any]]) -> list[str]:
    return table(
        ("ranks", "ours s", "PyTorch s", "speed ratio", "by processor time"),
        [
            (
                r["ranks"],
                f"{r['ours_s']:.3f} (min {r['ours_min_s']:.3f})",
                f"{r['peer_s']:.3f} (min {r['peer_min_s']:.3f})",
                f"**{r['speed_ratio']:.2f}**",
                f"{r['cpu_ratio']:.2f}",
            )
            for r in found
        ],
    )


def ddp(rounds: int) -> list[str]:
    if not TORCH:
        return no_torch()
    r = measure("fsdp.py", "--zero", "0", "--rounds", str(rounds))
    aim = "reached" if r["speed_ratio"] >= 1.3 else "**not reached**"
    return [
        *prose(
            f"""`bench/fsdp.py --zero 0`: the same GPT, weights and tokens; PyTorch {r["torch"]} has
            two processes of one thread over gloo, fused attention and AdamW, ours one process with
            two virtual devices. Losses of all steps differ by at most
            {r["largest_loss_difference"]:.1e}. Ours has {against(r["speed_ratio"], 1.0)}; the aim
            of 1.3 is {aim}."""
        ),
        *torch_rows([r]),
    ]


def processes(rounds: int) -> list[str]:
    if not TORCH:
        return no_torch()
    r = measure("fsdp.py", "--zero", "0", "--processes", "--rounds", str(rounds))
    return [
        *prose(
            f"""`bench/fsdp.py --zero 0 --processes`: the same as above, like with like: ours has
            two processes of one device and one thread each, too, and its sums go through the
            sockets of the engine's gloo. Losses of all steps differ by at most
            {r["largest_loss_difference"]:.1e}. Ours has {against(r["speed_ratio"], 1.0)}."""
        ),
        *torch_rows([r]),
    ]


def sums(rounds: int) -> list[str]:
    return all_reduce.lines(measure("all_reduce.py", "--rounds", str(rounds))["rows"])


def fsdp(rounds: int) -> list[str]:
    if not TORCH:
        return no_torch()
    found = [
        measure("fsdp.py", "--zero", "3", "--ranks", n, "--rounds", str(rounds)) for n in ("2", "4")
    ]
    least = min(r["speed_ratio"] for r in found)
    who = "Ours is ahead" if least >= 1 else "**The peer is ahead**"
    return [
        *prose(
            f"""`bench/fsdp.py --zero 3`: the GPT and the processes of the section above, weights,
            gradients and optimizer state split over dp; PyTorch by `fully_shard` of each layer and
            of the whole at its defaults. Losses of all steps differ by at most
            {max(r["largest_loss_difference"] for r in found):.1e}. {who}: at least {least:.2f} of
            its speed (no limit was set). Its collectives cross process borders through sockets,
            ours are copies inside one process: that is what a CPU has to offer, and it says little
            of GPUs. A program of ours has {found[0]["collectives"]} collectives, in prefetch order
            where the schedule says so; on a CPU they overlap with nothing."""
        ),
        *torch_rows(found),
    ]


def dispatch(_: int) -> list[str]:
    found = measure("dispatch.py")
    few = max(r["more_us"] for r in found if r["leaves"] == 20)
    many = max(r["more_by_minima_percent"] for r in found if r["leaves"] == 900)
    return [
        *prose(
            f"""A compiled function that adds one to each of its leaves, against `jax.jit` of the
            same, which is ahead. At 20 leaves {few:.1f} µs more at most ({within(few, 60, " µs")});
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


def startup(_: int) -> list[str]:
    r = measure("startup.py")
    more = r["import_tessera_s"] - r["import_numpy_s"]
    calls = r["first_calls"]
    worst, second = (
        max(c[k] / c[of] for c in calls) for k, of in (("ours", "peer"), ("again", "ours"))
    )
    return [
        *prose(
            f"""`import tessera` takes {r["import_tessera_s"]:.2f} s, `import numpy`
            {r["import_numpy_s"]:.2f} s ({within(more, 0.3, " s more")}); jax is not imported. Trace
            and compile of so many layers on one device, 4 x 64 tokens, against the hand-written
            step: at most **{worst:.2f}** of its time ({within(worst, 1.3)}). A second start finds
            compiled programs: at most **{second:.2f}** of the first ({within(second, 0.33)})."""
        ),
        *table(
            ("layers", "ours s", "second start s", "hand-written s", "of its time", "of the first"),
            [
                (
                    c["layers"],
                    f"{c['ours']:.1f}",
                    f"{c['again']:.1f}",
                    f"{c['peer']:.1f}",
                    f"**{c['ours'] / c['peer']:.2f}**",
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
            what it sends and multiplies is empty where the load is even."""
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


def pipeline(rounds: int) -> list[str]:
    r, small = (
        measure("pipeline.py", "--rounds", str(2 * rounds)),
        measure("pipeline.py", "--small"),
    )
    text = f"""`bench/pipeline.py`: {r["layers"]} MLP blocks of width {r["width"]}, {r["rows"]} rows
        in {r["microbatches"]} microbatches, on {r["ranks"]} stages by {r["schedule"]}:
        {r["pipeline_s"]:.3f} s a step (min {r["pipeline_min_s"]:.3f}). One device takes
        {r["one_device_s"]:.3f} s on {r["one_device_cores"]:.1f} cores, so the bubble limit is
        {r["limit_s"]:.3f} s, of whose speed this is **{r["limit_ratio"]:.2f}**. With tensors that
        take no time a step of the schedule costs {small["a_step_us"]:.0f} µs ({small["steps"]}
        steps). Stages are programs of one device each, which do overlap on a CPU."""
    if TORCH:
        best = min(
            measure("peers/torch_pipeline.py", "--steps", str(2 * rounds))["step_s"]
            for _ in range(2)
        )
        ratio = best / r["pipeline_s"]
        ahead = "" if ratio >= 1 else "; **the peer is ahead**"
        text += f""" `torch.distributed.pipelining` over gloo, two processes of one thread each
            (`bench/peers/torch_pipeline.py`, the better of two runs): {best:.3f} s; ours has
            **{ratio:.2f}** of its speed{ahead} (no limit was set)."""
    return prose(text)


def stepped(rounds: int) -> list[str]:
    found = measure("stepped.py", "--rounds", str(rounds))["rows"]
    worst = max(r["largest_loss_difference"] for r in found)
    return [
        *prose(
            f"""`bench/stepped.py`: a GPT's training step by both executors in turn. The stepped one
            dispatches each compute region and each collective as a program of its own; ratio is its
            time over the fused one's (no limit was set; losses differ by at most {worst:.1e}).
            Shares are those of stepped runs whose every step is waited for: computing, transfers,
            devices that wait for the last one, the rest (dispatch and Python). The last row is a
            model whose tensors take no time, which leaves dispatch. The fused executor donates the
            weights' buffers, the stepped one keeps both copies."""
        ),
        *table(
            ("mesh", "width", "ZeRO", "steps", "fused s", "stepped s", "ratio",
             "by processor time", "computing, transfer, wait, rest"),
            [
                (r["mesh"], r["width"], r["zero"], r["steps"], f"{r['fused_s']:.4f}",
                 f"{r['stepped_s']:.4f}", f"**{r['ratio']:.2f}**", f"{r['cpu_ratio']:.2f}",
                 ", ".join(f"{100 * r['share'][k]:.0f} %" for k in
                           ("compute", "transfer", "wait", "rest")))
                for r in found
            ],
        ),
        *prose(
            f"""A dispatched step costs {found[-1]["a_step_us"]:.0f} µs more than the same step
            inside the fused program (last row)."""
        ),
    ]  # fmt: skip


def price(rounds: int) -> list[str]:
    meshes = ("dp=8", "tp=4", "dp=2,tp=2,pp=2")
    # A few per cent between processes are told apart only by many short steps.
    found = [measure("price.py", mesh, "--rounds", str(8 * rounds)) for mesh in meshes]
    sums = measure("price.py", "collectives", "--rounds", str(rounds))
    faster = min(sums["faster_than"].values())
    ms = {k: 1e3 * v for k, v in sums["median_s"].items()}
    return [
        *prose(
            """`bench/price.py`: a GPT's training step (d=256, 2 layers, 16 x 256 tokens, f32) under
            `mesh_invariant` against `fast` on the same mesh, each in a process of its own, in turn.
            "Instructions" is `fast` against `fast` with all instructions of the processor
            (`XLA_FLAGS=--xla_cpu_max_isa=AMX_FP16`), by processor time: what every program pays for
            doing without fused multiply-add, so that the promise can be made at any time."""
        ),
        *table(
            ("mesh", "fast s", "mesh_invariant s", "price", "by processor time", "instructions"),
            [
                (r["what"], f"{r['median_s']['fast']:.3f} (min {r['min_s']['fast']:.3f})",
                 f"{r['median_s']['mesh_invariant']:.3f} "
                 f"(min {r['min_s']['mesh_invariant']:.3f})",
                 f"**{100 * (r['price'] - 1):+.0f} %**", f"{100 * (r['cpu_price'] - 1):+.0f} %",
                 f"{100 * (r['held']['free'] - 1):+.0f} %")
                for r in found
            ],
        ),
        *prose(
            """What peers pay, by their own account: 4 to 17 % for the same bits on the same layout
            only (Megatron), 2.4 to 2.9 times for kernels whose bits do not depend on the batch
            (serving). None of them trains to the same bits on another mesh. Where ours costs
            more than 17 %, the first are ahead for those who never change their layout."""
        ),
        *prose(
            f"""A sum of 16 MiB over 8 devices in a fixed order: {ms["mesh_invariant"]:.0f} ms. An
            all_gather whose terms each device adds up in the same order takes
            {ms["gather_tree"]:.0f} ms, one with `sum` over them {ms["gather_sum"]:.0f} ms: ours is
            at least {against(faster, 2, "times as fast")}. `psum`, which promises no order, takes
            {ms["fast"]:.0f} ms; ours takes {sums["price"]:.1f} times as long."""
        ),
    ]  # fmt: skip


def guard(rounds: int) -> list[str]:
    found = [measure("guard.py", what, "--rounds", str(4 * rounds)) for what in GUARDED]
    worst = max(r["cpu_price"] for r in found)
    return [
        *prose(
            """`bench/guard.py`: jaxlib computes some fused reductions on a CPU wrongly, so they are
            not fused (core/flags.py). What that costs, value and gradients together, against the
            engine's default, each in a process of its own, in turn. Processor time says more than
            the clock where the machine is busy."""
        ),
        *table(
            ("program", "fused s", "guarded s", "price", "by processor time"),
            [
                (GUARDED[r["what"]],
                 *(f"{r['median_s'][k]:.3f} (min {r['min_s'][k]:.3f})"
                   for k in ("fused", "guarded")),
                 f"**{100 * (r['price'] - 1):+.0f} %**", f"{100 * (r['cpu_price'] - 1):+.0f} %")
                for r in found
            ],
        ),
        *prose(
            f"""At most {100 * (worst - 1):+.0f} % by processor time: the price of right numbers
            until a version of the engine has them."""
        ),
    ]  # fmt: skip


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
            + (f"{' and '.join(finds)} load a flipped byte as a weight. " if finds else "")
            + """A stall that is shorter than a copy means that arrays are not copied: Orbax keeps
            those of a CPU until they are written, and a step cannot take over their memory.
            PyTorch has one process and plain tensors of the host."""
        ),
    ]  # fmt: skip


GUARDED = {
    "attention": "attention, 4 x 8 heads, 512 x 64",
    "norms": "layer_norm, softmax, rms_norm of 16384 x 64",
    "loss": "logsumexp, max, mean of 16384 x 64",
    "step": "a GPT's training step, 2 layers",
}
SECTIONS = {
    "steps": Section("A training step against hand-written JAX", steps),
    "ddp": Section("Against PyTorch DDP", ddp),
    "processes": Section("Against PyTorch DDP, two processes each", processes),
    "sums": Section("A sum over devices, in one process and between processes", sums),
    "fsdp": Section("ZeRO-3 against FSDP2", fsdp),
    "dispatch": Section("What a call costs", dispatch),
    "ttnn": Section("TT-NN's calls", ttnn_calls),
    "startup": Section("How long until a program runs", startup),
    "growth": Section("How planning grows with the model", growth),
    "loader": Section("What a loader gives out", loader),
    "moe": Section("Experts: dispatch and combine", moe),
    "checkpoints": Section("What a checkpoint costs", checkpoints),
    "pipeline": Section("A pipelined step", pipeline),
    "stepped": Section("Step by step against fused", stepped),
    "price": Section("The price of the same bits", price),
    "guard": Section("The price of right reductions", guard),
}
