"""Guide 4, training at scale: the reader's values, and the checks of its blocks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist
from tessera.data import create_dataloader, create_distributed_dataloader
from tessera.train import recipe
from tessera.train.saving import checkpoints, load_checkpoint, save_checkpoint
from tests.guide.given import GIVEN

Space = dict[str, Any]
VOCAB = 32


def sizes(space: Space) -> Space:
    """Sizes of a small model, and a token file in which each token is the previous one plus one, so
    that the model can learn it."""
    np.tile(np.arange(VOCAB, dtype=np.uint16), 200).tofile("tokens.bin")
    return {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 2,
            "data": "tokens.bin", "data_dtype": "uint16", "epochs": 10}  # fmt: skip


GIVES = {
    "SMALL": sizes,
    "create_dataloader": lambda s: create_dataloader,
    "create_distributed_dataloader": lambda s: create_distributed_dataloader,
    "save_checkpoint": lambda s: save_checkpoint,
    **{
        name: lambda s, name=name: getattr(recipe, name)
        for name, what in GIVEN[4].items()
        if what == "tessera.train.recipe"
    },
}


def first(space: Space) -> tuple[Space, Space, Space]:
    """Returns (a batch, weights, the configuration), made as in the text."""
    config = space["create_training_config"]()
    batch = next(iter(create_dataloader(config)))
    return batch, space["initialize_model_weights"](config), config


def loss_of(batch: Space, weights: Space) -> float:
    """NumPy's cross-entropy of the model's logits."""
    logits = recipe.transformer_model(ts.tensor(np.asarray(batch["input_ids"])), weights).numpy()
    z = logits.reshape(-1, VOCAB).astype(np.float64)
    y = np.asarray(batch["labels"]).reshape(-1)
    z -= z.max(-1, keepdims=True)
    return float((np.log(np.exp(z).sum(-1)) - z[np.arange(len(y)), y]).mean())


def defined(space: Space, shown: str) -> None:
    """it is defined; the loop below it runs it"""


def the_loss(space: Space, shown: str) -> None:
    """the annotations are tensor types, and a call is checked against them"""
    assert callable(space["compute_loss"])


def the_configuration(space: Space, shown: str) -> None:
    """the recipe reads the configuration of the text"""
    config = space["create_training_config"]()
    assert config["weight_decay"] == 0.01 and config["mixed_precision"] is True


def the_loop(space: Space, shown: str) -> None:
    """101 steps: logged twice, from ln 32 down to the minimum of the data; a checkpoint that
    opens"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        weights = space["train_single_gpu"]()
    lines = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["Step 0", "Step 100"]
    before, after = (float(line.rsplit(" ", 1)[1]) for line in lines)
    assert abs(before - np.log(VOCAB)) < 0.5 and after < 0.5
    assert checkpoints("checkpoints") == [0] and Path("checkpoints").is_dir()
    assert load_checkpoint("checkpoints").weights.keys() == weights.keys()


def the_mixed_step(space: Space, shown: str) -> None:
    """the scale grows; if a gradient overflows, the step is skipped and the scale halved"""
    batch, weights, config = first(space)
    state = recipe.initialize_optimizer_state(weights, config | {"loss_scale": 1024.0})
    step, out = ts.jit(space["mixed_precision_step"]), io.StringIO()
    loss, moved = step(space["transformer_model"], batch, weights, state)
    assert abs(loss.item() - loss_of(batch, weights)) < 0.05  # bf16
    assert state["loss_scale"].item() > 1024.0
    state["loss_scale"] = ts.tensor(3e38)
    with contextlib.redirect_stdout(out):
        _, same = step(space["transformer_model"], batch, moved, state)
    assert out.getvalue().startswith("Gradient overflow detected, reducing loss scale to ")
    assert state["loss_scale"].item() == np.float32(1.5e38)
    assert all(np.array_equal(w.numpy(), moved[k].numpy()) for k, w in same.items())


def the_parallel_step(space: Space, shown: str) -> None:
    """on 4 devices, with a plain batch: each has a part of its rows, and the final weights are
    those of one device"""
    batch, weights, config = first(space)
    batch = {k: np.asarray(v) for k, v in batch.items()}

    def state() -> Space:
        return {**config, "optimizer_state": recipe.initialize_optimizer_state(weights, config)}

    results = []
    for count in (1, 4):
        step = ts.jit(space["data_parallel_step"])
        with dist.Mesh(("dp",), devices=count):
            here = {k: ts.tensor(w.numpy()) for k, w in weights.items()}
            results.append(step(space["transformer_model"], batch, here, state()))
    moved = {n.attrs["axes"] for n, _ in step.graph.collectives() if n.op == "all_reduce"}
    assert moved == {("dp",)}
    (loss, want), (same, new) = results
    assert abs(loss.item() - same.item()) < 1e-5
    for k, w in new.items():
        np.testing.assert_allclose(w.numpy(), want[k].numpy(), rtol=1e-3, atol=1e-5)


def the_setup(space: Space, shown: str) -> None:
    """it finds all devices"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        mesh, *_ = space["setup_data_parallel_training"]()
    assert out.getvalue() == f"Detected {mesh.size} GPUs: {list(range(mesh.size))}\n"
    assert mesh.size > 1


def the_parallel_loop(space: Space, shown: str) -> None:
    """it trains on all devices, and logs the loss of all rows"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        space["train_data_parallel"]()
    found, *lines = out.getvalue().splitlines()
    losses = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert found.startswith("Detected ") and lines[0].startswith("Step 0: Global Loss = ")
    assert abs(losses[0] - np.log(VOCAB)) < 0.5


def the_accumulation(space: Space, shown: str) -> None:
    """four parts of a batch give the whole batch's loss and gradients"""
    batch, weights, _ = first(space)
    batch = {k: np.asarray(v) for k, v in batch.items()}
    parts = [{k: v[i : i + 2] for k, v in batch.items()} for i in range(0, 8, 2)]
    step = ts.jit(space["gradient_accumulation_step"])
    loss, grads = step(space["transformer_model"], parts, weights, 4)
    whole, wanted = step(space["transformer_model"], [batch], weights, 1)
    assert abs(loss.item() - whole.item()) < 1e-5 and set(grads) == set(weights)
    for k, g in grads.items():
        np.testing.assert_allclose(g.numpy(), wanted[k].numpy(), rtol=1e-3, atol=1e-5)


def the_owners(space: Space, shown: str) -> None:
    """each device holds a quarter of the state, and the weights are Adam's"""
    batch, weights, config = first(space)
    step = ts.jit(space["gradient_accumulation_step"])
    _, grads = step(space["transformer_model"], [batch], weights, 1)
    with dist.Mesh(("dp",), devices=4):
        here = {k: ts.tensor(w.numpy()) for k, w in weights.items()}
        states = recipe.initialize_parameter_states(here, config)
        given = {k: g.numpy() for k, g in grads.items()}
        new = ts.jit(space["zero_optimizer_step"])(here, given, states)
    stored = [t.type.local_bytes for s in states.values() for t in s.values() if hasattr(t, "type")]
    whole = sum(2 * w.type.nbytes for w in here.values())
    assert sum(stored) <= whole / 4 + 4 * len(states)
    adam = recipe.optimizer_of(recipe.checked(config))
    want, _ = ts.jit(adam.update)(weights, grads, adam.init(weights))
    for k, w in new.items():
        np.testing.assert_allclose(w.numpy(), want[k].numpy(), rtol=1e-4, atol=1e-6)


def bf16(*shape: int) -> ts.Tensor:
    rng = np.random.default_rng(sum(shape))
    return ts.tensor(rng.normal(size=shape) * 0.3, dtype=ts.bf16)


TP = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


def the_linear_layer(space: Space, shown: str) -> None:
    """columns over tp, gathered: the layer of one device"""
    x, w, b = bf16(2, 4, 32), bf16(32, 64), bf16(64)
    with TP:
        y = ts.jit(space["tensor_parallel_linear"])(x, w, b)
    wide = [t.to(ts.f32).numpy() for t in (x, w, b)]
    np.testing.assert_allclose(y.to(ts.f32).numpy(), wide[0] @ wide[1] + wide[2], atol=0.05)


def the_attention(space: Space, shown: str) -> None:
    """heads over tp, summed at the end: causal attention of one device"""
    x, w_qkv, w_out, heads = bf16(2, 4, 32), bf16(32, 96), bf16(32, 32), 8
    with TP:
        z = ts.jit(space["tensor_parallel_attention"])(x, w_qkv, w_out, heads)
    wide = [t.to(ts.f32).numpy() for t in (x, w_qkv, w_out)]
    q, k, v = (
        t.reshape(2, 4, heads, 4).swapaxes(1, 2) for t in np.split(wide[0] @ wide[1], 3, axis=-1)
    )
    scores = np.where(np.tri(4, dtype=bool), q @ k.swapaxes(-1, -2) / 2, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = (p / p.sum(-1, keepdims=True)) @ v
    want = out.swapaxes(1, 2).reshape(2, 4, 32) @ wide[2]
    np.testing.assert_allclose(z.to(ts.f32).numpy(), want, atol=0.08)


CHECKS = {
    "4/Basic Training Setup/code": defined,
    "4/Basic Training Setup/compute_loss": the_loss,
    "4/Basic Training Setup/training_step": defined,
    "4/Basic Training Setup/create_training_config": the_configuration,
    "4/Basic Training Setup/train_single_gpu": the_loop,
    "4/Mixed Precision Training/mixed_precision_step": the_mixed_step,
    "4/Multi-GPU Data Parallelism/data_parallel_step": the_parallel_step,
    "4/Multi-GPU Data Parallelism/setup_data_parallel_training": the_setup,
    "4/Multi-GPU Data Parallelism/train_data_parallel": the_parallel_loop,
    "4/Advanced Data Parallel Features/gradient_accumulation_step": the_accumulation,
    "4/Advanced Data Parallel Features/zero_optimizer_step": the_owners,
    "4/Tensor Parallelism Implementation/tensor_parallel_linear": the_linear_layer,
    "4/Tensor Parallelism Implementation/tensor_parallel_attention": the_attention,
}
