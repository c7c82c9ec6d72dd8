"""LoRA adapters: the sum of weights, frozen bases, training on meshes, merging."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import checkpoint, dist, nn, optim
from tessera.train.generate import generate
from tests.mesh.test_decode import made

BOTH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
IDS = np.random.default_rng(1).integers(0, 48, (4, 12)).astype(np.int32)
LABELS = np.roll(IDS, -1, 1)


def adapted(targets: str = "*.q|*.v|*.out|*.up", **choices: Any) -> nn.GPT:
    """A GPT with adapters whose B is not zero."""
    model = nn.lora(made(**choices), r=3, alpha=6.0, targets=targets)
    draw = np.random.default_rng(2)
    model.load_parameters({
        n: ts.tensor(draw.normal(0, 0.2, p.shape).astype(np.float32))
        for n, p in model.trainable_parameters().items()
    })  # fmt: skip
    return model


def logits(model: Any, ids: Any = IDS) -> Any:
    return ts.jit(lambda model, ids: model(ids))(model, ts.tensor(ids)).numpy()


def test_a_weight_is_read_with_its_adapter() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    x = ts.tensor(np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32))
    before = model(x).numpy()
    assert nn.lora(model, r=2, alpha=8.0, targets="*1") is model
    np.testing.assert_array_equal(model(x).numpy(), before)  # B is zero
    own = model.parameters()
    names = [n for n, p in own.items() if p.requires_grad]
    assert [n.rpartition(".")[2] for n in names] == ["weight_lora_a", "weight_lora_b"]
    assert own[names[0]].numpy().std() > 0.1
    own[names[1]].put(ts.ones((2, 3)))
    first, second = (m for m in model.modules() if isinstance(m, nn.Linear))
    base, a = vars(second)["weight"].numpy(), own[names[0]].numpy()
    want = first(x).numpy() @ (base + 4.0 * a @ np.ones((2, 3), np.float32)) + second.bias.numpy()
    np.testing.assert_allclose(model(x).numpy(), want, rtol=0, atol=1e-5)
    assert isinstance(second, nn.Linear) and repr(second).startswith("Linear(")


@pytest.mark.parametrize("choices", [
    {}, {"stacked": False}, {"kv_heads": 2, "positions": "rotary", "activation": "swiglu"},
    {"loop": True, "kv_heads": 1}, {"remat": True},
], ids=str)  # fmt: skip
def test_merged_computes_as_unmerged(choices: dict[str, Any]) -> None:
    model = adapted(**choices)
    want, plain = logits(model), logits(made(**choices))
    assert abs(want - plain).max() > 0.1
    nn.merge_lora(model)
    assert not [n for n in model.parameters() if "lora" in n]
    assert type(model) is nn.GPT and not model.trainable_parameters()
    np.testing.assert_allclose(logits(model), want, rtol=0, atol=3e-5)


def test_only_the_part_that_is_named_is_adapted() -> None:
    """Of a fused weight."""
    model, plain = adapted("*.v"), made()
    merged = {str(n): t.numpy() for n, t in nn.merge_lora(model).state_dict().items()}
    for name, t in plain.state_dict().items():
        same = merged[str(name)] == t.numpy()
        if str(name).endswith("attention.qkv"):
            assert same[:, :, :2].all() and not same[:, :, 2].any()
        else:
            assert same.all()


def trained(
    mesh: Any = None, plan: Any = None, steps: int = 3, start: Any = adapted
) -> tuple[nn.GPT, Any, list[float]]:
    """A model whose adapters were trained by AdamW, the optimizer's state, and the losses."""
    model, opt = start(), optim.AdamW(0.01)
    ids, labels = ts.tensor(IDS), ts.tensor(LABELS)
    if mesh is not None:
        model = dist.place(model, plan, mesh)
        ids, labels = dist.place([ids, labels], plan, mesh, kind="batch")
    state = opt.init(model.trainable_parameters(), plan)

    @ts.jit
    def step(model: nn.GPT, state: Any, ids: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        loss = model.loss(ids, labels)
        weights = model.trainable_parameters()
        weights, new = opt.update(weights, ts.grad(loss, weights, layout=plan), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    losses = [step(model, state, ids, labels).item() for _ in range(steps)]
    return model, state, losses


PLANS = {
    f"zero {n}": (dist.strategy("zero_redundancy_optimizer", stage=n), {"dp": 4}) for n in (1, 2, 3)
} | {
    "tensor parallel": (dist.strategy("tensor_parallel"), {"tp": 4}),
    "both": (
        dist.strategy("zero_redundancy_optimizer", stage=3) + dist.strategy("tensor_parallel"),
        {"dp": 2, "tp": 2},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_adapters_are_trained_on_a_mesh_as_on_one_device(name: str) -> None:
    """The base is frozen: it has neither changes nor optimizer state."""
    plan, shape = PLANS[name]
    mesh = dist.Mesh(tuple(shape), shape=shape)
    want, _, want_losses = trained()
    model, state, losses = trained(mesh, plan)
    np.testing.assert_allclose(losses, want_losses, rtol=0, atol=2e-5)
    assert losses[2] < losses[0] - 0.05
    base = made().state_dict()
    for n, p in model.state_dict().items():
        if n in base:
            np.testing.assert_array_equal(p.numpy(), base[n].numpy())
        else:
            np.testing.assert_allclose(p.numpy(), want.state_dict()[n].numpy(), rtol=0, atol=2e-4)
    assert {*state["m"]} == {*model.trainable_parameters()} and len(state["m"]) == 8
    layouts = " ".join(str(p.type) for p in model.parameters().values())
    assert ("@tp" in layouts) == ("tp" in shape)
    assert ("@dp" in layouts) == ("3" in name or name == "both")
    np.testing.assert_allclose(
        logits(nn.merge_lora(model)), logits(nn.merge_lora(want)), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_costs_two_thirds_of_the_flops(name: str, dtype: str) -> None:
    """No gradient as large as a weight is formed or sent."""
    plan, shape = PLANS[name]
    config = nn.GPTConfig(vocab=16, seq=64, d=128, layers=2, heads=4)
    mesh = dist.Mesh(tuple(shape), shape=shape)
    ids = dist.place(np.zeros((4, 64), np.int32), plan, mesh, kind="batch")

    def graph(adapters: bool) -> Any:
        model = nn.GPT(config)
        if adapters:
            nn.lora(model, r=1, targets="*.attention.*|*.mlp.*")
        model = dist.place(model, plan, mesh)

        @ts.jit
        def gradients(model: nn.GPT, ids: ts.Tensor) -> Any:
            return ts.grad(model.loss(ids, ids), model.trainable_parameters(), layout=plan)

        with ts.autocast(dtype):
            return gradients.plan(model, ids).graph

    assert graph(True).flops < 0.7 * graph(False).flops


def test_a_module_with_adapters_is_copied_and_pickled() -> None:
    model = adapted()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.parameters().keys() == model.parameters().keys()
        np.testing.assert_array_equal(logits(other), logits(model))


def test_mistakes() -> None:
    model = made()
    with pytest.raises(ts.UsageError, match=r"lora: '\*.query' fits no matrix"):
        nn.lora(model, r=2, targets="*.query")
    nn.lora(model, r=2, targets="*.q")
    with pytest.raises(ts.UsageError, match="has an adapter already"):
        nn.lora(model, r=2, targets="*.q|*.v")
    with pytest.raises(ts.UsageError, match="the model has no adapter"):
        nn.merge_lora(made())
    with pytest.raises(ts.UsageError, match="r cannot be 0"):
        nn.lora(made(), r=0)


def test_text_is_generated_with_adapters() -> None:
    model = adapted(positions="rotary")
    prompts = [[1, 2, 3], [4]]
    found = generate(model, prompts, 8, temperature=0.0)
    assert found != generate(made(positions="rotary"), prompts, 8, temperature=0.0)
    assert found == generate(nn.merge_lora(model), prompts, 8, temperature=0.0)


def test_a_checkpoint_has_the_adapters(tmp_path: Path) -> None:
    model, other = adapted(), nn.lora(made(), r=3, alpha=6.0, targets="*.q|*.v|*.out|*.up")
    checkpoint.save("one", model, root=tmp_path)
    checkpoint.load("one", other, root=tmp_path)
    np.testing.assert_array_equal(logits(other), logits(model))
    alike = copy.deepcopy(model)
    nn.merge_lora(model)
    np.testing.assert_allclose(logits(alike), logits(model), rtol=0, atol=3e-5)


class Two(nn.Module):
    def __init__(self, shared: bool) -> None:
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if shared:
            self.b.weight = self.a.weight

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return self.b(ts.tanh(self.a(x)))


def test_what_has_no_adapter(tmp_path: Path) -> None:
    model = nn.lora(made(positions="learned"), r=2)
    assert not [n for n in model.trainable_parameters() if "position" in n]
    with pytest.raises(ts.UsageError, match="save_hf: the model has adapters"):
        checkpoint.save_hf(model, tmp_path / "hf")
    with pytest.raises(ts.UsageError, match=r"'a.weight' is a weight of two modules|'a' is a"):
        nn.lora(Two(shared=True), r=2)


@pytest.mark.parametrize("first", ["lora", "remat"])
def test_adapters_of_recomputed_modules(first: str) -> None:
    """They are pickled, and merged into modules that are still recomputed."""
    model: nn.Module = Two(shared=False)
    model = ts.remat(nn.lora(model, r=2)) if first == "lora" else nn.lora(ts.remat(model), r=2)
    own = {n: ts.ones(p.shape) for n, p in model.trainable_parameters().items()}
    model.load_parameters(own)
    x = ts.ones((2, 4))
    want = model(x).numpy()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again(x).numpy(), want)
    merged = nn.merge_lora(again)
    np.testing.assert_allclose(merged(x).numpy(), want, rtol=0, atol=1e-6)
    assert not merged.trainable_parameters() and type(merged) is type(ts.remat(Two(shared=False)))
