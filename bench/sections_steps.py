"""Sections about training steps: whole ones against peers, and the cost of a promise in one."""

from __future__ import annotations

from typing import Any

import all_reduce
from page import prose, table
from processor import gpu
from scripts import TORCH, Failed, against, measure, no_torch


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
            have the benefit (`TESSERA_HEAP`, runtime/cpu/malloc.py). The least ratio is
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


def taken_apart(rounds: int) -> list[str]:
    lines = prose(
        """`bench/step_table.py`: one step of the GPT above, one process on one core, by what the
        engine's profiler says of each instruction of the compiled program. A floor is the least
        time here: of a product, that product alone with what is summed over innermost on the left;
        of anything else, a copy of as many bytes as it reads and writes. Where both are fused into
        one instruction it counts as the product, and instructions that run at once share the time.
        PyTorch is `bench/peers/torch_step.py`, one thread on the same core, by `torch.profiler`;
        its attention is one op, softmax included. In bf16 both are under autocast."""
    )
    for dtype in ("f32", "bf16"):
        ours = measure("step_table.py", dtype, "--rounds", str(rounds))
        torch = None
        try:
            torch = measure("peers/torch_step.py", dtype, "--rounds", str(rounds))
        except Failed as why:
            lines += no_torch() if not TORCH else prose(f"PyTorch in {dtype}: {why}.")
        lines += one_taken_apart(dtype, ours, torch)
    return lines


def one_taken_apart(dtype: str, ours: dict[str, Any], torch: dict[str, Any] | None) -> list[str]:
    rows = {(where, part): (s, floor_s) for where, part, s, floor_s in ours["rows"]}
    peer = {(where, part): s for where, part, s in (torch["rows"] if torch else ())}
    total_s, floor_s = (sum(r[i] for r in rows.values()) for i in (0, 1))
    order = sorted({*rows, *peer}, key=lambda k: -max(rows.get(k, (0.0,))[0], peer.get(k, 0.0)))
    shown = [k for k in order if max(rows.get(k, (0.0,))[0], peer.get(k, 0.0)) > total_s / 500]
    ahead = ""
    if torch:
        ratio = torch["step_s"] / ours["step_s"]
        least = torch["step_min_s"] / ours["step_min_s"]
        ahead = (
            f" PyTorch's {torch['step_s']:.3f} s (min {torch['step_min_s']:.3f}): ours has"
            f" **{ratio:.2f}** of its speed, {least:.2f} by minima, and would have"
            f" {torch['step_s'] / floor_s:.2f} at its floors."
        )
    slow, fast = ours["copy_gb_per_s"][::-1]

    def ms(s: float | None) -> str:
        return "-" if s is None else f"{1e3 * s:.1f}"

    return [
        *prose(
            f"""**{dtype}**: a step takes {ours["step_s"]:.3f} s without the profiler (min
            {ours["step_min_s"]:.3f}); its instructions {total_s:.3f} s, their floors
            {floor_s:.3f} s.{ahead} Copies move {slow:.0f} GB/s, in the cache {fast:.0f} GB/s."""
        ),
        *table(
            ("pass", "part", "ours ms", "floor ms", "ratio", "share", "PyTorch ms"),
            [
                (
                    *key,
                    ms(rows[key][0]) if key in rows else "-",
                    ms(rows[key][1]) if key in rows else "-",
                    f"{rows[key][0] / rows[key][1]:.1f}" if rows.get(key, (0, 0))[1] else "-",
                    f"{100 * rows[key][0] / total_s:.0f} %" if key in rows else "-",
                    ms(peer.get(key)),
                )
                for key in shown
            ],
        ),
        *table(
            ("pass", "the longest products", "dtypes", "times", "ms", "alone ms", "GFLOP/s",
             "alone"),
            [
                (f"{where}, {part}", sizes, dtypes, f"{times:g}", ms(s), ms(alone_s),
                 f"{here:.0f}", f"{alone:.0f}")
                for where, part, sizes, dtypes, times, s, alone_s, here, alone in ours["products"]
            ],
        ),
    ]  # fmt: skip


def torch_rows(found: list[dict[str, Any]], what: str = "ranks") -> list[str]:
    """The table of Tessera beside PyTorch in each run; `what` names the first column."""
    return table(
        (what, "ours s", "PyTorch s", "speed ratio", "by processor time", "ours, PyTorch peak MB"),
        [
            (
                NETS[r["net"]] if what == "net" else r[what],
                f"{r['ours_s']:.3f} (min {r['ours_min_s']:.3f})",
                f"{r['peer_s']:.3f} (min {r['peer_min_s']:.3f})",
                f"**{r['speed_ratio']:.2f}**",
                f"{r['cpu_ratio']:.2f}",
                f"{r['ours_peak_mb']:.0f}, {r['peer_peak_mb']:.0f}",
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
            of 1.3 is {aim}. Peaks are of whole processes while they step, summed over PyTorch's."""
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


def nets(rounds: int) -> list[str]:
    if not TORCH:
        return no_torch()
    found = []
    for net in ("convnet", "depthwise", "moe"):
        found.append(measure("nets.py", net, "--rounds", str(2 * rounds)))
        if net == "depthwise":
            continue  # all of its candidates are equal
        measure("nets.py", net, "--rounds", "1", "--tune")  # what is timed reads what this found
        found.append(measure("nets.py", net, "--rounds", str(2 * rounds), "--tune"))
    behind = [r["net"] for r in found if r["speed_ratio"] < 1]
    who = f"**The peer is ahead ({', '.join(behind)})**" if behind else "Ours is ahead"
    return [
        *prose(
            f"""`bench/nets.py`: a training step on the same weights and inputs, f32, AdamW, one
            device (`TESSERA_DEVICES=1`) and one process each with all cores; PyTorch
            {found[0]["torch"]} is eager, its convnets in `channels_last`, its experts a loop that
            picks the tokens of each. {who} (no limit was set). First losses differ by at most
            {max(r["first_loss_difference"] for r in found):.1e}; later ones by
            {max(r["largest_loss_difference"] for r in found):.1e} with experts, whose router may
            choose otherwise between near scores. Peaks are of whole processes while they step. With
            `tune=True` (docs/tuning.md) ours takes the choices that an earlier process timed and
            recorded; the process that times them has a higher peak."""
        ),
        *torch_rows(found, "net"),
        *(f"- {r['net']}: {'; '.join(r['timings'])}" for r in found if r["timings"]),
        "",
    ]


def tuned(rounds: int) -> list[str]:
    found = [
        measure("tune.py", net, "--devices", str(n), "--rounds", str(3 * rounds))
        for net in ("gpt", "convnet", "moe")
        for n in (1, 2, 4)
    ]
    slowest = max(r["again_s"] for r in found)
    return [
        *prose(
            f"""`bench/tune.py`: a training step of the demo's GPT, of the convnet and of the
            experts of the section before, data-parallel, after `ts.tune` against the defaults, one
            step each in turn in one process. A search takes at most {found[0]["limit_s"]:.0f} s. A
            second start finds its choice in at most {slowest:.2f} s."""
        ),
        *table(
            ["step", "devices", "defaults s", "tuned s", "ratio", "chosen", "timed", "search s"],
            [
                [
                    r["net"], r["devices"], f"{r['plain_s']:.3f}", f"{r['tuned_s']:.3f}",
                    f"{r['ratio']:.2f}",
                    ", ".join(f"`{k}={v}`" for k, v in r["chosen"].items()) or "the defaults",
                    r["timed"], f"{r['search_s']:.0f}",
                ]
                for r in found
            ],
        ),
    ]  # fmt: skip


NETS = {"convnet": "the convnet (ResNet of 15 convolutions, 64 images of 32 x 32)",
        "depthwise": "a depthwise convnet (4 blocks, 64 and 128 channels, 3 x 3; max and mean pool,"
        " exact GELU, 32 images of 32 x 32)",
        "moe": "the experts (4 layers of 8, 2 a token, d=256, 4096 tokens)",
        "convnet tuned": "the convnet, `tune=True`",
        "moe tuned": "the experts, `tune=True`"}  # fmt: skip


def pipeline(rounds: int) -> list[str]:
    r, small, alone = (
        measure("pipeline.py", "--rounds", str(2 * rounds)),
        measure("pipeline.py", "--small"),
        measure("pipeline.py", "--one", "--rounds", str(rounds)),
    )
    limit = r["share"] * alone["one_core_s"]
    text = f"""`bench/pipeline.py`: {r["layers"]} MLP blocks of width {r["width"]}, {r["rows"]} rows
        in {r["microbatches"]} microbatches, on {r["ranks"]} stages by {r["schedule"]}:
        {r["pipeline_s"]:.3f} s a step (min {r["pipeline_min_s"]:.3f}). One device takes
        {alone["one_core_s"]:.3f} s held to one core ({r["one_device_s"]:.3f} s on
        {r["one_device_cores"]:.1f} cores), so the bubble limit of two devices of one core each is
        {limit:.3f} s, of whose speed this is **{limit / r["pipeline_s"]:.2f}**. With tensors that
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
            model whose tensors take no time, which leaves dispatch."""
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
    # Only many short steps can show a few per cent between processes.
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


GUARDED = {
    "attention": "attention, 4 x 8 heads, 512 x 64",
    "norms": "layer_norm, softmax, rms_norm of 16384 x 64",
    "loss": "logsumexp, max, mean of 16384 x 64",
    "step": "a GPT's training step, 2 layers",
}


# -- on a GPU --------------------------------------------------------------------------------------
PEERS = {
    "jax": "`jnp` in `shard_map`", "jax-cudnn": "the same, attention by cuDNN",
    "torch": "PyTorch", "torch-compiled": "PyTorch, `torch.compile`",
}  # fmt: skip


def on_a_gpu(_: int) -> list[str]:
    if not gpu():
        raise Failed("there is no GPU")
    return gpu_lines(measure("gpu.py"))


def gpu_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the page for the rows of gpu.py."""
    lines = prose(
        """GPT-2's small size (d=768, 12 layers, 12 heads, vocabulary 50304, 8 x 1024 tokens, AdamW)
        on one GPU, each side in a process of its own, on the same weights and tokens. In f32 all
        sides let products round their factors to TF32. A step is the median of windows of steps
        that do not wait for their losses. The first step is with its compilation, while all sides
        compile; memory is the most that the side's allocator gave out."""
    )
    made = []
    for dtype in ("bf16", "f32"):
        found = {r["side"]: r for r in rows if r["dtype"] == dtype}
        ours = found.pop("ours", {"failed": "not measured"})
        sides = {"ours": ours, **found}
        for side, r in sides.items():
            name = PEERS.get(side, side)
            if "failed" in r:
                made.append((dtype, name, "failed: " + r["failed"].splitlines()[-1], "", "", ""))
                continue
            ratio = "" if side == "ours" or "failed" in ours else (
                f"**{r['step_ms'] / ours['step_ms']:.2f}**"
            )  # fmt: skip
            made.append((
                dtype, name, f"{r['step_ms']:.1f} (min {r['step_min_ms']:.1f})", ratio,
                f"{r['peak_mb'] / 1e3:.1f}", f"{r['first_s']:.0f}",
            ))  # fmt: skip
    head = ("dtype", "side", "step ms", "ours is so much faster", "peak GB", "first step s")
    return lines + table(head, made)
