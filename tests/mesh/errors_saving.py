"""Mistakes with checkpoints, safe points and guarded runs. A row: name, error, mistake."""

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
from tessera.elastic import rollback
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
    """Runs `mistake` in a temporary folder that `prepare` has filled."""
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
    """The files of torch.distributed.checkpoint.save."""
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
    """A forged manifest with a matching digest."""
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
    with patch("tessera.elastic.device_loss.process_count", lambda: 2):
        return mistake()


def safe_point() -> None:
    """Leaves a safe point, as of an earlier program's loop."""
    state = {"x": split("[8@dp, 4]")}
    for step in elastic.steps(state, 1):
        with step:
            state["x"] = state["x"] + 1
    rollback._loops = 0


def after(mistake: Callable[[], Any]) -> Any:
    first = patch("tessera.elastic.rollback._loops", 0)
    quiet = contextlib.redirect_stderr(io.StringIO())
    with environment(TESSERA_ELASTIC="memory"), quiet, dist.elastic(), first:
        return inside(mistake, safe_point)


# -- checkpoints -----------------------------------------------------------------------------------
row("a checkpoint that is not atomic", ts.UsageError,
    lambda: checkpoint.save("a", W, atomic=False))
row("a folder for whether it is atomic", ts.UsageError,
    lambda: checkpoint.save("a", {}, {}, "runs"))
row("the word for the newest as a tag", ts.UsageError,
    lambda: checkpoint.save("latest", {}))
row("state that is no JSON", ts.UsageError,
    lambda: checkpoint.save("a", W, state={"x": {1, 2}}))
row("a loader for its position", ts.UsageError,
    lambda: checkpoint.save("a", W, state=GPT))
row("a module within a tree", ts.UsageError,
    lambda: checkpoint.save("a", {"model": GPT, "w": W}))
row("a folder for the optimizer's state", ts.UsageError,
    lambda: checkpoint.save("a", W, "runs/a"))
row("a folder for the optimizer's state of a load", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", W, Path("all")), saved))
row("a checkpoint of PyTorch", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="theirs"), torchs))
row("a checkpoint taken apart", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", root="all")["tensors"], saved))
row("a root for a tag", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("all"), saved))
row("a tag that is not there", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("b", root="all"), saved))
row("a checkpoint whose folder was renamed", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("b", root="all"), moved))
row("a manifest that is too large to be one", ts.CheckpointError,
    lambda: at_most_100_bytes(lambda: checkpoint.load("a", root="all")))
row("a manifest of a later version", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("a", root="all"), later))
row("weights as whole numbers", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", {"w": TABLE}, root="all"), saved))
row("a path in place of a tag", ts.UsageError, lambda: checkpoint.load("runs/a"))
row("weights before the tag", ts.UsageError, lambda: checkpoint.save(W, "a"))
row("a root that nothing reads", ts.UsageError,
    lambda: checkpoint.save("a", W, root="ftp://host/a"))
row("two tensors of one name", ts.UsageError,
    lambda: checkpoint.save("a", {"b/w": X, "b": {"w": X}}))
row("an optimizer in place of its state", ts.UsageError,
    lambda: checkpoint.save("a", W, optim.AdamW(1e-3)))
row("a module of another library", ts.UsageError,
    lambda: checkpoint.save("a", Foreign()))
row("a save within a compiled function", ts.UsageError,
    lambda: ts.jit(lambda x: checkpoint.save("a", W) or x)(X))
row("a load within a compiled function", ts.UsageError,
    lambda: ts.jit(lambda x: checkpoint.load("a") and x)(X))
row("a policy of steps without a step", ts.UsageError,
    lambda: inside(lambda: checkpoint.save("a", W, keep=checkpoint.Keep(1, every=10))))
row("the best by a metric that is misspelt", ts.UsageError,
    lambda: inside(lambda: checkpoint.save(
        "a", W, metrics={"step_s": 1, "loss": 2}, keep=checkpoint.Keep(best=1, metric="val_loss"),
    )))
row("metrics that are one number", ts.UsageError,
    lambda: inside(lambda: checkpoint.save("a", W, metrics=2.5)))
row("a pattern of no name", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", W, root="all", only="v*"), saved))
row("no pattern at all", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", root="all", only=[]), saved))
row("floats that are to be whole numbers", ts.UsageError,
    lambda: inside(lambda: checkpoint.load("a", root="all", dtype="i32"), saved))
row("a checkpoint as a root", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="all/a"), saved))
row("a file as a root", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="all/a/manifest.json"), saved))
row("a model of others as a root", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load(root="hf"), others))
row("a tensor where a number was saved", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("n", optimizer={"n": X}, root="all"), number))
row("a tensor that there is no memory for", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("a", root="all"), huge))
row("an export to nothing", ts.UsageError,
    lambda: checkpoint.export(None))
row("an export of another kind", ts.UsageError,
    lambda: inside(lambda: checkpoint.export("w.pt", root="all"), saved))
row("an export of what is not there", ts.UsageError,
    lambda: inside(lambda: checkpoint.export("w.npz", root="all", only="v*"), saved))
row("a recipe's checkpoint that a recipe did not save", ts.CheckpointError,
    lambda: inside(lambda: load_checkpoint("all"), saved))

# -- guarded runs ----------------------------------------------------------------------------------
row("a guarded run on a checkpoint without a step", ts.CheckpointError,
    lambda: inside(lambda: guarded(lambda g: g.__enter__()), saved))
row("a guarded run from a folder without checkpoints", ts.CheckpointError,
    lambda: inside(lambda: guarded(lambda g: g.__enter__(), "none", resume="other")))

# -- safe points -----------------------------------------------------------------------------------
row("a device of another process is dropped", ts.UsageError,
    lambda: many(lambda: elastic.drop(1)))
row("a safe point of another state", ts.UsageError,
    lambda: after(lambda: [*elastic.steps({"x": split("[8@dp, 4]"), "y": X}, 1)]))
row("a state on two meshes", ts.MeshError,
    lambda: elastic.steps({"x": split("[8@dp, 4]"), "y": split("[8@dp, 4]", OTHER)}, 2))
row("a state on no mesh", ts.MeshError, lambda: elastic.steps({"x": X}, 2))
row("a resize inside of a compiled function", ts.UsageError,
    lambda: ts.jit(lambda x: dist.resize(OTHER, x))(ts.tensor(ONES, mesh=MESH)))


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
    lambda: in_a_row(lambda row: row.update(val_loss=2.0), later=True))
row("a row with a step of its own", ts.UsageError,
    lambda: in_a_row(lambda row: row.setdefault("step", 99)))
row("a row with an array", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"x": np.ones(2)})))
row("a row with a dict", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"x": {"a": X}})))
row("a row with an object", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"x": 2j})))
row("a step among the values of a row", ts.UsageError,
    lambda: in_metrics(lambda m: m.log(0, {"step": 1})))
