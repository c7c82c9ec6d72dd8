"""Training configurations: the effect of every key, and errors for unknown keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim
from tessera.data import create_dataloader
from tessera.train import recipe
from tessera.train.config import ALIASES, KEYS, checked
from tessera.train.memory import held, program_bytes
from tessera.train.saving import checkpoints, save_checkpoint
from tests.mesh.recipes import (
    BLOCK,
    SMALL,
    Tree,
    batch,
    begun,
    grads_of,
    shape,
    stepped,
    sums,
    toy,
    trained,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
CHECKS: dict[str, Callable[[], None]] = {}


def key(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Marks a function as the check of the keys `names`."""

    def mark(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return mark


# -- the model ------------------------------------------------------------------------------------
@key("vocab_size", "hidden_size")
def table() -> None:
    assert shape("embed.weight", vocab_size=48, hidden_size=24) == (48, 24)


@key("num_layers", "num_heads", "intermediate_size")
def sizes() -> None:
    assert shape(f"{BLOCK}attention.out", num_layers=3, num_heads=4) == (3, 4, 4, 16)
    assert shape(f"{BLOCK}mlp.up") == (1, 16, 64)
    assert shape(f"{BLOCK}mlp.up", intermediate_size=20) == (1, 16, 20)


@key("num_kv_heads")
def key_value_heads() -> None:
    assert shape(f"{BLOCK}attention.kv") is None
    assert shape(f"{BLOCK}attention.kv", num_kv_heads=1) == (1, 16, 2, 1, 8)


@key("norm", "activation", "positions", "tie_embeddings")
def kinds() -> None:
    plain = recipe.initialize_model_weights(SMALL)
    assert {"norm.bias", "position", "head"} <= plain.keys() and f"{BLOCK}mlp.gate" not in plain
    other = recipe.initialize_model_weights(
        SMALL
        | {"norm": "rms", "activation": "swiglu", "positions": "rotary", "tie_embeddings": True}
    )
    assert not {"norm.bias", "position", "head"} & other.keys() and f"{BLOCK}mlp.gate" in other


@key("dropout")
def dropped() -> None:
    ids = ts.tensor(batch()["input_ids"])
    c, weights, _ = begun(dropout=0.5)
    for config, differ in ((c, True), (c | {"dropout": 0.0}, False)):
        run = ts.jit(recipe.make_model(config).__call__)
        assert np.array_equal(run(ids, weights).numpy(), run(ids, weights).numpy()) is not differ


@key("seed")
def seeded() -> None:
    a, b, c = (recipe.initialize_model_weights(SMALL | {"seed": s})["head"] for s in (1, 1, 2))
    assert np.array_equal(a.numpy(), b.numpy()) and not np.array_equal(a.numpy(), c.numpy())


# -- the data -------------------------------------------------------------------------------------
@key("batch_size", "sequence_length")
def loaded() -> None:
    c = {**SMALL, "data": np.arange(400) % 32, "batch_size": 6, "sequence_length": 12}
    first = next(iter(create_dataloader(c)))
    assert first["input_ids"].shape == (6, 12)
    assert shape("position", sequence_length=12) == (12, 16)


# -- the optimizer --------------------------------------------------------------------------------
@key("optimizer")
def kinds_of_optimizer() -> None:
    kinds = {
        "adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD, "momentum": optim.Momentum,
        "lion": optim.Lion, "adafactor": optim.Adafactor,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert type(recipe.optimizer_of({"optimizer": name})) is kind
    assert toy(optimizer="sgd")[0] == pytest.approx(2 - 0.1 * 0.5)
    assert toy(optimizer="lion")[0] == pytest.approx(2 - 0.1)


@key("learning_rate", "min_learning_rate", "warmup_steps", "total_steps", "schedule")
def rates() -> None:
    c = {"learning_rate": 1.0, "min_learning_rate": 0.25, "warmup_steps": 3, "total_steps": 13}
    for name, middle, end in (
        ("cosine", 0.625, 0.25),
        ("linear", 0.625, 0.25),
        ("constant", 1.0, 1.0),
        ("inverse_sqrt", (3 / 8) ** 0.5, (3 / 13) ** 0.5),
    ):
        rate = recipe.schedule_of(c | {"schedule": name})
        found = [rate(step).item() for step in (3, 8, 13)]
        assert found == pytest.approx([1.0, middle, end], rel=1e-5)
    warm = recipe.schedule_of(c)
    assert [warm(s).item() for s in (0, 1, 2)] == pytest.approx([0.25, 0.5, 0.75])
    assert toy(optimizer="sgd", learning_rate=0.4)[0] == pytest.approx(2 - 0.4 * 0.5)


@key("betas")
def moments() -> None:
    _, state = toy(betas=(0.75, 0.5))
    assert state["m"]["w"].numpy()[0, 0] == pytest.approx(0.25 * 0.5)
    assert state["v"]["w"].numpy()[0, 0] == pytest.approx(0.5 * 0.25)


@key("eps")
def epsilon() -> None:
    assert toy()[0] == pytest.approx(1.9) and toy(eps=0.5)[0] == pytest.approx(2 - 0.1 / 2)


@key("momentum")
def trace() -> None:
    after = toy(steps=2, optimizer="momentum", momentum=0.5)[0]
    assert after == pytest.approx(2 - 0.1 * 0.5 - 0.1 * 0.75)


@key("weight_decay")
def decay() -> None:
    assert toy(grad=0.0, weight_decay=0.5)[0] == pytest.approx(2 - 0.1 * 0.5 * 2)


@key("gradient_clip_norm")
def clipped() -> None:
    free = optim.global_norm(
        {k: ts.tensor(g) for k, g in grads_of(gradient_clip_norm=0)[1].items()}
    )
    cut = optim.global_norm(
        {k: ts.tensor(g) for k, g in grads_of(gradient_clip_norm=0.01)[1].items()}
    )
    assert free.item() > 0.1 and cut.item() == pytest.approx(0.01, rel=1e-4)


@key("accumulation_steps")
def in_parts() -> None:
    want, grads = grads_of(gradient_clip_norm=0)
    for count in (2, 4):
        loss, found = grads_of(gradient_clip_norm=0, accumulation_steps=count)
        assert loss == pytest.approx(want, abs=1e-5)
        for name, g in found.items():
            np.testing.assert_allclose(g, grads[name], atol=1e-5)
    c, weights, state = begun(accumulation_steps=4)
    step = ts.jit(recipe.training_step)
    step(recipe.make_model(c), batch(), weights, state, c)
    loops = [n for n in step.graph.nodes if n.op == "scan"]
    assert any(n.attrs["length"] == 4 and n.attrs["body"].name == "microbatches" for n in loops)


@key("reduce_dtype")
def summed_in() -> None:
    mesh = dist.Mesh(("dp",), devices=2)
    for count in (1, 4):
        for dtype in (None, "f32", "bf16", "f16"):
            step, *args = stepped(1, mesh, reduce_dtype=dtype, accumulation_steps=count)
            found = sums(step.programs[0], args[1], *args)
            assert {name for _, name, _ in found} == {dtype or "f32"}


# -- precision ------------------------------------------------------------------------------------
@key("mixed_precision")
def narrow() -> None:
    for value, name in ((False, "f32"), (True, "bf16"), ("bf16", "bf16"), ("fp16", "f16")):
        c, weights, _ = begun(mixed_precision=value)
        logits = ts.jit(recipe.make_model(c).__call__)(batch()["input_ids"], weights)
        assert logits.dtype.name == name and weights["head"].dtype is ts.f32


@key("weight_dtype")
def kept_narrow() -> None:
    _, weights, state = trained(2, weight_dtype="bf16")
    assert {w.dtype for w in weights.values()} == {ts.bf16}
    assert {t.dtype for t in state["master"].values()} == {ts.f32}
    assert "master" not in begun()[2]


@key("loss_scale", "loss_scale_interval")
def scale() -> None:
    def first(**keys: Any) -> float:
        found: float = begun(**keys)[2]["loss_scale"].item()
        return found

    assert first() == 1.0 and first(mixed_precision="fp16") == 2.0**15
    plain, _, unscaled = trained(2)
    with pytest.warns(ts.OptionWarning, match="needs a loss_scale that is dynamic"):
        fixed, _, same = trained(2, loss_scale=256.0, loss_scale_interval=1)
    moving, _, moved = trained(2, loss_scale="dynamic", loss_scale_interval=1)
    assert [s["loss_scale"].item() for s in (unscaled, same, moved)] == [1.0, 256.0, 2.0**17]
    assert plain == pytest.approx(fixed, rel=1e-5) and plain == pytest.approx(moving, rel=1e-5)


# -- memory and files -----------------------------------------------------------------------------
@key("gradient_checkpointing")
def recomputed() -> None:
    bytes_of, losses = {}, {}
    for policy in (False, "products", True):
        c, weights, state = begun(gradient_checkpointing=policy, num_layers=3)
        step = recipe.make_step(c)
        losses[policy] = step(batch(), weights, state)[0].item()
        bytes_of[policy] = program_bytes(step.programs[0]).peak
    assert bytes_of[True] < bytes_of["products"] < bytes_of[False]
    assert list(losses.values()) == pytest.approx([losses[False]] * 3, abs=1e-6)
    for other, same in (("save", False), ("recompute", True)):
        a, b = (checked({"gradient_checkpointing": v}).model().remat for v in (other, same))
        assert a == b or (a, b) == ("recompute", True)


@key("offload_optimizer_state")
def away() -> None:
    losses, _, state = trained(3, offload_optimizer_state=True)
    assert losses == pytest.approx(trained(3)[0], abs=1e-6)
    moments = {"m": state["m"], "v": state["v"]}
    weights = sum(w.size for w in recipe.initialize_model_weights(SMALL).values())
    assert held(moments).device == 0 and held(moments).host == 2 * 4 * weights


@key("checkpoint_folder", "keep_checkpoints", "keep_every", "keep_best", "keep_metric")
def saved(folder: Path | None = None) -> None:
    assert folder is not None
    rows: list[tuple[Tree, list[int]]] = [
        ({}, [1, 2, 3, 4]),
        ({"keep_checkpoints": 2}, [3, 4]),
        ({"keep_checkpoints": 1, "keep_every": 3}, [3, 4]),
        ({"keep_checkpoints": 1, "keep_best": 1}, [2, 4]),
        ({"keep_checkpoints": 1, "keep_best": 1, "keep_metric": "other"}, [1, 4]),
    ]
    for i, (keys, steps) in enumerate(rows):
        where = folder / str(i)
        _, weights, state = begun(checkpoint_folder=str(where), **keys)
        for step, loss in ((1, 0.4), (2, 0.2), (3, 0.3), (4, 0.5)):
            save_checkpoint(weights, state, step, metrics={"loss": loss, "other": step})
        assert checkpoints(where) == steps


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
def test_keys_change_what_they_say(check: Callable[..., None], tmp_path: Path) -> None:
    check(tmp_path) if check is saved else check()


def test_every_key_has_a_check() -> None:
    assert CHECKS.keys() == KEYS.keys()


def test_every_key_is_in_the_documentation_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    want = [(k, f"`{f.default!r}`".replace("'", '"'), f.metadata["what"]) for k, f in KEYS.items()]
    assert rows == want


# -- wrong configurations -------------------------------------------------------------------------
WRONG: dict[str, Any] = {
    "vocab_size": 0, "hidden_size": 1.5, "num_layers": True, "num_heads": None, "num_kv_heads": 0,
    "intermediate_size": "4", "norm": "batch", "activation": "relu", "positions": 3,
    "tie_embeddings": 1, "dropout": 1.0, "seed": -1, "batch_size": "8", "sequence_length": None,
    "optimizer": "adamax", "learning_rate": float("nan"), "min_learning_rate": -1.0,
    "schedule": "step", "warmup_steps": 0.5, "total_steps": 0, "betas": (0.9,), "eps": 0.0,
    "momentum": 1, "weight_decay": True, "gradient_clip_norm": None, "accumulation_steps": 0,
    "mixed_precision": "fp8", "weight_dtype": "f64", "reduce_dtype": "int8",
    "loss_scale": "static",
    "loss_scale_interval": 0, "gradient_checkpointing": "all", "offload_optimizer_state": "yes",
    "checkpoint_folder": "", "keep_checkpoints": 0,
    "keep_every": 0, "keep_best": -1, "keep_metric": "",
}  # fmt: skip


def test_one_error_names_every_wrong_key() -> None:
    assert WRONG.keys() == KEYS.keys()
    with pytest.raises(ts.UsageError) as caught:
        checked(WRONG | {"no_such_key": 1, "packing": "tight"})
    lines = str(caught.value).splitlines()
    assert lines[0] == f"config: {len(WRONG) + 2} keys are wrong"
    assert [line.split()[0] for line in lines[1:-2]] == [*WRONG, "no_such_key", "packing"]
    assert "at" in lines[-2] and "correct them" in lines[-1]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_heads": 3, "hidden_size": 16}, "num_heads : 3 does not divide hidden_size"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads : 3 does not divide num_heads"),
        ({"batch_size": 6, "accumulation_steps": 4}, "4 does not divide batch_size 6"),
        ({"warmup_steps": 9, "total_steps": 9}, "warmup_steps : 9 is not below total_steps 9"),
        ({"min_learning_rate": 1.0}, "min_learning_rate : 1.0 is above learning_rate 0.0003"),
        ({"keep_best": 2}, "keep_best : says what stays besides the newest"),
        ({"d_model": 8, "hidden_size": 8}, "hidden_size : says what 'd_model' says too"),
        (
            {"num_attention_heads": 2, "num_heads": 4},
            "num_heads : says what 'num_attention_heads' says too: leave out one of them",
        ),
    ],
)
def test_keys_that_do_not_fit_together(keys: Tree, said: str) -> None:
    with pytest.raises(ts.UsageError, match=re.escape(said)):
        checked(keys)


@pytest.mark.parametrize("bad", [None, 3, "abc", [1], object()])
def test_what_is_no_configuration(bad: Any) -> None:
    with pytest.raises(ts.UsageError, match="it cannot be"):
        checked(bad)


def test_numbers_of_numpy_become_plain_ones_that_a_checkpoint_can_write() -> None:
    c = checked({
        "vocab_size": np.int64(64), "learning_rate": np.float32(0.5), "tie_embeddings": np.True_,
        "betas": np.array([0.5, 0.25], np.float32),
    })  # fmt: skip
    assert json.loads(json.dumps(asdict(c)))["betas"] == [0.5, 0.25]
    assert (c.vocab_size, c.learning_rate, c.tie_embeddings) == (64, 0.5, True)
    with pytest.raises(ts.UsageError, match="mixed_precision : array"):
        checked({"mixed_precision": np.array(["a", "b"])})


def test_aliases_and_the_loaders_keys_are_known() -> None:
    c = checked({"d_model": 64, "num_attention_heads": 4, "data": "x.bin", "shuffle": False})
    assert (c.hidden_size, c.num_heads) == (64, 4)
    assert set(ALIASES) == {"d_model", "num_attention_heads"}
    assert checked(c) is c


# -- the functions --------------------------------------------------------------------------------
def test_the_functional_model_is_the_module() -> None:
    ids = ts.tensor(batch()["input_ids"])
    for keys in (
        {},
        {"num_kv_heads": 1, "positions": "rotary", "norm": "rms", "tie_embeddings": True},
    ):
        c = checked(SMALL | keys)
        weights = recipe.initialize_model_weights(c)
        model = nn.GPT(c.model())
        model.load_parameters(weights)
        before = ts.random.state()
        got = ts.jit(recipe.transformer_model)(ids, weights)
        assert ts.random.state() == before
        np.testing.assert_allclose(
            got.numpy(), ts.jit(lambda m, x: m(x))(model, ids).numpy(), atol=1e-6
        )


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(ts.UsageError, match=r"missing : embed\.weight, blocks"):
        recipe.transformer_model(ts.tensor(batch()["input_ids"]), {"w": ts.zeros(3)})


def test_the_ways_to_update_agree() -> None:
    c, weights, state = begun(weight_decay=0.1)
    grads = {name: ts.ones(w.shape) for name, w in weights.items()}
    want, after = recipe.optimizer_step(weights, grads, state, c)
    in_place = dict(state)
    found = [recipe.apply_optimizer_update(weights, grads, in_place)]
    config = {**c, "optimizer_state": dict(state)}
    found.append(recipe.adam_optimizer(weights, grads, config))
    each = recipe.initialize_parameter_states(weights, c)
    found.append(
        {n: recipe.adam_update_single_param(w, grads[n], each[n]) for n, w in weights.items()}
    )
    for new in found:
        for name, w in new.items():
            np.testing.assert_allclose(w.numpy(), want[name].numpy(), atol=1e-7)
    assert in_place["step"].item() == config["optimizer_state"]["step"].item() == 1
    assert after["step"].item() == each["head"]["step"].item() == 1
    assert state["step"].item() == 0


def test_adam_in_a_compiled_function_keeps_its_state_in_the_config() -> None:
    c, weights, state = begun()
    config = {**c, "optimizer_state": state}

    @ts.jit
    def step(batch: Tree, weights: Tree, config: Tree) -> Any:
        loss = recipe.compute_loss(recipe.transformer_model, batch, weights)
        return loss, recipe.adam_optimizer(weights, ts.grad(loss, weights), config)

    for _ in range(3):
        _, weights = step(batch(), weights, config)
    assert config["optimizer_state"]["step"].item() == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda w, s: recipe.adam_optimizer(w, w, {}), "the config holds no optimizer state"),
        (lambda w, s: recipe.apply_optimizer_update(w, w, {}), "optimizer_state cannot be"),
        (
            lambda w, s: recipe.adam_update_single_param(w["w"], w["w"], {}),
            "optimizer_state cannot be",
        ),
        (lambda w, s: recipe.clip_gradients(w, 0.0), "max_norm cannot be 0.0"),
    ],
)
def test_states_that_are_none(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(ts.UsageError, match=re.escape(said)):
        call({"w": ts.zeros(3)}, {})
