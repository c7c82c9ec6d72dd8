"""Recipe runs: microbatches, gradient sums over devices, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tessera as ts
from tessera import dist
from tessera.data import create_dataloader
from tessera.train import recipe
from tessera.train.accumulate import accumulated, micro_batches
from tessera.train.config import checked
from tessera.train.guard import Guard, TrainState
from tessera.train.memory import held
from tessera.train.run import Run
from tessera.train.saving import checkpoints, load_checkpoint, save_checkpoint
from tests.cases import LONG
from tests.mesh.recipes import (
    Tree,
    batch,
    begun,
    grads_of,
    stepped,
    sums,
)


# -- accumulation ---------------------------------------------------------------------------------
def test_ignored_labels_weigh_nothing() -> None:
    data = batch()
    data["labels"][0, :] = -100
    data["labels"][2, 1:5] = -100
    _c, weights, _ = begun()

    def loss(part: Any, weights: Any) -> ts.Tensor:
        return recipe.compute_loss(recipe.transformer_model, part, weights)

    want, wanted = ts.jit(lambda d, w: accumulated(loss, d, w, 1))(data, weights)
    got, grads = ts.jit(lambda d, w: accumulated(loss, d, w, 4))(data, weights)
    assert got.item() == pytest.approx(want.item(), abs=1e-5)
    for name, g in grads.items():
        np.testing.assert_allclose(g.numpy(), wanted[name].numpy(), atol=1e-5)


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=LONG)])
def test_dropout_falls_alike_where_layers_are_computed_again(steps: int) -> None:
    found = []
    for again in (False, True):
        ts.seed(5)
        found.append(
            grads_of(
                dropout=0.5, accumulation_steps=steps, gradient_checkpointing=again, num_layers=2
            )
        )
    (loss, grads), (other, others) = found
    assert loss == pytest.approx(other, abs=1e-6)
    for name, g in grads.items():
        np.testing.assert_allclose(g, others[name], atol=1e-6)
    plain, _ = grads_of(accumulation_steps=steps, num_layers=2)
    assert abs(plain - loss) > 1e-4


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_summed_over_devices_after_the_last_microbatch(stage: int) -> None:
    """Whole gradients are summed once. Split gradients are reduced in each microbatch, since their
    sum would be held whole otherwise."""
    step, *args = stepped(stage, dist.Mesh(("dp",), devices=2))
    found = sums(step.programs[0], args[1], *args)
    assert found and set(found.values()) == ({4} if stage == 3 else {1}), found


def test_stages_that_split_weights_add_up_microbatches_as_those_that_do_not() -> None:
    """Under `mesh_invariant`: the loss and the weights after two steps, also on a folded mesh."""
    seen = set()
    with dist.deterministic(level="mesh_invariant"):
        for stage, mesh in (
            (1, dist.Mesh(("dp",), devices=2)),
            (3, dist.Mesh(("dp",), devices=2)),
            (3, dist.Mesh(("dp",), devices=2).fold(onto="dp=1")),
        ):
            step, rows, weights, state = stepped(stage, mesh, mixed_precision=True)
            for _ in range(2):
                loss, weights, state = step(rows, weights, state)
            seen.add((loss.item(), *(w.numpy().tobytes() for w in weights.values())))
    assert len(seen) == 1


def test_microbatches_on_a_mesh_move_nothing_and_reduce_once(mesh: dist.Mesh) -> None:
    plan = dist.strategy("data_parallel")
    _c, weights, _ = begun()
    whole = ts.jit(
        lambda data, w: accumulated(
            lambda part, w: recipe.compute_loss(recipe.transformer_model, part, w), data, w, 1
        )
    )
    want, wanted = whole(batch(8), weights)
    placed = dist.place(weights, plan, mesh)
    data = dist.place(batch(8), plan, mesh, kind="batch")

    @ts.jit
    def run(data: Any, weights: Any) -> Any:
        return accumulated(
            lambda part, w: recipe.compute_loss(recipe.transformer_model, part, w), data, weights, 4
        )

    loss, grads = run(data, placed)
    assert loss.item() == pytest.approx(want.item(), abs=1e-5)
    for name, g in grads.items():
        np.testing.assert_allclose(g.numpy(), wanted[name].numpy(), atol=1e-5)
    gathers = [n for n, _ in run.graph.collectives() if n.op in ("all_gather", "all_to_all")]
    assert not gathers


def test_rows_that_do_not_divide() -> None:
    with pytest.raises(ts.ShapeError, match="give a batch whose rows are a multiple of 3"):
        micro_batches(batch(), 3)
    mesh = dist.Mesh(("dp",), devices=3)
    rows = ts.tensor(np.ones((8, 2)), mesh=mesh, layout="[8@dp, 2]")  # of sizes that differ
    with pytest.raises(ts.ShapeError, match="give a batch whose rows are a multiple of 6"):
        micro_batches({"x": rows}, 2)


# -- checkpoints ----------------------------------------------------------------------------------
SCALED = {"mixed_precision": "fp16", "loss_scale": "dynamic", "loss_scale_interval": 2}


@pytest.mark.parametrize(
    "keys", [SCALED, {"weight_dtype": "bf16"}, {"offload_optimizer_state": True}]
)
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    keys: Tree, tmp_path: Path
) -> None:
    c, weights, state = begun(**keys)
    step = recipe.make_step(c)
    loader = create_dataloader({**c, "data": np.arange(2000) % 32, "epochs": 10})
    batches = iter(loader)
    for n in range(4):
        if n == 2:
            save_checkpoint(weights, state, n, tmp_path, loader)
        loss, weights, state = step(next(batches), weights, state)
    again = load_checkpoint(tmp_path)
    assert again.step == 2 and again.optimizer_state["config"] == checked(c)
    if keys.get("offload_optimizer_state"):  # saving moves no state back to the devices
        assert held({"m": state["m"], "m again": again.optimizer_state["m"]}).device == 0
    other = create_dataloader({**c, "data": np.arange(2000) % 32, "epochs": 10})
    other.load_state_dict(again.loader)
    w, s = again.weights, again.optimizer_state
    for _, data in zip(range(2), other, strict=False):
        second, w, s = step(data, w, s)
    assert second.item() == loss.item()
    assert s["loss_scale"].item() == state["loss_scale"].item()
    for name, t in w.items():
        np.testing.assert_array_equal(t.numpy(), weights[name].numpy())


def test_a_checkpoint_is_loaded_onto_a_mesh(mesh: dist.Mesh, tmp_path: Path) -> None:
    c, weights, state = begun()
    save_checkpoint(weights, state, 7, tmp_path)
    plan = dist.strategy("zero_redundancy_optimizer", stage=1)
    like = dist.place(recipe.initialize_model_weights(c), plan, mesh)
    wanted = recipe.initialize_optimizer_state(like, c, plan)
    found = load_checkpoint(tmp_path, 7, like=(like, wanted))
    assert found.optimizer_state["m"]["head"].type is wanted["m"]["head"].type
    np.testing.assert_array_equal(found.weights["head"].numpy(), weights["head"].numpy())


def test_what_the_configuration_says_now_holds_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved configuration does not override the learning rate, the folder or
    `keep_checkpoints`."""
    monkeypatch.chdir(tmp_path)
    c, weights, state = begun(checkpoint_folder="old", keep_checkpoints=1)
    save_checkpoint(weights, state, 1)
    new = {**c, "learning_rate": 0.0, "checkpoint_folder": "new"}
    fresh = recipe.initialize_optimizer_state(weights, new)
    found = load_checkpoint("old", like=(weights, fresh))
    assert found.optimizer_state["config"] == checked(new)
    ones = {name: ts.ones(w.shape) for name, w in found.weights.items()}
    moved = recipe.apply_optimizer_update(found.weights, ones, found.optimizer_state)
    np.testing.assert_array_equal(moved["head"].numpy(), weights["head"].numpy())
    save_checkpoint(moved, found.optimizer_state, 2)
    assert checkpoints("old") == [1] and checkpoints("new") == [2]
    far = recipe.initialize_optimizer_state(weights, {**new, "offload_optimizer_state": True})
    away = load_checkpoint("old", like=(weights, far)).optimizer_state
    assert held({"m": away["m"]}).device == 0
    assert load_checkpoint("old").optimizer_state["config"] == checked(c)


@pytest.mark.parametrize(("before", "now", "want"), [
    ({}, {"mixed_precision": "fp16"}, 2.0**15),
    ({"loss_scale": 128.0}, {"loss_scale": 1024.0}, 1024.0),
    ({"loss_scale": 128.0}, {"loss_scale": "dynamic"}, 2.0**15),
    ({"mixed_precision": "fp16"}, {}, 1.0),
    ({"mixed_precision": "fp16"}, {"loss_scale": "dynamic"}, 7.0),
])  # fmt: skip
def test_only_a_scale_that_follows_overflow_goes_on(
    before: Tree, now: Tree, want: float, tmp_path: Path
) -> None:
    _, weights, state = begun(**before)
    state["loss_scale"] = ts.tensor(7.0)
    save_checkpoint(weights, state, 1, tmp_path)
    _, *like = begun(**now)
    assert load_checkpoint(tmp_path, like=like).optimizer_state["loss_scale"].item() == want
    live = TrainState(*like)
    run = Run(tmp_path / "run", steps=1, tokens_per_step=1, console=Console(quiet=True))
    with run, Guard(run, live, root=tmp_path):
        assert live.optimizer["loss_scale"].item() == want


def test_a_crash_while_saving_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a save by a thread is complete after its wait."""
    _, weights, state = begun()
    save_checkpoint(weights, state, 1, tmp_path)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(weights, state, 2, tmp_path)
    monkeypatch.undo()
    assert checkpoints(tmp_path) == [1] and load_checkpoint(tmp_path).step == 1
    save_checkpoint(weights, state, 2, tmp_path, async_io=True)
    assert load_checkpoint(tmp_path).step == 2


def test_checkpoints_that_cannot_be(tmp_path: Path) -> None:
    _c, weights, state = begun()
    with pytest.raises(ts.CheckpointError, match="has no checkpoint"):
        load_checkpoint(tmp_path)
    save_checkpoint(weights, state, 1, tmp_path)
    with pytest.raises(ts.CheckpointError, match=r"is not in .*\n.*known : step-00000001"):
        load_checkpoint(tmp_path, 5)
    _, more, other = begun(hidden_size=32)
    with pytest.raises(ts.CheckpointError, match="has shape"):
        load_checkpoint(tmp_path, like=(more, other))
    with pytest.raises(ts.UsageError, match="optimizer_state cannot be"):
        save_checkpoint(weights, {}, 1, tmp_path)
    with pytest.raises(ts.UsageError, match=r"like cannot be .*dict(.|\n)*like=\(weights, state\)"):
        load_checkpoint(tmp_path, like=weights)  # type: ignore[arg-type]
    ts.checkpoint.save("own", weights, root=tmp_path / "own", async_io=False, quiet=True)
    with pytest.raises(ts.CheckpointError, match=r"'own' in .* has no configuration"):
        load_checkpoint(tmp_path / "own")
    (tmp_path / "file").write_text("")
    with pytest.raises(ts.CheckpointError, match="cannot be written"):
        save_checkpoint(weights, state, 1, tmp_path / "file")
    (tmp_path / "old" / "step-00000007").mkdir(parents=True)
    (tmp_path / "old" / "step-00000007" / "state.json").write_text("{}")
    with pytest.raises(ts.CheckpointError, match=r"older form(.*\n)+.*: step-00000007"):
        load_checkpoint(tmp_path / "old")
