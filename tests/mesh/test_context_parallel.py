"""Context-parallel models: the loss and gradients of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.train.memory import program_bytes
from tests.cases import LONG
from tests.mesh.test_train_gpt import corpus, example, run

__all__ = ["corpus", "example", "run"]
RNG = np.random.default_rng(5)
IDS, LABELS = RNG.integers(0, 64, (2, 4, 32))
SMALL: dict[str, Any] = {"vocab": 64, "seq": 32, "d": 32, "layers": 2, "heads": 4}
MESHES = {"one": {"dp": 1}, "dp,cp": {"dp": 2, "cp": 4}, "all": {"dp": 2, "cp": 2, "tp": 2}}


def gradients(mesh_name: str, **options: Any) -> tuple[float, dict[str, Any]]:
    ts.seed(0)
    axes = MESHES.get(mesh_name) or {"dp": 2, "tp": 4}
    mesh = dist.Mesh(tuple(axes), shape=axes)
    plan = dist.strategy("data_parallel")
    plan = plan + dist.strategy("tensor_parallel") if "tp" in axes else plan
    model = dist.place(nn.GPT(nn.GPTConfig(**SMALL, **options)), plan, mesh)
    batch = dist.place((IDS, LABELS), plan, mesh, kind="batch")

    @ts.jit
    def both(model: Any, ids: Any, labels: Any) -> Any:
        loss = model.loss(ids, labels)
        return loss, ts.grad(loss, model.parameters())

    loss, grads = both(model, *batch)
    return loss.item(), {name: g.numpy() for name, g in grads.items()}


MODELS: list[dict[str, Any]] = [
    {"positions": "rotary", "norm": "rms"},
    {"positions": "alibi", "block": "parallel", "biases": ("qkv", "out", "mlp"), "tied": True},
    {"kv_heads": 2, "loop": True, "remat": True},
]


@cache
def alone(which: int) -> tuple[float, dict[str, Any]]:
    return gradients("one", **MODELS[which])


@pytest.mark.parametrize(
    ("mesh", "options", "which"),
    [
        ("dp,cp", {"context": "ring"}, 0),
        pytest.param("dp,cp", {"context": "ring"}, 1, marks=LONG),
        pytest.param("dp,cp", {"context": "ring"}, 2, marks=LONG),
        ("dp,cp", {"context": "all_to_all"}, 0),
        pytest.param("all", {"context": "ring", "sequence_parallel": "tp"}, 0, marks=LONG),
        pytest.param("all", {"context": "ring"}, 1, marks=LONG),
        ("all", {"context": "ring", "sequence_parallel": "tp"}, 2),
        ("all", {"context": "all_to_all", "sequence_parallel": "tp"}, 1),
        pytest.param("dp,tp", {"sequence_parallel": "tp"}, 0, marks=LONG),
        ("dp,tp", {"sequence_parallel": "tp"}, 1),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(
    mesh: str, options: dict[str, Any], which: int
) -> None:
    expected, whole = alone(which)
    loss, grads = gradients(mesh, **MODELS[which], **options)
    assert abs(loss - expected) < 1e-5
    for name, g in whole.items():
        np.testing.assert_allclose(grads[name], g, rtol=0, atol=1e-6, err_msg=name)


def test_in_bf16_it_rounds_no_worse_than_plain_attention() -> None:
    mesh = dist.Mesh(("cp",), devices=4)
    *qkv, c = np.random.default_rng(0).normal(size=(4, 2, 2, 64, 16)).astype(np.float32)
    split = [ts.tensor(x, mesh=mesh, layout="[2, 2, 64@cp, 16]") for x in qkv]

    def both(fn: Any, xs: Any) -> list[Any]:
        def run(*xs: Any) -> Any:
            y = fn(*xs)
            return y, *ts.grad((y * c).sum(), list(xs))

        return [r.numpy().astype(np.float32) for r in ts.jit(run)(*xs)]

    exact = both(nn.attention, qkv)
    with ts.autocast("bf16"):
        plain, ring = both(nn.attention, qkv), both(nn.ring_attention, split)
    for e, p, r in zip(exact, plain, ring, strict=True):
        assert 0 < np.linalg.norm(r - e) < 1.2 * np.linalg.norm(p - e)


def test_outside_a_function_too() -> None:
    mesh = dist.Mesh(("cp",), devices=2)
    x = np.random.default_rng(1).normal(size=(1, 2, 8, 4)).astype(np.float32)
    found, expected = [], []
    for fn, t, out in (
        (nn.ring_attention, ts.tensor(x, mesh=mesh, layout="[1, 2, 8@cp, 4]"), found),
        (nn.attention, ts.tensor(x), expected),
    ):
        y = fn(t, t, t)
        out += [y.numpy(), ts.grad((y * y).sum(), t).numpy()]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_ring_outside_of_functions_takes_sequences_of_all_lengths() -> None:
    """Warnings are errors in this test; its recordings for each length give none."""
    mesh = dist.Mesh(("cp",), devices=2)
    for seq in (4, 8, 12, 16):
        x = ts.ones((1, 1, seq, 2)).numpy()
        t = ts.tensor(x, mesh=mesh, layout=f"[1, 1, {seq}@cp, 2]")
        np.testing.assert_allclose(nn.ring_attention(t, t, t).numpy(), x, rtol=1e-6)


def test_logits_come_in_the_order_of_the_tokens() -> None:
    found = []
    for axes, context in (({"dp": 1}, None), ({"dp": 2, "cp": 4}, "ring")):
        ts.seed(3)
        mesh = dist.Mesh(tuple(axes), shape=axes)
        model = dist.place(nn.GPT(nn.GPTConfig(**SMALL, context=context)), None, mesh)
        found.append(ts.jit(model)(ts.tensor(IDS, mesh=mesh)).numpy())
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize("given", ["ids", "labels", "mask"])
def test_the_order_is_one_where_only_some_of_the_arguments_have_a_mesh(given: str) -> None:
    """Weights without a placement, and the other arguments, are host arrays."""
    mesh, found = dist.Mesh(("cp",), devices=4), []
    mask = (np.arange(32) >= np.array([[0], [5], [17], [31]])).astype(np.int32)
    for context in (None, "ring"):
        ts.seed(3)
        model = nn.GPT(nn.GPTConfig(**SMALL, context=context))
        args: dict[str, Any] = {"ids": IDS, "labels": LABELS, "mask": mask}
        if context is not None:
            args[given] = ts.tensor(args[given], mesh=mesh)
        plain = model.loss(args["ids"], args["labels"]).item()
        masked = model.loss(args["ids"], args["labels"], args["mask"]).item()
        logits = model(args["ids"], args["mask"]).numpy() * mask[:, :, None]
        found.append([plain, masked, *logits.reshape(-1)])
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


THERE = (np.arange(32) >= np.array([[0], [5], [17], [31]])).astype(np.int32)
STARTS = np.arange(32) // np.array([[7], [32], [16], [3]]) * np.array([[7], [32], [16], [3]])
SEES = RNG.uniform(size=(4, 1, 32, 32)) < 0.5
TOLD: dict[str, dict[str, Any]] = {
    "padding": {"attention_mask": THERE},
    "documents": {"position_ids": (np.arange(32) - STARTS).astype(np.int32)},
    "scores": {"attention_mask": SEES | np.eye(32, dtype=bool)},
    "windows": {},
}
KINDS: dict[str, dict[str, Any]] = {
    "padding": {},
    "documents": {"positions": "rotary"},
    "scores": {"positions": "alibi"},
    "windows": {"positions": "rotary", "windows": (5, 0), "kv_heads": 2},
}


def logits_and_gradients(mesh_name: str, told: str, context: str | None) -> Any:
    ts.seed(3)
    axes = MESHES[mesh_name]
    mesh = dist.Mesh(tuple(axes), shape=axes)
    plan = dist.strategy("data_parallel")
    plan = plan + dist.strategy("tensor_parallel") if "tp" in axes else plan
    config = nn.GPTConfig(**SMALL, **KINDS[told], context=context)
    model = dist.place(nn.GPT(config), plan, mesh)
    batch = {"ids": IDS, **TOLD[told]}
    labels = np.where(THERE > 0, LABELS, -100)
    batch, labels = dist.place((batch, labels), plan, mesh, kind="batch")

    @ts.jit
    def both(model: Any, batch: Any, labels: Any) -> Any:
        loss = model.loss(labels=labels, **batch)
        return model(**batch), ts.grad(loss, model.parameters())

    y, grads = both(model, batch, labels)
    return y.numpy(), {name: g.numpy() for name, g in grads.items()}


@cache
def told_alone(told: str) -> Any:
    return logits_and_gradients("one", told, None)


@pytest.mark.parametrize(
    ("mesh", "context", "told"),
    [
        ("dp,cp", "ring", "padding"),
        pytest.param("dp,cp", "ring", "documents", marks=LONG),
        pytest.param("dp,cp", "ring", "scores", marks=LONG),
        pytest.param("dp,cp", "ring", "windows", marks=LONG),
        ("all", "ring", "windows"),
        pytest.param("all", "ring", "padding", marks=LONG),
        pytest.param("all", "all_to_all", "padding", marks=LONG),
        ("all", "all_to_all", "documents"),
        pytest.param("dp,cp", "all_to_all", "scores", marks=LONG),
    ],
)
def test_masks_documents_and_windows_are_those_of_one_device(
    mesh: str, context: str, told: str
) -> None:
    want, whole = told_alone(told)
    y, grads = logits_and_gradients(mesh, told, context)
    seen = THERE > 0 if told == "padding" else np.ones_like(THERE, dtype=bool)
    np.testing.assert_allclose(y[seen], want[seen], rtol=0, atol=1e-5)
    for name, g in whole.items():
        np.testing.assert_allclose(grads[name], g, rtol=0, atol=1e-6, err_msg=name)


@LONG
@pytest.mark.parametrize(
    ("mesh", "context"),
    [("dp=2,cp=4", "ring"), ("dp=2,cp=2,tp=2", "all_to_all")],
)
def test_the_demo_trains_as_on_dp(run: Any, mesh: str, context: str) -> None:
    _, plain = run("dp=8")
    folder, rows = run(mesh, context=context)
    for a, b in zip(plain, rows, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-4
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4
    wire = "permute" if context == "ring" else "all_to_all"
    assert wire in (folder / "graph.txt").read_text()


@pytest.mark.parametrize("causal", [False, True])
def test_a_device_holds_the_scores_of_one_step(causal: bool) -> None:
    """The memory of a device does not grow with the number of steps."""

    @ts.jit
    def gradients(*qkv: ts.Tensor) -> Any:
        return ts.grad((nn.ring_attention(*qkv, causal=causal) ** 2).sum(), list(qkv))

    found = []
    for n in (2, 8):
        mesh = dist.Mesh(("cp",), shape={"cp": n})
        ones = np.ones((1, 4, 256 * n, 16), np.float32)
        x = ts.tensor(ones, mesh=mesh, layout=f"[1, 4, {256 * n}@cp, 16]")
        gradients(x, x + 1, x - 1)
        found.append(program_bytes(gradients).temporary)
    assert found[1] < 1.3 * found[0]
