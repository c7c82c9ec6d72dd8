"""Trains a GPT on real text over a named mesh of devices, and shows what it does.

The axes of the mesh say how the work is divided: over `dp` each device takes a part of the batch,
over `tp` a part of every layer, over `ep` some of the experts. The model does not know of it; the
layouts of its weights decide. Over `cp` each device takes a part of every sequence, and attention
brings together what they hold. Over `pp` lie the stages of a pipeline, each some of the layers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console

import tessera as ts
from tessera import checkpoint, dist, elastic, nn, optim, pipeline
from tessera.data.tokens import TokenBatches
from tessera.show.pipeline_picture import render_pipeline
from tessera.show.plan_view import flops_text, render_plan
from tessera.show.results import render_files, render_losses
from tessera.train.cli import one_line
from tessera.train.evaluate import mean_loss
from tessera.train.generate import generate
from tessera.train.guard import Guard, TrainState
from tessera.train.run import WEIGHTS, Run, fresh_folder
from tessera.train.text import Text, prepare
from tessera.train.throughput import gemm_peak, model_flops
from tessera.train.trackers import tracker

HELP = """Train a GPT on real text over a named mesh of devices.

Examples:

\b
  --steps 50                      a short run
  --mesh dp=8 --zero 3            weights, gradients and optimizer state split over 8 devices
  --mesh dp=1 --corpus ~/notes    your own text, on one device
  --mesh tp=4 --dtype bf16        products in bf16, everything else in f32
  --context ring                  each sequence split over cp, attention by ring
  --moe 8 --mesh dp=2,ep=4        8 experts in each layer, 2 on a device
  --schedule ZB-H1                another order of the pipeline's microbatches
  --recompute full                layers computed again backwards instead of kept
  --fold 2                        the same program on 2 devices, in turns
  --fold fit                      on as many as there are, for `tessera run --elastic 2:8`
  --save-every 100                a checkpoint of all that goes on, in OUT/checkpoints
  --out runs/a --save-every 100   the same command, given again, goes on where it ended
  --resume runs/a/checkpoints     goes on from the latest of them, also on another mesh
  --prove-resume --steps 8        kills a run, resumes it, compares it with one that never stopped

TESSERA_COMM_TRACE=1 prints each collective with the line of this file that asked for it.
"""


MESH = "dp=2,tp=2,pp=2"
RECOMPUTE = {"none": False, "full": "recompute", "products": "products"}
ORDER = "1F1B"


def check(c: SimpleNamespace, mesh: dist.Mesh) -> None:
    """Raises UsageError for an option that means nothing, or would do nothing on this mesh."""
    for option, word, known in (
        ("--recompute", c.recompute, (*RECOMPUTE,)), ("--dtype", c.dtype, ("f32", "bf16", "fp8")),
    ):  # fmt: skip
        if word not in known:
            raise ts.UsageError(f"{option}: {word!r} is not one of {', '.join(known)}")
    for option, given, there, what in (
        ("--zero", c.zero, "dp" in mesh, "dp in --mesh"),
        ("--context", c.context, "cp" in mesh, "cp in --mesh"),
        ("--schedule", c.schedule != ORDER, "pp" in mesh, "pp in --mesh"),
        ("--microbatches", c.microbatches, "pp" in mesh, "pp in --mesh"),
        ("--keep-every", c.keep_every, c.save_every, "--save-every"),
    ):
        if given and not there:
            raise ts.UsageError(f"{option} has no effect without {what}: name it, or leave it out")


def check_text(config: Path, text: Text) -> None:
    """Raises UsageError if the run of this config.json, which is to go on, read another text: its
    ids stand for other tokens."""
    before = json.loads(config.read_text()).get("text") if config.exists() else None
    if before not in (None, text.kept_at.name):
        raise ts.UsageError(
            f"--corpus: the checkpoints beside {config} are of another text: give --corpus and"
            " --vocab as then, or begin anew: leave out --resume, and give another --out"
        )


def strategy(mesh: dist.Mesh, zero: int, experts: int) -> Any:
    """What each axis of `mesh` divides, as one plan of layouts."""
    data = dist.strategy("data_parallel")
    if zero:
        data = dist.strategy("zero_redundancy_optimizer", stage=zero)
    known = {
        "dp": data,
        "tp": dist.strategy("tensor_parallel"),
        "ep": dist.strategy("expert_parallel"),
    }
    for axis in mesh.axes:
        if axis not in (*known, "cp", "pp"):  # the model itself splits its sequences over cp
            known_axes = "dp, tp, pp, cp or ep"
            raise ts.UsageError(f"--mesh: axis {axis!r} is unknown here; name {known_axes}")
    parts = [known[axis] for axis in mesh.axes if axis in known]
    if not parts:
        raise ts.UsageError("--mesh: name dp or tp too, for instance dp=1,cp=8")
    if experts and "ep" not in mesh and "dp" in mesh:
        parts.append(dist.strategy("expert_parallel", axis="dp"))
    return sum(parts[1:], start=parts[0])


def training_step(loss_fn: Any, optimizer: optim.Optimizer, plan: Any) -> Any:
    """One step as one compiled program that changes the model and the state in place."""

    @ts.jit(donate=("model", "state"))
    def train_step(model: nn.GPT, state: dict[str, Any], ids: ts.Tensor, labels: ts.Tensor) -> Any:
        loss = loss_fn(model, ids, labels)
        weights = model.parameters()
        # Finished gradients lie as the plan says: whole, or split where ZeRO splits them.
        grads = ts.grad(loss, weights, layout=plan)
        grads, norm = optim.clip_by_global_norm(grads, 1.0)
        weights, new_state = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new_state)
        return {"loss": loss, "grad_norm": norm}

    return train_step


def train(c: SimpleNamespace, console: Console) -> None:
    # The mesh, and the plan that lays everything out on it.
    c.mesh = c.mesh or (MESH.replace("tp", "cp") if c.context else MESH)
    mesh = dist.Mesh.parse(c.mesh)
    if c.fold == "fit":
        mesh = elastic.fit(mesh)
    elif c.fold:
        mesh = mesh.fold(onto=int(c.fold) if c.fold.isdigit() else c.fold)
    plan = strategy(mesh, c.zero, c.moe)
    check(c, mesh)
    ts.seed(c.seed)

    # Text to tokens; a batch is a function of the seed and the step.
    with console.status("reading and tokenising text"):
        text = prepare(c.corpus, vocab=c.vocab, cache=c.cache)
    kept = bool(c.save_every and c.out) and (c.out / "checkpoints").exists()
    for run_before in ([c.resume.parent] if c.resume else []) + ([c.out] if kept else []):
        check_text(run_before / "config.json", text)
    console.print(f"{text}\n", highlight=False, soft_wrap=True)
    data = TokenBatches(text.train, c.batch, c.seq, c.seed)
    windows = TokenBatches(text.val, c.batch, c.seq).fixed(c.val_batches)

    def on_mesh(batch: Any) -> Any:
        return dist.place(batch, plan, mesh, kind="batch")

    # Model and optimizer: layouts now, values when they are first used.
    config = nn.GPTConfig(
        text.tokenizer.vocab, c.seq, c.d, c.layers, c.heads, positions="rotary", norm="rms",
        context=(c.context or "ring") if "cp" in mesh else None, remat=RECOMPUTE[c.recompute],
        experts=c.moe, stacked=False,
    )  # fmt: skip
    model = dist.place(nn.GPT(config), plan, mesh)
    batch = on_mesh(data.batch(0))
    flops = model_flops(model.loss, *batch)
    loss_fn: Any = nn.GPT.loss
    if "pp" in mesh:
        cut = pipeline.run(("pp",), c.schedule, c.microbatches or None, mesh=mesh)
        loss_fn = cut(loss_fn)
    schedule = optim.warmup_cosine(c.lr, c.steps // 12, c.steps + 1, end=c.lr / 20, start=c.lr / 20)
    optimizer = optim.AdamW(schedule, betas=(0.9, 0.95), weight_decay=0.1)
    train_step = training_step(loss_fn, optimizer, plan)
    state = optimizer.init(model.parameters(), plan)
    program: Any = train_step.plan(model, state, *batch)
    if "pp" in mesh:  # now it is known where each weight is used: that is where it rests
        model = loss_fn.place(model)
        state = optimizer.init(model.parameters(), plan)
        program = train_step.plan(model, state, *batch)

    # What a step will do, before any of it runs.
    weights = model.parameters()
    gradients = {name: plan.gradient(name, t.type) for name, t in weights.items()}
    held = {"weights": weights, "gradients": gradients, "optimizer": state}
    shown = program if "pp" in mesh else train_step.graph
    console.print(render_plan(mesh, shown, weights, held, flops), "")
    if "pp" in mesh:
        console.print(loss_fn.plan_text(), "", highlight=False, soft_wrap=True)
        console.print(render_pipeline(loss_fn.table), "")

    @ts.jit
    def validation_loss(model: nn.GPT, ids: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        return loss_fn(model, ids, labels)

    def validate() -> float:
        return mean_loss(lambda window: validation_loss(model, *on_mesh(window)), windows)

    measured = "bf16" if c.dtype == "fp8" else c.dtype
    untrained, peak = validate(), gemm_peak(dtype=measured)
    console.print(f"measured GEMM peak: {flops_text(peak)}/s in {measured}\n", highlight=False)
    folder = c.out or fresh_folder("runs", "gpt-" + c.mesh.replace("=", "").replace(",", "-"))
    resume = kept or c.fold == "fit"  # `tessera run --elastic` goes on without a checkpoint
    run = Run(
        folder, steps=c.steps, tokens_per_step=data.batch_tokens, model_flops=flops,
        peak_flops=peak, settings={**vars(c), "text": text.kept_at.name}, console=console,
        trackers=[tracker(name, folder, resume=resume) for name in c.track.split(",") if name],
        weights=lambda: model.state_dict(), spare=c.spare, resume=resume,
    )  # fmt: skip
    # Saves, goes on from what is there, and looks at each loss. Batches follow from seed and step.
    guard = Guard(
        run, TrainState(model, state), every=c.save_every or None,
        keep=checkpoint.Keep(c.keep, c.keep_every or None), resume=c.resume or kept,
        on_bad_loss=c.on_bad_loss, hang_s=c.hang or None, mesh=mesh,
    )  # fmt: skip
    with run, guard:
        for step in guard:
            now = {"val_loss": validate()} if step and step % c.val_every == 0 else {}
            with run.step(step, **now) as row:
                batch = on_mesh(data.batch(step + guard.skipped))
                row.update(train_step(model, state, *batch))
            if c.stop_after and step == c.stop_after:  # as a machine does that loses its power
                checkpoint.wait()
                os.kill(os.getpid(), signal.SIGKILL)

    # How good is it, and what does it write?
    losses = {
        "untrained model": untrained,
        "bigram": text.bigram_loss(windows),
        "trained model": validate(),
    }
    bits = {name: text.bits_per_byte(nats, windows) for name, nats in losses.items()}
    console.print(f"\nmedian step: {run.median_speed}\n", highlight=False)
    console.print(render_losses(losses, bits), "")
    if "pp" in mesh:  # from the stages back to the whole mesh
        model = dist.place(model, plan, mesh)
        run.save_text("pipeline.svg", pipeline.pipeline_svg(loss_fn.table))
    ids = generate(
        model, text.tokenizer.encode(c.prompt), c.sample_tokens, window=c.seq, seed=c.seed,
        stop=text.tokenizer.end, mesh=mesh, cache=not (config.context or config.experts),
    )  # fmt: skip
    run.save_text("sample.txt", text.tokenizer.decode(ids))
    run.save_text("graph.txt", train_step.graph.text)
    run.save_text("schedule.txt", program.text)
    run.save_curve(f"GPT on {mesh.topology}", losses)
    console.print(render_files(run.folder, run.files()))


def prove_resume(c: SimpleNamespace) -> None:
    """Runs this script three times: to its end, killed half way, and from there on."""
    half = max(1, c.steps // 2)
    folder = Path(c.out or fresh_folder("runs", "resumed"))
    plain = [w for w in sys.argv[1:] if w != "--prove-resume"]
    runs = {
        "whole": [],
        "killed": ["--save-every", str(half), "--stop-after", str(half)],
        "resumed": ["--resume", str(folder / "killed" / "checkpoints")],
    }
    for name, words in runs.items():
        command = [sys.executable, __file__, *plain, *words, "--out", str(folder / name)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        said = f"killed by signal {-done.returncode}" if done.returncode < 0 else "to its end"
        typer.echo(f"{name:8} {said}")
        if done.returncode != (-signal.SIGKILL if name == "killed" else 0):
            raise typer.Exit(done.returncode)
    one, other = ((folder / name / WEIGHTS).read_bytes() for name in ("whole", "resumed"))
    same = one == other
    are = "are" if same else "are NOT"
    typer.echo(f"{folder}: the weights after step {c.steps} {are} the same, bit by bit, whether the"
               f" run was killed after step {half} or not")  # fmt: skip
    raise typer.Exit(0 if same else 1)


def main(
    mesh: Annotated[str, typer.Option(help=f"Axes and sizes: dp, tp, pp, cp, ep [{MESH}].")] = "",
    fold: Annotated[
        str, typer.Option(help="Run the mesh on fewer devices: dp=2,tp=1; or fit.")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Decides weights, batches and sample.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the results [runs/NAME].")] = None,
    spare: Annotated[
        Path | None, typer.Option(help="Folder for what cannot be written to --out.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Your text [the Python standard library's source].")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where tokens are kept.")] = Path("runs/.cache"),
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage over dp.")] = 0,
    schedule: Annotated[
        str, typer.Option(help="Of the pipeline: " + ", ".join(pipeline.SCHEDULES) + ", a CSV.")
    ] = ORDER,
    microbatches: Annotated[int, typer.Option(min=0, help="A step [2 a stage].")] = 0,
    moe: Annotated[int, typer.Option(min=0, help="Experts a layer, over ep or dp.")] = 0,
    context: Annotated[str, typer.Option(help="Attention over cp: ring or all_to_all.")] = "",
    recompute: Annotated[str, typer.Option(help="Of layers: none, full or products.")] = "none",
    dtype: Annotated[str, typer.Option(help="Of the matrix products: f32, bf16, fp8.")] = "f32",
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 16,
    seq: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 128,
    d: Annotated[int, typer.Option(min=2, help="Width of the model.")] = 192,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 3,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    vocab: Annotated[int, typer.Option(help="Tokens that the BPE may learn.")] = 1024,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 4e-3,
    val_batches: Annotated[int, typer.Option(min=1, help="Batches of validation text.")] = 12,
    val_every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = 100,
    prompt: Annotated[str, typer.Option(help="What the sample begins with.")] = "def ",
    sample_tokens: Annotated[int, typer.Option(min=0, help="Length of the sample.")] = 200,
    track: Annotated[str, typer.Option(help="Also track in tensorboard, wandb or both.")] = "",
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints.")] = 0,
    resume: Annotated[Path | None, typer.Option(help="Checkpoints to go on from.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay, the newest.")] = 3,
    keep_every: Annotated[int, typer.Option(min=0, help="Those of each so many steps, too.")] = 0,
    on_bad_loss: Annotated[
        str, typer.Option(help="A loss that is NaN: stop, rollback or ignore.")
    ] = "stop",
    hang: Annotated[float, typer.Option(min=0, help="Seconds of a step; 0: no limit.")] = 1800,
    stop_after: Annotated[int, typer.Option(min=0, hidden=True)] = 0,
    prove: Annotated[
        bool, typer.Option("--prove-resume", help="Show that a killed run loses nothing.")
    ] = False,
) -> None:
    config = SimpleNamespace(**locals())
    if prove:
        prove_resume(config)
    try:
        with ts.autocast(dtype):
            train(config, Console(quiet=dist.process_index() > 0))  # one process shows
    except ts.TesseraError as error:
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=HELP)(main)
    app()
