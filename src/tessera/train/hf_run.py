"""A run that trains the model of a HuggingFace config: plan, steps, and the saved model.

The folder of the run has the files of `Run`, and

- `run.json`: the options
- `text/`: tokens and tokenizer, if text was encoded
- `plan.json`: the mesh, strategy and options that the search found
- `checkpoints/`: what the run goes on from
- `hf/`: the trained model, with its tokenizer
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from ..core.devices import device_count, process_count
from ..core.dtypes import int32
from ..core.errors import UsageError
from ..core.files import write_whole
from ..core.machine.machine import Machine
from ..core.mesh import Mesh
from ..core.options import ScheduleOptions
from ..data.create import create_distributed_dataloader
from ..interop.hf import save_hf
from ..interop.hf_files import CONFIG
from ..lang.autodiff.grad import grad
from ..lang.jit.jit import Jit, jit
from ..lang.math.create import dist_tensor
from ..lang.parallel.strategy import Strategy, place
from ..lang.record.first_process import by_first
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from ..nn.module import Module
from ..optim import AdamW, Optimizer, clip_by_global_norm, warmup_cosine
from ..plan.calibrate import SHAPES, calibrate
from ..plan.candidates import Candidate, Found
from ..plan.machines import cluster_of
from ..plan.search import best
from ..show.plan_view import render_plan
from .causal_lm import CausalLM, Described, causal_lm
from .guard import Guard, TrainState
from .run import CONTENTS, Run
from .text_tokens import Words

T = TypeVar("T")
LIMIT_S = 3600.0  # of a wait for the first process
OPTIONS, PLAN, TEXT, MODEL, CHECKPOINTS = "run.json", "plan.json", "text", "hf", "checkpoints"


@dataclass(frozen=True)
class Options:
    """The options of a run; those that follow `out` may change when it goes on."""

    hf: Path
    data: Path
    mesh: str
    zero: int
    steps: int
    batch: int
    seq: int
    lr: float
    seed: int
    dtype: str
    out: Path
    save_every: int
    machine: str = ""
    data_dtype: str = ""
    resume: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """The options as plain values, with absolute paths."""
        every = asdict(self).items()
        return {k: str(v.resolve()) if isinstance(v, Path) else v for k, v in every}

    @property
    def lasting(self) -> dict[str, Any]:
        """The options that a run keeps."""
        every = self.settings
        return {k: every[k] for k in [*every][: [*every].index("out")]}


def train_hf(o: Options, console: Console) -> dict[str, Any]:
    """Trains the model of `o.hf` and saves it as a HuggingFace folder. Returns the folders of the
    run and of the model, the mesh and the number of steps.

    A run in `o.out` goes on after its newest checkpoint. Raises UsageError if the options do not
    fit, and the errors of the parts.
    """
    asked = _asked(o)
    goes_on = _decided("train: folder", lambda: _begun(o))
    source = Described.read(o.hf)
    words = Words(
        o.data, o.out / TEXT, source.raw, source.folder, source.has_weights, o.data_dtype or None
    )
    by_first("train: text", words.prepare)
    tokens = words.source()
    source = replace(source, raw={**source.raw, **words.special_tokens()})
    lm = causal_lm(source, o.batch, o.seq, o.seed)
    console.print(f"model: {lm.name}\ndata : {tokens}\nrun  : {o.out}\n", highlight=False)

    chosen = asked or _found(o, lm, console)
    mesh, strategy = chosen.mesh, chosen.strategy
    step, optimizer = _step(o, lm, strategy)
    step = step.under(ScheduleOptions(**dict(chosen.options)))
    model = lm.model(mesh, strategy, **dict(chosen.choices))
    state = optimizer.init(model.parameters(), strategy)
    loader = create_distributed_dataloader(
        {
            "data": tokens, "global_batch_size": o.batch, "sequence_length": o.seq,
            "seed": o.seed, "epochs": math.inf,
        },
        mesh,
    )  # fmt: skip
    step.plan(model, state, *_batch(o, strategy, mesh))
    _show(console, chosen, step, model, state)
    live = TrainState(model, state, loader)
    run = Run(
        o.out, steps=o.steps, tokens_per_step=o.batch * o.seq, settings=o.settings,
        console=console, resume=goes_on,
    )  # fmt: skip
    guard = Guard(run, live, every=o.save_every, keep=2, resume=goes_on, mesh=mesh)
    with closing(loader), run, guard:
        for i in guard:
            with run.step(i) as row:
                batch = next(loader)
                row.update(step(live.weights, live.optimizer, batch["input_ids"], batch["labels"]))
    _save(o, model, words, console)
    return {
        "run": str(o.out), "model": str(o.out / MODEL), "mesh": dict(mesh.sizes), "steps": o.steps,
    }  # fmt: skip


# -- the folder -----------------------------------------------------------------------------------
def _decided(name: str, run: Callable[[], T]) -> T:
    """The result of `run` in the first process, in all of them."""
    value = by_first(name, run)
    found: T = value if process_count() == 1 else engine().from_first(name, 0, value, LIMIT_S)  # type: ignore[assignment]
    return found


def _begun(o: Options) -> bool:
    """Returns whether the run in `o.out` goes on; else its folder begins anew. Raises UsageError if
    the folder is none of a run, or if an option differs that decides the numbers."""
    options = o.out / OPTIONS
    if options.is_file() and o.resume and (o.out / CHECKPOINTS).is_dir():
        before = json.loads(options.read_text(encoding="utf-8"))
        changed = [name for name, value in o.lasting.items() if before.get(name) != value]
        if changed:
            said = ", ".join(f"--{name} {before.get(name)}" for name in changed)
            raise UsageError(
                f"train: the run in {str(o.out)!r} had other options: {said}",
                fix="give the same, another --out, or --no-resume to begin anew",
            )
        return True
    if o.out.is_file() or (o.out.is_dir() and any(o.out.iterdir()) and not options.is_file()):
        raise UsageError(
            f"train: {str(o.out)!r} is a file, or holds files that are not of a run",
            fix="name another --out",
        )
    for name in (TEXT, CHECKPOINTS, MODEL):
        shutil.rmtree(o.out / name, ignore_errors=True)
    for name in (PLAN, *CONTENTS):
        (o.out / name).unlink(missing_ok=True)
    write_whole(options, json.dumps(o.settings, indent=2).encode())
    return False


def _save(o: Options, model: Any, words: Words, console: Console) -> None:
    folder = o.out / MODEL

    def begin() -> None:  # what a save that was killed has left is not whole
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        words.copy_tokenizer(folder)

    if not _decided("train: model", lambda: (folder / CONFIG).is_file()):
        by_first("train: tokenizer", begin)
        save_hf(model, folder)  # config.json comes last
    console.print(f"\nmodel: {folder}  (transformers' AutoModelForCausalLM loads it)")


# -- the plan -------------------------------------------------------------------------------------
def _asked(o: Options) -> Candidate | None:
    """The mesh and strategy that `o` names, None for auto. Raises UsageError for other axes."""
    if o.mesh == "auto":
        return None
    sizes = {"dp": 1, **Mesh.parse(o.mesh).sizes}
    if wrong := sorted({*sizes} - {"dp", "tp"}):
        raise UsageError(
            f"train: --mesh: axis {wrong[0]!r} is not known", fix="name dp and tp, or auto"
        )
    return Candidate(tuple(sizes.items()), o.zero, ())


def _found(o: Options, lm: CausalLM, console: Console) -> Candidate:
    """The mesh, strategy and options that the search finds now, or that it found before."""
    kept = o.out / PLAN
    is_kept = _decided("train: kept plan", kept.is_file)
    if not is_kept:
        console.print("measuring the devices, and searching for the fastest plan ...")
        machine = _machine(o)  # all processes measure

        def search() -> None:
            found = _searched(o, lm, machine)
            data = {"candidate": asdict(found.best.candidate), "text": found.text}
            write_whole(kept, json.dumps(data, indent=1).encode())

        by_first("train: plan", search)
    data = json.loads(kept.read_text(encoding="utf-8"))
    console.print(data["text"], "", highlight=False, soft_wrap=True)
    return Candidate(**{k: _frozen(v) for k, v in data["candidate"].items()})


def _frozen(x: Any) -> Any:
    return tuple(map(_frozen, x)) if isinstance(x, list) else x


def _machine(o: Options) -> Machine:
    devices = device_count()
    if not o.machine:
        return calibrate(SHAPES[:5], large=1 << 18, rounds=2).machine
    machine = cluster_of(o.machine, devices)
    if machine.size != devices:
        raise UsageError(
            f"train: --machine {o.machine} has {machine.size} devices, {devices} are here",
            fix="measure these: tessera calibrate --out machine.yaml, or leave it out",
        )
    return machine


def _searched(o: Options, lm: CausalLM, machine: Machine) -> Found:
    def made(mesh: Mesh, strategy: Strategy, **choices: Any) -> Any:
        model = lm.sketch(mesh, strategy, **choices)
        step, optimizer = _step(o, lm, strategy)
        state = optimizer.init(model.parameters(), strategy)
        return step, (model, state, *_batch(o, strategy, mesh))

    def with_choices(mesh: Mesh, strategy: Strategy, *, remat: Any, sequence_parallel: Any) -> Any:
        return made(mesh, strategy, remat=remat, sequence_parallel=sequence_parallel)

    return best(with_choices if lm.has_choices else made, cluster=machine)


def _batch(o: Options, strategy: Strategy, mesh: Mesh) -> tuple[Tensor, Tensor]:
    ids = place(dist_tensor((o.batch, o.seq), dtype=int32), strategy, mesh, kind="batch")
    return ids, ids


def _show(
    console: Console, chosen: Candidate, step: Jit[..., Any], model: Module, state: Any
) -> None:
    """Prints the mesh, the layouts, the memory and the traffic of a planned step."""
    weights = model.parameters()
    gradients = {name: chosen.strategy.gradient(name, t.type) for name, t in weights.items()}
    held = {"weights": weights, "gradients": gradients, "optimizer": state}
    console.print(render_plan(chosen.mesh, step.graph, weights, held), "")


# -- the step -------------------------------------------------------------------------------------
def _step(o: Options, lm: CausalLM, strategy: Strategy) -> tuple[Jit[..., Any], Optimizer]:
    """A step as one program that changes model and state in place, and its optimizer: AdamW, with a
    warm-up over a twelfth of the steps, then half a cosine down to a twentieth."""
    rate = warmup_cosine(o.lr, o.steps // 12, o.steps + 1, end=o.lr / 20, start=o.lr / 20)
    optimizer = AdamW(rate, betas=(0.9, 0.95), weight_decay=0.1)

    @jit(donate=("model", "state"))
    def train_step(model: Any, state: dict[str, Any], ids: Tensor, labels: Tensor) -> Any:
        loss = lm.loss(model, ids, labels)
        weights = model.parameters()
        grads = grad(loss, weights, layout=strategy)
        grads, norm = clip_by_global_norm(grads, 1.0)
        weights, new_state = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new_state)
        return {"loss": loss, "grad_norm": norm}

    return train_step, optimizer


__all__ = ["Options", "train_hf"]
