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
from tessera import checkpoint, dist, elastic
from tessera.elastic import going_back
from tessera.train.guard import Guard, TrainState
from tessera.train.run import Run
from tessera.train.saving import load_checkpoint
from tests.mesh.errors import MESH, ONES, OTHER, X, environment, row, split

# fmt: off
TABLE = ts.tensor([[0, 1], [1, 0]])
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


def moved() -> None:
    saved()
    Path("all/a").rename("all/b")


def later() -> None:
    saved()
    path = Path("all/a/manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


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
row("state that is no JSON", ts.UsageError,
    lambda: checkpoint.save("a", W, state={"x": {1, 2}}), """
checkpoint.save: state cannot be written as JSON: Object of type set is not JSON serializable
  at  : AT
  fix : give dicts, lists, texts and numbers; tensors go into tensors= or optimizer=
""")
row("a tag that is not there", ts.CheckpointError,
    lambda: inside(lambda: checkpoint.load("b", root="all"), saved), """
checkpoint: 'b' is not in 'all'
  there are : a
  at        : AT
  fix       : name one of them, or leave out the tag for the latest
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
row("an export of another kind", ts.UsageError,
    lambda: inside(lambda: checkpoint.export("w.pt", root="all"), saved), """
checkpoint.export: 'w.pt' ends in '.pt'
  at  : AT
  fix : name a .safetensors or a .npz file
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
  fix : give elastic.steps the same state each time
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
