"""The guides' snippets as written, and the results that the text states.

The text is read from the folder of guides beside this repository; if it is missing, these tests are
skipped.
"""

from __future__ import annotations

import contextlib
import io
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph
from tessera.data import create_dataloader, create_distributed_dataloader
from tessera.train import recipe
from tessera.train.accumulate import micro_batches
from tessera.train.config import checked
from tessera.train.saving import checkpoints, load_checkpoint, save_checkpoint
from tests.cases import LONG
from tests.guide.__main__ import lines
from tests.guide.given import GIVEN, free_names
from tests.guide.reading import Space, guide_text, in_order
from tests.guide.runner import snippets, substituted
from tests.guide.substitutions import RUN, SUBSTITUTIONS, WAITING

GUIDES = sorted({int(name.split("/")[0]) for name in (*RUN, *WAITING)})
SIZES = {"vocab_size": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 2}


# -- the table ------------------------------------------------------------------------------------
@pytest.mark.parametrize("guide", GUIDES)
def test_every_snippet_runs_or_waits(guide: int) -> None:
    names = [s.name for s in snippets(guide, guide_text(guide)[1])]
    listed = [n for n in (*RUN, *WAITING) if n.startswith(f"{guide}/")]
    assert sorted(names) == sorted(listed)


@pytest.mark.parametrize("s", SUBSTITUTIONS, ids=lambda s: f"{s.guide}: {s.old}")
def test_every_substitution_is_found_and_says_why(s: Any) -> None:
    before = snippets(s.guide, guide_text(s.guide)[1])
    assert substituted(before, [s]) != before and s.why


@pytest.mark.parametrize("guide", GUIDES)
def test_what_a_guide_leaves_to_the_reader_stands_in_the_table(guide: int) -> None:
    """Each name in the table is used by a block, and each undefined name is in the table."""
    table = [s for s in SUBSTITUTIONS if s.guide == guide]
    found = substituted(snippets(guide, guide_text(guide)[1]), table)
    assert {name for _, names in free_names(found) for name in names} == set(GIVEN[guide])
    with pytest.raises(LookupError, match=r"\['help'\] are not in the table of given names"):
        in_order(guide, {"help": None}, ("no section",))


def test_each_block_is_shown_with_what_was_changed_and_given() -> None:
    for guide in GUIDES:
        guide_text(guide)
    told = "\n".join(lines())
    for name in (*RUN, *WAITING):
        assert f"{name}  " in told
    for s in SUBSTITUTIONS:
        assert f"    {s.old!r} is {s.new!r}: {s.why}\n" in told
    for given in GIVEN.values():
        assert all(f"    {name} is given: {what}\n" in told for name, what in given.items())


# -- guide 3 --------------------------------------------------------------------------------------
@pytest.fixture
def tutorial() -> Space:
    return in_order(3, {"STAGES": dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2})})


def test_guide_3_a_kernel_sums_over_the_data_axis(tutorial: Space) -> None:
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    with tutorial["mesh"]:
        y = tutorial["dp_step"](ts.tensor(x, layout="[3, 8@dp]"))
    np.testing.assert_allclose(y.numpy(), x @ x.T, rtol=1e-4, atol=1e-5)
    assert str(y.type) == "f32[3, 3]"


@LONG
def test_guide_3_stages_of_blocks_train(tutorial: Space) -> None:
    step, model = tutorial["step"], tutorial["model"]
    rng = np.random.default_rng(0)
    batch = {
        "input": rng.normal(size=(4, 8, 16)).astype(np.float32),
        "labels": rng.integers(0, 16, (4, 8)).astype(np.int32),
    }
    losses = []
    for first in (True, False, False):
        # The batch is on no mesh, so all devices of a stage hold all of it.
        said = pytest.warns(ts.StrategyWarning, match="along 'dp' compute the same")
        with tutorial["STAGES"], said if first else nullcontext():
            grads, metrics = step(batch)
        losses.append(metrics["loss"].item())
        step.update({k: w - 0.5 * grads[k] for k, w in step.parameters.items()})
    assert losses[2] < losses[1] < losses[0]
    names = set(step.parameters)
    assert len(names) == len(grads) and any("encoder" in n for n in names)
    assert model.table.name == "1F1B" and model.schedule.mesh == tutorial["STAGES"]
    sent = {s.stage for s in model.schedule.steps if s.kind == "send"}
    assert sent == {0, 1} and all(w.mesh == tutorial["STAGES"] for w in grads.values())


def test_guide_3_a_mesh_and_a_table_too_large_for_any_device(tutorial: Space) -> None:
    space = tutorial
    assert space["mesh"].sizes == {"tp": 2, "dp": 4}
    e = space["E"]
    assert str(e.type) == "bf16[10000000@tp, 4096]" and e.type.local_shape == (5_000_000, 4096)


def test_guide_3_what_debugging_shows(tutorial: Space) -> None:
    """Section 4.6: layouts, the lowering of a model, the balance of transfer and compute."""
    table = str(dist.inspect(tutorial["E"]))
    assert "  a device  (5000000, 4096), 40,960,000,000 bytes" in table.splitlines()
    assert "  dim 0     split over tp" in table.splitlines() and tutorial["E"]._data is None

    recorded = graph.trace(tutorial["model"], np.zeros((4, 8, 16), np.float32))
    paths = [re.split("[/.]", n.scope) for n in recorded.nodes]
    parts = [path[1] for path in paths if len(path) > 2]
    assert list(dict.fromkeys(parts)) == ["encoder", "decoder"]

    x = ts.tensor(np.ones((3, 8), np.float32), mesh=tutorial["mesh"], layout="[3, 8@dp]")
    with dist.profile() as p:
        tutorial["dp_step"](x)
    assert "all_reduce" in str(p) and "transfer" in str(p)


# -- guide 4 --------------------------------------------------------------------------------------
@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    """Guide 4's names, with those that it leaves to the reader from `tessera.train`."""
    monkeypatch.chdir(tmp_path)
    counting = np.tile(np.arange(32, dtype=np.uint16), 200)
    counting.tofile(tmp_path / "tokens.bin")
    small = {**SIZES, "data": "tokens.bin", "data_dtype": "uint16", "epochs": 10}
    data = {"create_dataloader": create_dataloader, "save_checkpoint": save_checkpoint}
    supplied: Space = {**data, "create_distributed_dataloader": create_distributed_dataloader}
    steps = (name for name, what in GIVEN[4].items() if what == "tessera.train.recipe")
    supplied |= {name: getattr(recipe, name) for name in steps}
    made = in_order(4, {**supplied, "SMALL": small})
    # The model with the guide's own configuration: bf16 products, recomputed layers.
    made["transformer_model"] = recipe.make_model(made["create_training_config"]())
    return made


def test_guide_4_single_gpu_training(space: Space) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        weights = space["train_single_gpu"]()
    first, last = (float(line.rsplit(" ", 1)[1]) for line in out.getvalue().splitlines())
    assert out.getvalue().startswith("Step 0: Loss = ") and "Step 100: Loss = " in out.getvalue()
    assert first > 3.3 and last < 0.5  # starts at ln 32; each token is the previous one plus one
    assert checkpoints("checkpoints") == [0]
    saved = load_checkpoint("checkpoints")
    assert saved.weights.keys() == weights.keys() and saved.optimizer_state["step"].item() == 1


def batch_of(space: Space) -> tuple[Space, Space, Space]:
    config = space["create_training_config"]()
    weights = space["initialize_model_weights"](config)
    batch = next(iter(space["create_dataloader"](config)))
    return batch, weights, config


def test_guide_4_a_step_is_the_recipes_step(space: Space) -> None:
    batch, weights, config = batch_of(space)
    state = space["initialize_optimizer_state"](weights, config)
    args = space["transformer_model"], batch, weights, state, config
    loss, new, after = ts.jit(space["training_step"])(*args)
    ours, same, _ = ts.jit(recipe.training_step)(*args)
    assert loss.item() == pytest.approx(ours.item(), abs=1e-6)
    for name, w in new.items():
        np.testing.assert_allclose(w.numpy(), same[name].numpy(), atol=1e-6)
    assert after["step"].item() == 1


def test_guide_4_the_configuration_means_what_it_says(space: Space) -> None:
    config = space["create_training_config"]()
    batch, weights, _ = batch_of(space)
    assert batch["input_ids"].shape == (config["batch_size"], config["sequence_length"])
    logits = ts.jit(space["transformer_model"].__call__)(batch["input_ids"], weights)
    assert logits.dtype is ts.bf16 and weights["head"].dtype is ts.f32
    c = checked(config)
    assert c.remat is True and recipe.optimizer_of(c).weight_decay == 0.01
    rate = recipe.schedule_of(c)
    assert rate(config["warmup_steps"]).item() == pytest.approx(config["learning_rate"])
    assert rate(config["total_steps"]).item() == pytest.approx(0.0, abs=1e-9)


def test_guide_4_mixed_precision_grows_skips_and_recovers(space: Space) -> None:
    batch, weights, config = batch_of(space)
    state = space["initialize_optimizer_state"](weights, config | {"loss_scale": 1024.0})
    step = ts.jit(space["mixed_precision_step"])
    out = io.StringIO()

    def go(weights: Space) -> tuple[float, Space]:
        with contextlib.redirect_stdout(out):
            loss, weights = step(space["transformer_model"], batch, weights, state)
        return loss.item(), weights

    first, moved = go(weights)
    assert state["loss_scale"].item() == pytest.approx(1024.1024) and state["step"].item() == 1
    assert not np.array_equal(moved["head"].numpy(), weights["head"].numpy())
    state["loss_scale"] = ts.tensor(3e38)
    _, skipped = go(moved)
    assert state["loss_scale"].item() == pytest.approx(1.5e38) and state["step"].item() == 1
    assert (
        out.getvalue()
        == f"Gradient overflow detected, reducing loss scale to {ts.tensor(1.5e38)}\n"
    )
    for name, w in skipped.items():
        np.testing.assert_array_equal(w.numpy(), moved[name].numpy())
    state["loss_scale"] = ts.tensor(70000.0)
    second, _ = go(skipped)
    assert state["loss_scale"].item() == 65536.0 and state["step"].item() == 2 and second < first


def test_guide_4_gradient_accumulation_is_the_whole_batch(space: Space) -> None:
    batch, weights, config = batch_of(space)
    model = recipe.make_model(config | {"mixed_precision": False})  # in f32, to compare to 1e-5
    parts = micro_batches(batch, 4)
    loss, grads = ts.jit(space["gradient_accumulation_step"])(model, parts, weights, 4)

    @ts.jit
    def whole(batch: Space, weights: Space) -> Any:
        loss = recipe.compute_loss(model, batch, weights)
        return loss, ts.grad(loss, weights)

    want, wanted = whole(batch, weights)
    assert loss.item() == pytest.approx(want.item(), abs=1e-5)
    for name, g in grads.items():
        np.testing.assert_allclose(g.numpy(), wanted[name].numpy(), atol=1e-5)


def test_guide_4_data_parallel_is_the_step_on_one_device(space: Space) -> None:
    batch, weights, config = batch_of(space)
    config |= {"mixed_precision": False}
    model = recipe.make_model(config)

    def state() -> Space:
        return {**config, "optimizer_state": space["initialize_optimizer_state"](weights, config)}

    def alone(batch: Space, weights: Space, config: Space) -> Any:
        loss = recipe.compute_loss(model, batch, weights)
        return loss, space["adam_optimizer"](weights, ts.grad(loss, weights), config)

    with dist.Mesh(("dp",), devices=4):
        here = {k: ts.tensor(v.numpy()) for k, v in weights.items()}
        loss, new = ts.jit(space["data_parallel_step"])(model, batch, here, state())
    want, wanted = ts.jit(alone)(batch, weights, state())
    assert loss.item() == pytest.approx(want.item(), abs=1e-5)
    for name, w in new.items():
        np.testing.assert_allclose(w.numpy(), wanted[name].numpy(), rtol=1e-4, atol=1e-6)


@LONG
def test_guide_4_data_parallel_training(space: Space) -> None:
    space["transformer_model"] = recipe.make_model(space["create_training_config"]())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        space["train_data_parallel"]()
    first, *rest = out.getvalue().splitlines()
    assert first == "Detected 8 GPUs: [0, 1, 2, 3, 4, 5, 6, 7]"
    assert rest[0].startswith("Step 0: Global Loss = 3.")


def test_guide_4_owners_update_their_weights(space: Space) -> None:
    """ "Each GPU only stores optimizer state for subset of parameters": no more bytes than the
    strategy's ZeRO-1, and Adam's numbers."""
    _, weights, config = batch_of(space)
    rng = np.random.default_rng(0)
    grads = {k: rng.normal(size=w.shape).astype(np.float32) for k, w in weights.items()}
    zero_1 = dist.strategy("zero_redundancy_optimizer", "dp", stage=1)
    adam = recipe.optimizer_of(checked(config))

    def wire_bytes(step: Any) -> int:
        return sum(n.wire_bytes * times for n, times in step.graph.collectives())

    with dist.Mesh(("dp",), devices=4) as mesh:
        here = {k: ts.tensor(v.numpy()) for k, v in weights.items()}
        states = recipe.initialize_parameter_states(here, config)
        step = ts.jit(space["zero_optimizer_step"])
        new = step(here, grads, states)
        placed = dist.place(here, zero_1, mesh)
        planned = ts.jit(adam.update)
        want, state = planned(
            placed,
            {k: ts.tensor(g, mesh=mesh) for k, g in grads.items()},
            adam.init(placed, zero_1),
        )
    assert 0 < wire_bytes(step) <= 1.1 * wire_bytes(planned)
    stored = [t.type.local_bytes for s in states.values() for t in s.values() if hasattr(t, "type")]
    whole = sum(2 * w.type.nbytes for w in here.values())
    assert sum(stored) <= whole / 4 + 4 * len(states)  # m and v, and a step count for each
    for name, w in new.items():
        np.testing.assert_allclose(w.numpy(), want[name].numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            states[name]["m"].numpy(), state["m"][name].numpy(), rtol=1e-5, atol=1e-6
        )


def test_guide_4_tensor_parallel_layers(space: Space) -> None:
    rng = np.random.default_rng(0)
    heads, d = 8, 32

    def bf16(*shape: int) -> ts.Tensor:
        return ts.tensor(rng.normal(size=shape) * 0.3, dtype=ts.bf16)

    x, w, b = bf16(2, 4, d), bf16(d, 64), bf16(64)
    with dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4}):
        y = ts.jit(space["tensor_parallel_linear"])(x, w, b)
        w_qkv, w_out = bf16(d, 3 * d), bf16(d, d)
        z = ts.jit(space["tensor_parallel_attention"])(x, w_qkv, w_out, heads)
    wide = [t.to(ts.f32).numpy() for t in (x, w, b, w_qkv, w_out)]
    np.testing.assert_allclose(y.to(ts.f32).numpy(), wide[0] @ wide[1] + wide[2], atol=0.05)
    q, k, v = (
        t.reshape(2, 4, heads, d // heads).swapaxes(1, 2)
        for t in np.split(wide[0] @ wide[3], 3, axis=-1)
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d // heads)
    scores = np.where(np.tri(4, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = (p / p.sum(-1, keepdims=True)) @ v
    want = out.swapaxes(1, 2).reshape(2, 4, d) @ wide[4]
    np.testing.assert_allclose(z.to(ts.f32).numpy(), want, atol=0.08)
