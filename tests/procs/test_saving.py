"""Models and checkpoints of several processes: written once, and whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tests.cases import LONG
from tests.procs.harness import Ended, run_ranks
from tests.quickly import FLAGS

pytest.importorskip("safetensors")


def both(body: str, folder: Path) -> tuple[list[Ended], Path]:
    """Runs two processes; returns the exit of each, and their folder."""
    out = folder / "out"
    ended = run_ranks(body, folder, limit_s=240, TEST_OUT=str(out), XLA_FLAGS=FLAGS)
    return ended, out


BODY = """
from pathlib import Path
from tessera import nn
from tessera.checkpoint import load_hf, save_hf

OUT = Path(os.environ["TEST_OUT"])
CONFIG = nn.GPTConfig(vocab=16, seq=8, d=8, layers=2, heads=2, norm="rms", activation="swiglu",
                      positions="rotary")
def made():
    model, draw = nn.GPT(CONFIG), np.random.default_rng(0)
    types = {n: w.type for n, w in model.parameters().items()}
    model.load_parameters(
        {n: ts.tensor(draw.normal(size=t.shape).astype(np.float32)) for n, t in types.items()}
    )
    return model
def sums(model):
    return [float(np.abs(w.numpy()).sum()) for w in model.parameters().values()]
"""
SAVE = (
    BODY
    + """
model = made()
alone = sums(model)
plan = dist.strategy("zero_redundancy_optimizer", stage=3)
split = dist.place(model, plan, MESH)
save_hf(split, OUT / "split", shard_bytes=2000)
there = sorted(p.name for p in (OUT / "split").iterdir())
assert sums(load_hf(OUT / "split")) == alone
far = dist.place(made(), plan, dist.Mesh(("dp",), devices=[1]))
save_hf(far, OUT / "far")
save_hf(made(), OUT / "local")
for folder in ("far", "local"):
    assert len(sums(load_hf(OUT / folder))) == len(alone)
try:
    save_hf(split, OUT / "split")
except ts.UsageError as error:
    print(str(error).splitlines()[0].replace(str(OUT), "OUT"))
if RANK == 0:
    save_hf(made(), OUT / "first alone")
print(len(there), there[0], there[-1])
"""
)


@LONG
def test_a_model_is_written_once_and_whole(tmp_path: Path) -> None:
    ended, out = both(SAVE, tmp_path)
    for e in ended:
        assert e.code == 0, e
        said, names = e.out.splitlines()
        assert said == "save_hf: 'OUT/split' holds a model already"
        assert names.split()[1:] == ["config.json", "model.safetensors.index.json"]
    for folder in out.iterdir():
        assert not [p for p in folder.iterdir() if "part" in p.name]
    index = json.loads((out / "split" / "model.safetensors.index.json").read_text())
    files = {p.name for p in (out / "split").glob("*.safetensors")}
    assert {*index["weight_map"].values()} == files
    assert len(files) > 2
    loaded = ts.checkpoint.load_hf(out / "first alone")
    assert np.isfinite(loaded.parameters()["embed.weight"].numpy()).all()


TRAIN = (
    BODY
    + """
from tessera.train import recipe
from tessera.train.saving import checkpoints, load_checkpoint, save_checkpoint
config = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2,
          "sequence_length": 4, "batch_size": 4, "total_steps": 9, "keep_checkpoints": 2}
plan = dist.strategy("zero_redundancy_optimizer", stage=3)
weights = recipe.initialize_model_weights(config)
state = recipe.initialize_optimizer_state(weights, config)
whole = {n: w.numpy() for n, w in weights.items()}
weights = dist.place(weights, plan, MESH)
for step in (1, 2, 3):
    save_checkpoint(weights, state, step, OUT)
    assert checkpoints(OUT)[-1] == step
back = load_checkpoint(OUT, like=(weights, state))
layouts = {w.layout for w in back.weights.values()}
assert layouts == {w.layout for w in weights.values()} and any("@dp" in x for x in layouts)
for name, w in back.weights.items():
    full = dist.redistribute(w, str([*w.shape]))
    np.testing.assert_array_equal(full.numpy(), whole[name])
print(checkpoints(OUT))
"""
)


def test_a_checkpoint_is_written_once_and_comes_back(tmp_path: Path) -> None:
    ended, out = both(TRAIN, tmp_path)
    for e in ended:
        assert e.out.splitlines() == ["[2, 3]"], e
    assert {p.name for p in out.iterdir()} == {"step-00000002", "step-00000003"}


FAIL = (
    BODY
    + """
model = dist.place(made(), dist.strategy("zero_redundancy_optimizer", stage=3), MESH)
OUT.mkdir(exist_ok=True)
(OUT / "file").write_text("no folder")
try:
    save_hf(model, OUT / "file" / "model")
except ts.UsageError as error:
    print(str(error).splitlines()[0].replace(str(OUT), "OUT"))
if RANK == 1:
    ts.dist.set_collective_timeout(1.0)
    try:
        save_hf(made(), OUT / "second alone")
    except ts.BackendError as error:
        print(str(error).splitlines()[0].replace(str(OUT), "OUT"))
    (OUT / "said").touch()
until_s = time.monotonic() + 50
while not (OUT / "said").exists() and time.monotonic() < until_s:
    time.sleep(0.1)
"""
)


def test_what_fails_in_one_process_fails_in_all(tmp_path: Path) -> None:
    (first, second), _ = both(FAIL, tmp_path)
    said = "save_hf: 'OUT/file/model' cannot be written: Not a directory"
    assert first.out.splitlines() == [said], first
    assert second.out.splitlines() == [
        said,
        "save_hf 'OUT/second alone': the first process did not come within 1 s",
    ], second
