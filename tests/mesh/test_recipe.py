"""Does every key of a training configuration change what it says, and nothing unknown pass?"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tessera as ts
from tessera import dist, nn, optim
from tessera.data import create_dataloader
from tessera.train import recipe
from tessera.train.accumulate import accumulated, micro_batches
from tessera.train.config import ALIASES, KEYS, checked
from tessera.train.guard import Guard, TrainState
from tessera.train.memory import held, program_bytes
from tessera.train.run import Run
from tessera.train.saving import checkpoints, load_checkpoint, save_checkpoint
from tests.cases import LONG

Tree = dict[str, Any]
SMALL: Tree = {
    "vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "sequence_length": 8,
    "batch_size": 4, "learning_rate": 1e-2, "total_steps": 100, "weight_decay": 0.0,
}  # fmt: skip
BLOCK = "blocks.block."
PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
CHECKS: dict[str, Callable[[], None]] = {}


def key(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Marks a function as the check of the keys `names`."""

    def mark(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return mark


def batch(rows: int = 4, seed: int = 0) -> Tree:
    ids = np.random.default_rng(seed).integers(0, 32, (rows, 8)).astype(np.int32)
    return {"input_ids": ids, "labels": np.roll(ids, -1, 1)}


def begun(**keys: Any) -> tuple[Tree, Tree, Tree]:
    """(config, weights, optimizer state)."""
    c = SMALL | keys
    weights = recipe.initialize_model_weights(c)
    return c, weights, recipe.initialize_optimizer_state(weights, c)


def trained(steps: int, **keys: Any) -> tuple[list[float], Tree, Tree]:
    c, weights, state = begun(**keys)
    step = recipe.make_step(c)
    losses = []
    for _ in range(steps):
        loss, weights, state = step(batch(), weights, state)
        losses.append(loss.item())
    return losses, weights, state


def shape(name: str, **keys: Any) -> tuple[int, ...] | None:
    found = recipe.initialize_model_weights(SMALL | keys).get(name)
    return None if found is None else found.shape


def toy(grad: float = 0.5, steps: int = 1, **keys: Any) -> tuple[float, Tree]:
    """(the one weight, which was 2, after steps against one gradient; the state)."""
    c = SMALL | {"learning_rate": 0.1, "schedule": "constant"} | keys
    weights: Tree = {"w": ts.full((2, 2), 2.0)}
    state = recipe.initialize_optimizer_state(weights, c)
    for _ in range(steps):
        weights, state = recipe.optimizer_step(weights, {"w": ts.full((2, 2), grad)}, state, c)
    return weights["w"].numpy()[0, 0].item(), state


def grads_of(**keys: Any) -> tuple[float, Tree]:
    c, weights, state = begun(**keys)
    loss, grads, _ = ts.jit(recipe.gradients_of)(recipe.make_model(c), batch(), weights, state, c)
    return loss.item(), {name: g.numpy() for name, g in grads.items()}


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


def sums(step: Any, weights: Tree, *args: Any) -> Counter[tuple[str, str, int]]:
    """How often a call runs which sum over devices of as many elements as a matrix has."""
    matrices = {t.size for t in weights.values() if t.size > 128}
    schedule = step.plan(*args)
    return Counter(
        {
            (n.op, n.args[0].type.dtype.name, n.args[0].type.size): times
            for n, times in schedule.graph.collectives()
            if n.op in ("all_reduce", "reduce_scatter") and n.args[0].type.size in matrices
        }
    )


def stepped(stage: int, mesh: dist.Mesh, **keys: Any) -> tuple[Any, Tree, Tree, Tree]:
    """(a step, its batch, weights and state) of eight rows under ZeRO at `stage`."""
    c = SMALL | {"batch_size": 8, "accumulation_steps": 4, **keys}
    plan = dist.strategy("zero_redundancy_optimizer", stage=stage)
    weights = dist.place(recipe.initialize_model_weights(c), plan, mesh)
    state = recipe.initialize_optimizer_state(weights, c, plan)
    step = recipe.make_step(c)
    return step, dist.place(batch(8), plan, mesh, kind="batch"), weights, state


@key("reduce_dtype")
def summed_in() -> None:
    mesh = dist.Mesh(("dp",), devices=2)
    for count in (1, 4):
        for dtype in (None, "f32", "bf16", "f16"):
            step, *args = stepped(1, mesh, reduce_dtype=dtype, accumulation_steps=count)
            found = sums(step.programs[0], args[1], *args)
            assert {name for _, name, _ in found} == {dtype or "f32"}


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_summed_over_devices_after_the_last_microbatch(stage: int) -> None:
    """Of what lies whole; what lies split is divided in each, or would be whole in the sum."""
    step, *args = stepped(stage, dist.Mesh(("dp",), devices=2))
    found = sums(step.programs[0], args[1], *args)
    assert found and set(found.values()) == ({4} if stage == 3 else {1}), found


def test_stages_that_split_weights_add_up_microbatches_as_those_that_do_not() -> None:
    """Where bits are promised: the loss and the weights after two steps, also on a folded mesh."""
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
    if keys.get("offload_optimizer_state"):  # saving brings nothing back to the devices
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
    """Not what it said when the checkpoint was saved: neither the rate, nor where and what to
    keep."""
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
    """And a save by a thread is there once it is waited for."""
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
    with pytest.raises(ts.CheckpointError, match=r"is not in .*\n.*there are : step-00000001"):
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
