"""Mistakes with checkpoints, safe points and guarded runs. A row: name, error, mistake, message."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console

import tessera as ts
from tessera import checkpoint, dist, elastic, nn, optim
from tessera.checkpoint.manifest import parse
from tessera.elastic import going_back
from tessera.train.guard import Guard, TrainState
from tessera.train.metrics import MetricsWriter
from tessera.train.run import Run
from tessera.train.saving import load_checkpoint
from tests.mesh.errors import MESH, ONES, OTHER, X, environment, row, split

# fmt: off
TABLE = ts.tensor([[0, 1], [1, 0]])
GPT = nn.GPT(nn.GPTConfig(4, 2, 2, 1, 1))
W = {"w": np.ones((2, 2), np.float32)}


def inside(mistake: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> Any:
    """What the mistake gives in a folder of its own, which `prepare` has filled."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            prepare()
            return mistake()
        finally:
            os.chdir(here)


def saved() -> None:
    checkpoint.save("a", W, {"step": ts.tensor(0)}, async_io=False, root="all", quiet=True)


def torchs() -> None:
    """As torch.distributed.checkpoint.save leaves it."""
    Path("theirs").mkdir()
    Path("theirs/.metadata").touch()


def moved() -> None:
    saved()
    Path("all/a").rename("all/b")


def later() -> None:
    saved()
    path = Path("all/a/manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


def number() -> None:
    checkpoint.save("n", W, {"n": 3}, async_io=False, root="all", quiet=True)


def huge() -> None:
    """A manifest that somebody has made, with a digest that fits."""
    saved()
    path = Path("all/a/manifest.json")
    made = parse(path.read_bytes(), "all/a")
    w, n = made.tensors["tensors/w"], 1 << 50
    w.shape[:] = w.pieces[0].shape[:] = [n, 1]
    w.pieces[0] = w.pieces[0].model_copy(update={"bytes": 4 * n})
    path.write_bytes(made.to_json())


def others() -> None:
    Path("hf").mkdir()
    Path("hf/model.safetensors").touch()


class Foreign:
    def state_dict(self) -> dict[str, Any]:
        return {}


def guarded(mistake: Callable[[Guard], Any], root: str = "all", **how: Any) -> Any:
    state = {"step": ts.tensor(0)}
    run = Run("run", steps=2, tokens_per_step=1, console=Console(file=io.StringIO()), resume=True)
    with run:
        return mistake(Guard(run, TrainState({"w": ts.tensor(W["w"])}, state), root=root, **how))


def at_most_100_bytes(mistake: Callable[[], Any]) -> Any:
    with patch("tessera.checkpoint.listing.MOST_BYTES", 100):
        return inside(mistake, saved)


def many(mistake: Callable[[], Any]) -> Any:
    with patch("tessera.elastic.lost.process_count", lambda: 2):
        return mistake()


def safe_point() -> None:
    """What a loop of a program before has left."""
    state = {"x": split("[8@dp, 4]")}
    for step in elastic.steps(state, 1):
        with step:
            state["x"] = state["x"] + 1
    going_back._loops = 0


def after(mistake: Callable[[], Any]) -> Any:
    first = patch("tessera.elastic.going_back._loops", 0)
    quiet = contextlib.redirect_stderr(io.StringIO())
    with environment(TESSERA_ELASTIC="memory"), quiet, dist.elastic(), first:
        return inside(mistake, safe_point)


# -- checkpoints -----------------------------------------------------------------------------------
row("a checkpoint that is not atomic", ts.UsageError,
    lambda: checkpoint.save("a", W, atomic=False), """
checkpoint.save: every checkpoint is atomic
  at  : AT
  fix : leave out atomic=False: it would save nothing
""")
row("a folder for whether it is atomic", ts.UsageError,
    lambda: checkpoint.save("a", {}, {}, "runs"), """
checkpoint.save: atomic cannot be 'runs'
  at  : AT
  fix : give a folder by name: root='runs'
""")
row("the word for the newest as a tag", ts.UsageError,
    lambda: checkpoint.save("latest", {}), """
checkpoint: tag cannot be 'latest'
  at  : AT
  fix : that word stands for the newest of all; a name of up to 128 letters, digits, ".", "_", "-", as "step_1000"
""")  # noqa: E501
row("state that is no JSON", ts.UsageError,
    lambda: checkpoint.save("a", W, state={"x": {1, 2}}), """
checkpoint.save: state cannot be written as JSON: it holds an object of type set
  at  : AT
  fix : give dicts, lists, texts and numbers; tensors go into tensors= or optimizer=
""")
row("a loader for its position", ts.UsageError,
    lambda: checkpoint.save("a", W, state=GPT), """
checkpoint.save: state cannot be written as JSON: it holds an object of type GPT
  at  : AT
  fix : give what its state_dict() gives
""")
row("a module within a tree", ts.UsageError,
    lambda: checkpoint.save("a", {"model": GPT, "w": W}), """
checkpoint.save: tensors/model/config cannot be an object of type GPTConfig
  at  : AT
  fix : give the state_dict() of a module that is within a tree; a load fills it
""")
row("a folder for the optimizer's state", ts.UsageError,
    lambda: checkpoint.save("a", W, "runs/a"), """
checkpoint.save: optimizer cannot be 'runs/a'
  at  : AT
  fix : give a folder by name: root='runs/a'
""")
row("a folder for the optimizer's state of a load", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", W, Path("all")), saved), """
checkpoint.load: optimizer cannot be PosixPath('all')
  at  : AT
  fix : give a folder by name: root='all'
""")
row("a checkpoint of PyTorch", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="theirs"), torchs), """
checkpoint: 'theirs' has no checkpoint
  at  : AT
  fix : PyTorch wrote it: load it there, and give model.load_state_dict its arrays by name
""")
row("a checkpoint taken apart", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", root="all")["tensors"], saved), """
checkpoint.load gives one value, which is no dict and no tuple
  at  : AT
  fix : write found = checkpoint.load(...), then found.tensors, found.optimizer
""")
row("a root for a tag", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("all"), saved), """
checkpoint: 'all' is not in 'checkpoints'
  there are : none
  at        : AT
  fix       : that is a root: write root='all'
""")
row("a tag that is not there", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("b", root="all"), saved), """
checkpoint: 'b' is not in 'all'
  there are : a
  at        : AT
  fix       : name one that is there, or leave out the tag for the latest
""")
row("a checkpoint whose folder was renamed", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("b", root="all"), moved), """
checkpoint: the manifest of 'all/b' is that of 'a'
  at  : AT
  fix : it was moved or copied here: rename its folder back
""")
row("a manifest that is too large to be one", ts.CheckpointError,
    lambda: at_most_100_bytes(lambda: checkpoint.load("a", root="all")), """
checkpoint: the manifest of 'all/a' is too large
  at  : AT
  fix : load another checkpoint
""")
row("a manifest of a later version", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("a", root="all"), later), """
checkpoint: the manifest of 'all/a' cannot be used
  reason : it has version 99, and this Tessera reads up to 1
  at     : AT
  fix    : load another checkpoint: `tessera ckpt ls` shows which are whole
""")
row("weights as whole numbers", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", {"w": TABLE}, root="all"), saved), """
checkpoint.load: tensors/w was saved as f32, and cannot be i32
  at  : AT
  fix : give a tensor of its kind
""")
row("a path in place of a tag", ts.UsageError, lambda: checkpoint.load("runs/a"), """
checkpoint: tag cannot be 'runs/a'
  at  : AT
  fix : write root='runs' and the tag 'a'
""")
row("weights before the tag", ts.UsageError, lambda: checkpoint.save(W, "a"), """
checkpoint: tag cannot be an object of type dict
  at  : AT
  fix : the tag comes first: a name of up to 128 letters, digits, ".", "_", "-", as "step_1000"
""")
row("a root that nothing reads", ts.UsageError,
    lambda: checkpoint.save("a", W, root="ftp://host/a"), """
checkpoint: root cannot be 'ftp://host/a'
  at  : AT
  fix : name a folder, "gs://bucket/path" or "s3://bucket/path"
""")
row("two tensors of one name", ts.UsageError,
    lambda: checkpoint.save("a", {"b/w": X, "b": {"w": X}}), """
checkpoint: 'tensors/b/w' is the name of two values
  at  : AT
  fix : rename a key: a name has all keys on the way to a value, with "/" between them
""")
row("an optimizer in place of its state", ts.UsageError,
    lambda: checkpoint.save("a", W, optim.AdamW(1e-3)), """
checkpoint.save: optimizer cannot be an object of type AdamW
  at  : AT
  fix : give the optimizer's state: what its init(weights) made, or the last step
""")
row("a module of another library", ts.UsageError,
    lambda: checkpoint.save("a", Foreign()), """
checkpoint.save: tensors cannot be an object of type Foreign
  at  : AT
  fix : give what its state_dict() gives: tensors as tensors=, a position as state=
""")
row("a save within a compiled function", ts.UsageError,
    lambda: ts.jit(lambda x: checkpoint.save("a", W) or x)(X), """
checkpoint.save: inside of a compiled function it runs once, when that is recorded
  at  : AT
  fix : call it outside, with what the function returns
""")
row("a load within a compiled function", ts.UsageError,
    lambda: ts.jit(lambda x: checkpoint.load("a") and x)(X), """
checkpoint.load: inside of a compiled function it runs once, when that is recorded
  at  : AT
  fix : call it outside, with what the function returns
""")
row("a policy of steps without a step", ts.UsageError,
    lambda: inside(lambda: checkpoint.save("a", W, keep=checkpoint.Keep(1, every=10))), """
checkpoint.save: step cannot be None
  at  : AT
  fix : say it: every=10 asks for it
""")
row("the best by a metric that is misspelt", ts.UsageError,
    lambda: inside(lambda: checkpoint.save(
        "a", W, metrics={"step_s": 1, "loss": 2}, keep=checkpoint.Keep(best=1, metric="val_loss"),
    )), """
checkpoint.save: metrics has no 'val_loss', by which best=1 stay
  metrics : loss, step_s
  at      : AT
  fix     : name one of them, Keep(metric=...), or leave out metrics= where it is not known
""")
row("metrics that are one number", ts.UsageError,
    lambda: inside(lambda: checkpoint.save("a", W, metrics=2.5)), """
checkpoint: metrics cannot be 2.5
  at  : AT
  fix : give a dict, such as {"loss": 2.5}
""")
row("a pattern of no name", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", W, root="all", only="v*"), saved), """
checkpoint.load: only: no name in 'a' is like 'v*'
  names : w, step
  at    : AT
  fix   : a name as it is, or with "*" for any letters: only="blocks.*"
""")
row("no pattern at all", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", root="all", only=[]), saved), """
checkpoint.load: only cannot be []
  at  : AT
  fix : leave it out for all
""")
row("floats that are to be whole numbers", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", root="all", dtype="i32"), saved), """
checkpoint.load: dtype cannot be 'i32'
  at  : AT
  fix : it is that of all floats: give one of them
""")
row("a checkpoint as a root", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="all/a"), saved), """
checkpoint: 'all/a' has no checkpoint
  at  : AT
  fix : it is a checkpoint itself: write root='all' and 'a'
""")
row("a file as a root", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="all/a/manifest.json"), saved), """
checkpoint: 'all/a/manifest.json' has no checkpoint
  at  : AT
  fix : it is a file: name a folder, the root that checkpoint.save wrote to
""")
row("a model of others as a root", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="hf"), others), """
checkpoint: 'hf' has no checkpoint
  at  : AT
  fix : it holds a model of others: checkpoint.load_hf('hf')
""")
row("a tensor where a number was saved", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("n", optimizer={"n": X}, root="all"), number), """
checkpoint.load: 1 of optimizer do not fit 'n'
  n   : is 3, and no tensor
  at  : AT
  fix : give the state as it was saved; for another optimizer or dtype load the model alone, then state = optimizer.init(model)
""")  # noqa: E501
row("a tensor that there is no memory for", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("a", root="all"), huge), """
checkpoint: there is no memory for tensors/w of 'a'
  type  : f32[1125899906842624, 1]
  bytes : 4,503,599,627,370,496
  at    : AT
  fix   : give a tensor that lies split over devices, or load a part: only=...
""")
row("an export to nothing", ts.UsageError,
    lambda: checkpoint.export(None), """
checkpoint.export: to cannot be None
  at  : AT
  fix : name a .safetensors or a .npz file
""")
row("an export of another kind", ts.UsageError,
    lambda: inside(lambda: checkpoint.export("w.pt", root="all"), saved), """
checkpoint.export: 'w.pt' ends in '.pt'
  at  : AT
  fix : name a .safetensors or a .npz file; it comes before the tag
""")
row("an export of what is not there", ts.UsageError,
    lambda: inside(lambda: checkpoint.export("w.npz", root="all", only="v*"), saved), """
checkpoint.export: no tensor of 'a' matches 'v*'
  at  : AT
  fix : `tessera ckpt show` lists their names
""")
row("a recipe's checkpoint that a recipe did not save", ts.CheckpointError,
    lambda: inside(lambda: load_checkpoint("all"), saved), """
load_checkpoint: 'a' in 'all' has no configuration
  at  : AT
  fix : save_checkpoint did not write it: read it with checkpoint.load
""")

# -- guarded runs ----------------------------------------------------------------------------------
row("a guarded run on a checkpoint without a step", ts.CheckpointError,
    lambda: inside(lambda: guarded(lambda g: g.__enter__()), saved), """
Guard: 'a' has no step to go on after
  at  : AT
  fix : save with step=, or name another folder
""")
row("a guarded run from a folder without checkpoints", ts.CheckpointError,
    lambda: inside(lambda: guarded(lambda g: g.__enter__(), "none", resume="other")), """
Guard: there is no checkpoint to go on from in 'other'
  at  : AT
  fix : name the root that it was saved to, or leave out resume=
""")

# -- safe points -----------------------------------------------------------------------------------
row("a device of another process is dropped", ts.UsageError,
    lambda: many(lambda: elastic.drop(1)), """
elastic.drop: a device of another process cannot be dropped
  at  : AT
  fix : end a process of the run, or stop it: tessera run --elastic goes on
""")
row("a safe point of another state", ts.UsageError,
    lambda: after(lambda: [*elastic.steps({"x": split("[8@dp, 4]"), "y": X}, 1)]), """
elastic: the safe point after step 1 has no 'y'
  at  : AT
  fix : give elastic.steps the same state each time; keep outside what grows, as a log
""")
row("a state on two meshes", ts.MeshError,
    lambda: elastic.steps({"x": split("[8@dp, 4]"), "y": split("[8@dp, 4]", OTHER)}, 2), """
elastic.steps: the tensors of the state lie on 2 meshes
  mesh : Mesh(('dp', 'tp'), shape=(2, 4))
  mesh : Mesh(('dp', 'tp'), shape=(4, 2))
  at   : AT
  fix  : pass the whole mesh: elastic.steps(state, stop, mesh), or Guard(..., mesh=mesh)
""")
row("a state on no mesh", ts.MeshError, lambda: elastic.steps({"x": X}, 2), """
elastic.steps: no tensor of the state lies on a mesh
  at  : AT
  fix : pass the whole mesh: elastic.steps(state, stop, mesh), or Guard(..., mesh=mesh)
""")
row("a resize inside of a compiled function", ts.UsageError,
    lambda: ts.jit(lambda x: dist.resize(OTHER, x))(ts.tensor(ONES, mesh=MESH)), """
dist.resize: a compiled function runs on the mesh that it is recorded for
  at  : AT
  fix : resize between two calls of the function
""")


def in_a_row(mistake: Callable[[Any], Any], later: bool = False) -> Any:
    def run() -> Any:
        with Run("run", steps=1, tokens_per_step=1, console=Console(file=io.StringIO())) as made:
            with made.step(0) as row:
                if not later:
                    return mistake(row)
            return mistake(row)

    return inside(run)


def in_metrics(mistake: Callable[[MetricsWriter], Any]) -> Any:
    def write() -> Any:
        with MetricsWriter("m") as metrics:
            return mistake(metrics)

    return inside(write)


row("a value for a row whose step is over", ts.UsageError,
    lambda: in_a_row(lambda row: row.update(val_loss=2.0), later=True), """
run: row['val_loss'] is set after step 0, whose row is written
  at  : AT
  fix : set it inside of `with run.step(...) as row:`
""")
row("a row with a step of its own", ts.UsageError,
    lambda: in_a_row(lambda row: row.setdefault("step", 99)), """
run: row['step'] is what the run writes itself
  at  : AT
  fix : the number of a step is run.step(number); give yours another name
""")
row("a row with an array", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"x": np.ones(2)})), """
metrics: 'x' in a row cannot be array([1., 1.])
  at  : AT
  fix : give a number of it, such as its mean; of tensors ts.debug.statistics gives some
""")
row("a row with a dict", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"x": {"a": X}})), """
metrics: 'x' in a row cannot be {'a': <Tensor f32[2, 3]>}
  at  : AT
  fix : give each of its numbers a key of its own, such as 'x/a'
""")
row("a row with an object", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"x": 2j})), """
metrics: 'x' in a row cannot be 2j
  at  : AT
  fix : give a number or a text
""")
row("a step among the values of a row", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"step": 1})), """
metrics: 'step' in a row cannot be 1
  at  : AT
  fix : the number of the step comes first: log(step, values)
""")
